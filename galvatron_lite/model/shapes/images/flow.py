"""Operators on pictures and volumes, recorded on the tape of one layer.

Extents are (height, width) of pictures, (depth, height, width) of volumes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Operator, OperatorClass, Sharding
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.records import FP32, INDEX, ShapeCall, Value
from galvatron_lite.model.shapes.tape import Tape, memory_operator

Activation = Literal["relu", "relu6", "silu", "gelu", "none"]
Extent = tuple[int, ...]


def rounded(channels: float, divisor: int = 8, limit: float = 0.9) -> int:
    """Channels rounded to the nearest multiple, at least ``limit`` times ``channels``.

    Source: Howard et al. 2017 (arXiv:1704.04861), the authors' ``make_divisible``.
    """
    near = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return near + divisor if near < limit * channels else near


@dataclass(slots=True)
class ImageFlow:
    """A picture in a layer. Operators replace it in place and return the flow, so that calls can be chained."""

    tape: Tape  # of the layer
    value: Value  # the tensor
    channels: int
    extent: Extent
    passed: tuple[Value, ...] = ()  # other tensors that leave the layer

    @property
    def pixels(self) -> int:
        """Height x width (x depth)."""
        return prod(self.extent)

    def fork(self) -> ImageFlow:
        """Begin a branch with the same picture."""
        return ImageFlow(self.tape, self.value, self.channels, self.extent)

    def _name(self, operator: str) -> str:
        return f"{operator}{len(self.tape.records)}"

    def convolve(
        self, out: int, kernel: int | Extent = 1, stride: int = 1, groups: int = 1, *, bias: bool = False,
        padding: int | None = None,
    ) -> ImageFlow:  # fmt: skip
        """Convolution; keeps its input.

        Padding is half of the kernel by default, none where the stride is the kernel (patch embeddings).
        """
        kernels = (kernel,) * len(self.extent) if isinstance(kernel, int) else kernel
        padding = 0 if padding is None and kernel == stride and stride > 1 else padding
        pads = tuple(side // 2 if padding is None else padding for side in kernels)
        after = _windowed(self.extent, kernels, stride, pads)
        weight = out * (self.channels // groups) * prod(kernels)
        window = (*kernels, *(stride for _ in after), *pads, *(1 for _ in after))
        shape = (self.channels, out, groups, *self.extent, *window)
        return self._convolution("conv", shape, after, weight + out * bias, 2 * weight * prod(after))

    def transpose(self, out: int, stride: int, kernel: int) -> ImageFlow:
        """Transposed convolution with bias and without padding; keeps its input."""
        sides = len(self.extent)
        after = tuple(stride * (side - 1) + kernel for side in self.extent)
        weight = self.channels * out * kernel**sides
        window = (*(kernel,) * sides, *(-stride,) * sides, *(0,) * sides, *(1,) * sides)
        shape = (self.channels, out, 1, *self.extent, *window)
        return self._convolution("up", shape, after, weight + out, 2 * weight * self.pixels)

    def _convolution(self, name: str, shape: Extent, after: Extent, weights: int, flops: int) -> ImageFlow:
        tape, x, out = self.tape, self.value, shape[1]
        result = tape.value(out * prod(after), x.sharding)
        tape.count(weights)
        moved = x.bytes + result.bytes
        operator = Operator(
            self._name(name), OperatorClass.CONVOLUTION, shape, 1, flops, 2 * flops if x.grad else flops, moved,
            2 * moved, weights * tape.item_bytes, x.sharding,
        )  # fmt: skip
        self.value = tape.record(ShapeCall((x,), result, saved=(x,), anchor=(result,)), operator)
        self.channels, self.extent = out, after
        return self

    def interpolate(self, times: int = 2) -> ImageFlow:
        """Linear interpolation to ``times`` the size; keeps nothing.

        Its window is that of a transposed convolution (Long et al. 2015, arXiv:1411.4038, section 3.3).
        """
        x, before, sides = self.value, self.extent, len(self.extent)
        self.extent = tuple(times * side for side in before)
        self.value = self.tape.value(self.channels * self.pixels, x.sharding)
        moved = x.bytes + self.value.bytes
        window = (*(2 * times - times % 2,) * sides, *(-times,) * sides, *(times // 2,) * sides, *(1,) * sides)
        operator = memory_operator(self._name("up"), self.value, moved, moved)
        shape = (*operator.shape, self.channels, *before, *window)
        self.tape.record(ShapeCall((x,), self.value), replace(operator, shape=shape))
        return self

    def normalise(self) -> ImageFlow:
        """Batch normalisation in training: keeps its input (statistics belong to the batch, not to a sample)."""
        x, statistics = self.value, 2 * self.channels
        self.tape.count(statistics)
        self.tape.buffer_bytes += statistics * FP32 + INDEX
        out = self.tape.like(x)
        operator = memory_operator(self._name("norm"), x, 3 * x.bytes, 5 * x.bytes, statistics * FP32)
        self.value = self.tape.record(ShapeCall((x,), out, saved=(x,)), replace(operator, statistics=statistics))
        return self

    def group_norm(self) -> ImageFlow:
        """Group normalisation and an activation in place; autocast runs both in fp32 and keeps both outputs.

        Passes in half precision: cast 3, norm 6, activation 4, cast 3; one more read each for the backward of both.
        """
        self.tape.count(2 * self.channels)
        if self.value.item_bytes >= FP32:
            return self.mix("norm", (5, 8), count=2)
        kept = tuple(self.tape.value(self.value.items, item_bytes=FP32) for _ in range(2))
        return self.mix("norm", (16, 20), count=4, saved=kept)

    def layer_norm(self, *, in_steps: bool = False) -> ImageFlow:
        """LayerNorm over the channels of each pixel: one kernel, or step by step."""
        norm = ops.layer_norm_in_steps if in_steps else ops.layer_norm
        self.value = norm(self.tape, self._name("norm"), self.value, self.channels)
        return self

    def activate(self, function: Activation = "relu") -> ImageFlow:
        """An activation: ReLU in place, which keeps its output; others keep their input."""
        name, x = self._name(function), self.value
        if function == "relu":
            self.tape.memory(name, (x,), x, 2 * x.bytes, 3 * x.bytes, saved=(x,))
        elif function != "none":
            self.value = ops.activation(self.tape, name, x)
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
        """Sum with a branch of the same shape."""
        first, second = self.value, other.value
        out = self.tape.value(first.items)
        moved = first.bytes + second.bytes + out.bytes
        self.value = self.tape.memory(self._name("add"), (first, second), out, moved, 0, shares_gradient=True)
        return self

    def concatenate(self, *others: ImageFlow) -> ImageFlow:
        """Channels of several branches of one extent side by side: one copy."""
        branches = (self, *others)
        self.channels = sum(branch.channels for branch in branches)
        out = self.tape.value(self.channels * self.pixels)
        parts = tuple(branch.value for branch in branches)
        self.value = self.tape.memory(self._name("cat"), parts, out, 2 * out.bytes)
        return self

    def view(self, channels: int) -> ImageFlow:
        """The first of the channels, a view, on a branch of its own."""
        items = self.value.items * channels // self.channels
        return ImageFlow(self.tape, self.value.view(items), channels, self.extent)

    def mixed(self, out: int, kernels: tuple[int, ...], stride: int = 1, *, depthwise: bool = False) -> ImageFlow:
        """Convolutions of several kernels, each on its part of the channels (Tan and Le 2019, arXiv:1907.09595)."""
        if len(kernels) == 1:
            return self.convolve(out, kernels[0], stride, self.channels if depthwise else 1)
        branches, parts = [], len(kernels)
        for index, kernel in enumerate(kernels):  # equal parts; the first has the remainder, too
            share, width = (items // parts + items % parts * (not index) for items in (self.channels, out))
            branch = self.view(share)
            copies = memory_operator(self._name("view"), branch.value, 2 * branch.value.bytes, 4 * branch.value.bytes)
            self.tape.extra(copies)  # a convolution copies a view to read it, also in backward
            branches.append(branch.convolve(width, kernel, stride, share if depthwise else 1))
        joined = branches[0].concatenate(*branches[1:])
        self.value, self.channels, self.extent = joined.value, joined.channels, joined.extent
        return self

    def concatenate_skip(self, channels: int) -> ImageFlow:
        """Concatenate a picture of another layer (``channels``, the same extent): one copy."""
        other = self.tape.value(channels * self.pixels, Sharding.NONE, self.value.item_bytes)
        return self.concatenate(ImageFlow(self.tape, other, channels, self.extent))

    def pad(self, pixels: int) -> ImageFlow:
        """Copy into a picture with ``pixels`` more along each side."""
        self.extent = tuple(side + pixels for side in self.extent)
        x, self.value = self.value, self.tape.value(self.channels * self.pixels)
        self.tape.memory(self._name("pad"), (x,), self.value, x.bytes + self.value.bytes)
        return self

    def pool(self, kernel: int, stride: int, *, maximum: bool = True, padding: int | None = None) -> ImageFlow:
        """A pooling window; maximum keeps eight bytes of index an output item, the mean keeps its input."""
        pad = kernel // 2 if padding is None else padding
        after = _windowed(self.extent, (kernel,) * len(self.extent), stride, (pad,) * len(self.extent))
        out = self.tape.value(self.channels * prod(after))
        indices = (self.tape.value(out.items, item_bytes=INDEX, grad=False),) if maximum else ()
        return self._pooled(out, after, (kernel, stride, pad), indices)

    def adaptive_mean(self, side: int) -> ImageFlow:
        """Mean pooling to ``side`` pixels along each side; keeps its input, unless ``side`` is 1."""
        if side == 1:
            return self.mean()
        stride = max(self.extent[0] // side, 1)
        window = (max(self.extent[0] - (side - 1) * stride, 1), stride, 0)
        out = self.tape.value(self.channels * side ** len(self.extent))
        return self._pooled(out, (side,) * len(self.extent), window, ())

    def _pooled(self, out: Value, after: Extent, window: tuple[int, int, int], indices: tuple[Value, ...]) -> ImageFlow:
        """Record pooling by a window (kernel, stride and padding of either side)."""
        moved = self.value.bytes + out.bytes + sum(value.bytes for value in indices)
        sides = (figure for figure in (*window, 1) for _ in self.extent)
        operator = memory_operator(self._name("pool"), out, moved, moved)
        operator = replace(operator, shape=(*operator.shape, self.channels, *self.extent, *sides))
        self.value = self.tape.record(ShapeCall((self.value,), out, saved=(self.value, *indices)), operator)
        self.extent = after
        return self

    def mean(self) -> ImageFlow:
        """Mean over all pixels: keeps nothing."""
        x, out = self.value, self.tape.value(self.channels, self.value.sharding)
        operator = replace(memory_operator(self._name("mean"), x, x.bytes, x.bytes), statistics=self.channels)
        self.value = self.tape.record(ShapeCall((x,), out), operator)
        self.extent = (1,) * len(self.extent)
        return self

    def flatten(self) -> ImageFlow:
        """View all items as channels of one pixel."""
        self.channels, self.extent = self.channels * self.pixels, (1,) * len(self.extent)
        return self

    def dropout(self, probability: float) -> ImageFlow:
        """Dropout; see ``ops.dropout``."""
        self.value = ops.dropout(self.tape, self._name("dropout"), self.value, probability)
        return self

    def scale(self) -> ImageFlow:
        """Product with a learned vector of one item a channel."""
        self.value = ops.scale(self.tape, self._name("scale"), self.value, self.channels)
        return self

    def linear(self, columns: int, *, bias: bool = True) -> ImageFlow:
        """A linear layer over the channels of each pixel."""
        self.value = ops.linear(
            self.tape, self._name("linear"), self.value, self.channels, columns, Sharding.NONE, bias=bias
        )
        self.channels = columns
        return self

    def squeeze(self, hidden: int) -> ImageFlow:
        """Squeeze and excitation (Hu et al. 2018): mean of all pixels, two 1 x 1 convolutions, product.

        Args:
            hidden: channels between the two; 0: one short convolution over the channels (ECA, Wang et al. 2020).
        """
        x, tape, pooled = self.value, self.tape, self.fork().mean()
        if hidden:
            pooled.linear(hidden).rectify().linear(self.channels)
        else:
            tape.count(3)
        out = tape.value(pooled.value.items)
        factors = tape.memory(self._name("gate"), (pooled.value,), out, 1, count=3)
        out, pair = tape.value(x.items), (x, factors)
        self.value = tape.memory(self._name("excite"), pair, out, 2 * x.bytes, 5 * x.bytes, saved=pair)
        return self

    def split_attention(self, radix: int, hidden: int, groups: int) -> ImageFlow:
        """Weighted sum of ``radix`` pictures that the channels hold (Zhang et al. 2020, arXiv:2004.08955)."""
        x, tape, channels = self.value, self.tape, self.channels // radix
        weights = ImageFlow(tape, x, channels, self.extent).mean()
        weights.convolve(hidden, 1, 1, groups, bias=True).normalise().activate()
        weights.convolve(self.channels, 1, 1, groups, bias=True).mix("gate", (2, 2), count=4, keeps=False)
        out = tape.value(x.items // radix)
        moved, pair = 3 * x.bytes + out.bytes, (x, weights.value)
        name = self._name("weigh")
        self.value = tape.memory(name, pair, out, moved, moved + 3 * x.bytes, like=x, saved=pair, count=2)
        self.channels = channels
        return self

    def covary(self, heads: int) -> ImageFlow:
        """Attention between the channels of each head; the picture's channels are queries, keys and values.

        Queries and keys are normalised in fp32; values, result and gradients are copied into the matmuls' layout.
        """
        tape, width = self.tape, self.channels // 3
        size, part = width // heads, self.value.bytes // 3
        self.mix("normalise", (9, 17), count=8)
        out, flops = tape.value(width * self.pixels), 2 * width * size * self.pixels
        shapes = ((width, self.pixels, size), (heads * self.pixels, size, size))
        for shape, source in zip(shapes, (self.value, out), strict=True):
            name = self._name("covary")
            operator = Operator(name, OperatorClass.MATMUL, shape, 1, flops, 2 * flops, 2 * part, 4 * part)
            tape.record(ShapeCall((self.value,), out, saved=(source,)), operator)
        self.value, self.channels = out, width
        return self

    def mix(
        self, name: str, passes: tuple[int, int], count: int = 1, *, keeps: bool = True, saved: tuple[Value, ...] = ()
    ) -> ImageFlow:
        """Element-wise kernels.

        Args:
            passes: times the picture is read or written, forward and backward.
            count: of kernels.
            keeps: whether the input is kept (copies keep nothing).
            saved: what is kept instead of the input.
        """
        x, out = self.value, self.tape.value(self.value.items)
        moved, back = (x.bytes * times for times in passes)
        saved = saved or (x,) * keeps
        self.value = self.tape.memory(self._name(name), (x,), out, moved, back, like=x, saved=saved, count=count)
        return self


def _windowed(extent: Extent, kernels: Extent, stride: int, pads: Extent) -> Extent:
    """The output extent of a window; refuses one that is larger than the picture."""
    after = tuple(
        (side + 2 * pad - kernel) // stride + 1 for side, kernel, pad in zip(extent, kernels, pads, strict=True)
    )
    if min(after) < 1:
        window, picture = (" x ".join(map(str, sides)) for sides in (kernels, extent))
        raise InputError("image_size", extent, f"Give larger pictures: a window of {window} passes over {picture}.")
    return after
