"""A picture on its way through one layer: which operators it passes, written on the layer's tape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from galvatron_lite.model.graph import Operator, OperatorClass
from galvatron_lite.model.shapes import convolution as rules
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.calls import Division, ShapeCall, Value
from galvatron_lite.model.shapes.convolution import Extent
from galvatron_lite.model.shapes.tape import Tape, memory_operator

Activation = Literal["relu", "relu6", "silu", "gelu", "none"]


def rounded(channels: float, divisor: int = 8, limit: float = 0.9) -> int:
    """Channels as MobileNet rounds them: to the nearest multiple, at least ``limit`` of what was asked.

    Source: Howard et al. 2017 (arXiv:1704.04861), the authors' ``make_divisible``.
    """
    near = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return near + divisor if near < limit * channels else near


@dataclass(slots=True)
class ImageFlow:
    """Where the picture stands."""

    tape: Tape  # of the layer it passes
    value: Value  # the picture as a tensor
    channels: int  # of it
    extent: Extent  # height and width of it, of a volume its depth before them

    @property
    def pixels(self) -> int:
        """Height x width (x depth)."""
        return prod(self.extent)

    def fork(self) -> ImageFlow:
        """The same picture on a branch of its own."""
        return ImageFlow(self.tape, self.value, self.channels, self.extent)

    def _name(self, what: str) -> str:
        return f"{what}{len(self.tape.records)}"

    def convolve(
        self,
        out: int,
        kernel: int | Extent = 1,
        stride: int = 1,
        groups: int = 1,
        *,
        bias: bool = False,
        padding: int | None = None,
    ) -> ImageFlow:
        """Convolution with half-kernel padding where none is given; a patch embedding (kernel = stride) has none."""
        if padding is None and kernel == stride and stride > 1:
            padding = 0
        self.value, self.extent = rules.convolution(
            self.tape, self._name("conv"), self.value, (self.channels, out), self.extent, kernel=kernel, stride=stride,
            padding=padding, groups=groups, bias=bias,
        )  # fmt: skip
        self.channels = out
        return self

    def split(self) -> ImageFlow:
        """The first half of the channels, a view, on a branch of its own."""
        half = replace(self.value, items=self.value.items // 2, storage=self.value.held)
        return ImageFlow(self.tape, half, self.channels // 2, self.extent)

    def normalise(self) -> ImageFlow:
        """Batch normalisation."""
        self.value = rules.batch_norm(self.tape, self._name("norm"), self.value, self.channels)
        return self

    def group_norm(self) -> ImageFlow:
        """Group normalisation, its activation in place behind it: autocast runs both in fp32, with casts around them.

        Passes in units of the picture at half precision, forward: cast 3, two reads and a write 6, activation 4, cast
        3; backward alike with one more read for each of the norm and the activation (PyTorch, "Automatic Mixed
        Precision", operators that autocast to float32).
        """
        self.tape.count(2 * self.channels)
        narrow = self.value.item_bytes < ops.FP32
        if not narrow:
            return self.mix("norm", (5, 8), count=2)
        x, tape = self.value, self.tape
        wide, active = (tape.value(x.items, Division.WHOLE, ops.FP32) for _ in range(2))
        operator = memory_operator(self._name("norm"), x, 16 * x.bytes, 20 * x.bytes, count=4)
        self.value = tape.record(ShapeCall((x,), tape.value(x.items, Division.WHOLE), saved=(wide, active)), operator)
        return self

    def layer_norm(self) -> ImageFlow:
        """LayerNorm over the channels of every pixel; autocast runs it in fp32, with a cast before and one after."""
        x, narrow = self.value, self.tape.item_bytes < ops.FP32
        self.value = ops.layer_norm(self.tape, self._name("norm"), x, self.channels)
        if narrow and x.item_bytes < ops.FP32:
            self._widen_kept(x)
        if narrow:
            wide = x.items * ops.FP32
            # cast in, where it is not fp32 already; the norm itself in fp32 beyond what it is counted with; cast out
            casts = (x.bytes + wide if x.item_bytes < ops.FP32 else 0) + 2 * wide - x.bytes + wide
            cast = memory_operator(self._name("cast"), self.value, casts, casts, count=2)
            self.value = self.tape.record(ShapeCall((self.value,), self.tape.value(x.items, Division.WHOLE)), cast)
        return self

    def _widen_kept(self, x: Value) -> None:
        """The norm keeps its input's fp32 copy, not the input itself."""
        call, operator = self.tape.records[-1]
        wide = self.tape.value(x.items, Division.WHOLE, ops.FP32)
        saved = tuple(wide if value.key == x.key else value for value in call.saved)
        self.tape.records[-1] = (replace(call, saved=saved), operator)

    def activate(self, function: Activation = "relu") -> ImageFlow:
        """An activation: ReLU in place; others keep their input, in place too (PyTorch keeps a copy for them)."""
        name = self._name(function)
        if function == "relu":
            self.value = rules.relu(self.tape, name, self.value)
        elif function != "none":
            self.value = ops.activation(self.tape, name, self.value)
        return self

    def rectify(self) -> ImageFlow:
        """ReLU into a new tensor."""
        self.value = ops.activation(self.tape, self._name("relu"), self.value, keeps_output=True)
        return self

    def unit(
        self, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, function: Activation = "relu"
    ) -> ImageFlow:
        """Convolution, batch normalisation, activation."""
        return self.convolve(out, kernel, stride, groups).normalise().activate(function)

    def add(self, other: ImageFlow) -> ImageFlow:
        """Sum with a branch of the same shape; in the wider precision of the two."""
        first, second = self.value, other.value
        out = self.tape.value(first.items, Division.WHOLE, max(first.item_bytes, second.item_bytes))
        operator = memory_operator(self._name("add"), out, first.bytes + second.bytes + out.bytes, 0)
        self.value = self.tape.record(ShapeCall((first, second), out, shares_gradient=True), operator)
        return self

    def concatenate(self, *others: ImageFlow) -> ImageFlow:
        """Channels of several branches of one extent side by side: one copy."""
        branches = (self, *others)
        self.channels = sum(branch.channels for branch in branches)
        out = self.tape.value(self.channels * self.pixels, Division.WHOLE)
        call = ShapeCall(tuple(branch.value for branch in branches), out)
        self.value = self.tape.record(call, memory_operator(self._name("cat"), out, 2 * out.bytes, 2 * out.bytes))
        return self

    def double(self, out: int = 0, more: int = 0) -> ImageFlow:
        """The picture at twice the size: by transposed convolution to so many channels; 0: by interpolation.

        Args:
            out: channels, or 0.
            more: pixels of a transposed convolution's kernel beyond two, and of the picture beyond twice the size.
        """
        name, tape, x, before = self._name("up"), self.tape, self.value, self.extent
        if out:
            channels = (self.channels, out)
            self.value, self.extent = rules.transposed(tape, name, x, channels, before, stride=2, kernel=2 + more)
            self.channels = out
        else:
            self.value, self.extent = rules.interpolated(tape, name, x, self.channels, before, times=2)
        return self

    def beside(self, channels: int) -> ImageFlow:
        """The picture with that of another layer, of so many channels and the same extent, before it: one copy."""
        other = self.tape.value(channels * self.pixels, Division.WHOLE, self.value.item_bytes)
        return self.concatenate(ImageFlow(self.tape, other, channels, self.extent))

    def surround(self, pixels: int) -> ImageFlow:
        """The picture copied into a larger one, so many pixels more along each side."""
        before, self.extent = self.value, tuple(side + pixels for side in self.extent)
        self.value = self.tape.value(self.channels * self.pixels, Division.WHOLE)
        moved = before.bytes + self.value.bytes
        operator = memory_operator(self._name("pad"), self.value, moved, moved)
        self.value = self.tape.record(ShapeCall((before,), self.value), operator)
        return self

    def shrink(self, side: int) -> ImageFlow:
        """Mean pooling to so many pixels along each side, which repeats pixels where there are fewer; keeps its input,
        but for the mean of all pixels."""
        if side == 1:
            self.value = rules.global_pool(self.tape, self._name("mean"), self.value, self.channels)
            self.extent = (1,) * len(self.extent)
            return self
        x, stride = self.value, max(self.extent[0] // side, 1)
        window = (max(self.extent[0] - (side - 1) * stride, 1), stride, 0)
        out = self.tape.value(self.channels * side ** len(self.extent), Division.WHOLE)
        operator = memory_operator(self._name("pool"), out, x.bytes + out.bytes, x.bytes + out.bytes)
        told = rules.windowed(operator, self.channels, self.extent, window)
        self.value, self.extent = self.tape.record(ShapeCall((x,), out, saved=(x,)), told), (side,) * len(self.extent)
        return self

    def flatten(self) -> ImageFlow:
        """All items as channels of one pixel: a view."""
        self.channels, self.extent = self.channels * self.pixels, (1,) * len(self.extent)
        return self

    def dropout(self, probability: float) -> ImageFlow:
        """Dropout; see ``ops.dropout``."""
        self.value = ops.dropout(self.tape, self._name("dropout"), self.value, probability)
        return self

    def enlarge(self, beside: int) -> ImageFlow:
        """The picture copied to the (larger) extent it stands at, with channels of another picture beside it."""
        self.channels += beside
        out = self.tape.value(self.channels * self.pixels, Division.WHOLE)
        operator = memory_operator(self._name("enlarge"), out, 2 * out.bytes, 2 * out.bytes, count=2)
        self.value = self.tape.record(ShapeCall((self.value,), out), operator)
        return self

    def scale(self) -> ImageFlow:
        """Product with a learned vector of one item a channel (layer scale).

        The vector is fp32 and a product of mixed precisions is in the wider one: the residual stream turns fp32.
        Backward takes two products, the cast of one where the input is narrower, and the sum of the other over all
        pixels for the vector's gradient.
        """
        x = self.value
        self.tape.count(self.channels)
        out = self.tape.value(x.items, Division.WHOLE, ops.FP32)
        moved = x.bytes + out.bytes
        cast = moved if x.item_bytes < out.item_bytes else 0
        operator = memory_operator(self._name("scale"), x, moved, 4 * out.bytes + moved + cast)
        self.value = self.tape.record(ShapeCall((x,), out, saved=(x,)), operator)
        return self

    def linear(self, columns: int, *, bias: bool = True) -> ImageFlow:
        """A linear layer over the channels of every pixel."""
        self.value = ops.linear(
            self.tape, self._name("linear"), self.value, self.channels, columns, Division.WHOLE, bias=bias
        )
        self.channels = columns
        return self

    def pool(self, kernel: int, stride: int, *, maximum: bool = True, padding: int | None = None) -> ImageFlow:
        """A pooling window; maximum keeps eight bytes of index an output item, the mean keeps its input."""
        pad = kernel // 2 if padding is None else padding
        after = rules.pooled_extent(self.extent, kernel, stride, pad)
        out = self.tape.value(self.channels * prod(after), Division.WHOLE)
        places = (self.tape.value(out.items, Division.WHOLE, ops.INDEX, grad=False),) if maximum else ()
        moved = self.value.bytes + out.bytes + sum(place.bytes for place in places)
        call = ShapeCall((self.value,), out, saved=(self.value, *places))
        operator = memory_operator(self._name("pool"), out, moved, moved)
        self.value = self.tape.record(call, rules.windowed(operator, self.channels, self.extent, (kernel, stride, pad)))
        self.extent = after
        return self

    def squeeze(self, hidden: int, *, gates: int = 0) -> ImageFlow:
        """Squeeze and excitation (Hu et al. 2018): mean of all pixels, two 1 x 1 convolutions, product.

        Args:
            hidden: channels between the two; 0: one short convolution over the channels (ECA, Wang et al. 2020).
            gates: small kernels besides (activations); 0: three.
        """
        x, tape = self.value, self.tape
        pooled = ImageFlow(
            tape, rules.global_pool(tape, self._name("squeeze"), x, self.channels), self.channels, (1, 1)
        )
        if hidden:
            pooled.linear(hidden).rectify().linear(self.channels)
        else:
            tape.count(3)
        gate = memory_operator(self._name("gate"), pooled.value, 1, 1, count=gates or 3)
        pooled.value = tape.record(ShapeCall((pooled.value,), tape.value(pooled.value.items, Division.WHOLE)), gate)
        out = tape.value(x.items, Division.WHOLE)
        product = memory_operator(self._name("excite"), x, 2 * x.bytes, 5 * x.bytes)
        self.value = tape.record(ShapeCall((x, pooled.value), out, saved=(x, pooled.value)), product)
        return self

    def part(self, channels: int) -> ImageFlow:
        """Some of the channels, a view, on a branch of its own; convolutions copy it to read it, and in backward."""
        items = self.value.items * channels // self.channels
        view = replace(self.value, items=items, storage=self.value.held)
        self.tape.extra(memory_operator(self._name("part"), view, 2 * view.bytes, 4 * view.bytes))
        return ImageFlow(self.tape, view, channels, self.extent)

    def mixed(self, out: int, kernels: tuple[int, ...], stride: int = 1, *, depthwise: bool = False) -> ImageFlow:
        """Convolutions of several kernels, each on its share of the channels, side by side (Tan and Le 2019)."""
        if len(kernels) == 1:
            return self.convolve(out, kernels[0], stride, self.channels if depthwise else 1)
        shares, outs = _shares(self.channels, len(kernels)), _shares(out, len(kernels))
        branches = [
            self.part(share).convolve(width, kernel, stride, share if depthwise else 1)
            for share, width, kernel in zip(shares, outs, kernels, strict=True)
        ]
        joined = branches[0].concatenate(*branches[1:])
        self.value, self.channels, self.extent = joined.value, joined.channels, joined.extent
        return self

    def choose(self, ways: int, hidden: int, groups: int) -> ImageFlow:
        """Weighted sum of pictures that lie side by side in the channels; two 1 x 1 convolutions find the weights."""
        x, tape, whole = self.value, self.tape, self.channels
        channels = whole // ways
        pooled = ImageFlow(tape, rules.global_pool(tape, self._name("gap"), x, channels), channels, (1, 1))
        pooled.convolve(hidden, 1, 1, groups, bias=True).normalise().activate()
        pooled.convolve(whole, 1, 1, groups, bias=True)
        gate = memory_operator(self._name("gate"), pooled.value, 1, 1, count=4)
        tape.record(ShapeCall((pooled.value,), pooled.value), gate)
        product = tape.value(x.items, Division.WHOLE)
        operator = memory_operator(self._name("weigh"), x, 2 * x.bytes, 5 * x.bytes)
        tape.record(ShapeCall((x, pooled.value), product, saved=(x, pooled.value)), operator)
        out = tape.value(x.items // ways, Division.WHOLE)
        moved = product.bytes + out.bytes
        operator = memory_operator(self._name("sum"), x, moved, moved)
        self.value, self.channels = tape.record(ShapeCall((product,), out), operator), channels
        return self

    def mix(self, name: str, passes: tuple[int, int], count: int = 1, *, keeps: bool = True) -> ImageFlow:
        """Element-wise kernels that read and write the picture so many times, forward and backward.

        Args:
            name: of the operator.
            passes: times the picture is read or written, forward and backward.
            count: kernels.
            keeps: whether the picture as it enters is kept (products with a plain number and copies keep nothing).
        """
        out = self.tape.value(self.value.items, Division.WHOLE)
        moved, back = (self.value.bytes * times for times in passes)
        operator = memory_operator(self._name(name), self.value, moved, back, count=count)
        saved = (self.value,) if keeps else ()
        self.value = self.tape.record(ShapeCall((self.value,), out, saved=saved), operator)
        return self

    def covary(self, heads: int) -> ImageFlow:
        """Attention between the channels of each head; the picture holds q, k and v side by side.

        Queries and keys are normalised over the tokens in fp32; both matmuls have heads x channels a head as rows or
        columns. Values and the result are copied into matmuls' layout, the three gradients into one tensor and back.
        """
        tape, width = self.tape, self.channels // 3
        size, part = width // heads, self.value.bytes // 3
        self.mix("normalise", (9, 17), count=8)
        out = tape.value(width * self.pixels, Division.WHOLE)
        flops = 2 * width * size * self.pixels
        shapes = ((width, self.pixels, size), (heads * self.pixels, size, size))
        for shape, source in zip(shapes, (self.value, out), strict=True):
            operator = Operator(
                self._name("covary"), OperatorClass.MATMUL, shape, 1, flops, 2 * flops, 2 * part, 4 * part
            )  # fmt: skip
            tape.record(ShapeCall((self.value,), out, saved=(source,)), operator)
        self.value, self.channels = out, width
        return self


def _shares(channels: int, count: int) -> list[int]:
    """Equal shares, what is left over in the first."""
    return [channels // count + (0 if index else channels % count) for index in range(count)]
