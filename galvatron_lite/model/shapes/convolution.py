"""Rules of convolutional operators, as ``ops`` has them for transformers.

Extents are (height, width) of pictures, (depth, height, width) of volumes.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass, Recompute, TensorSplit
from galvatron_lite.model.shapes import ops
from galvatron_lite.model.shapes.calls import Division, ShapeCall, Value
from galvatron_lite.model.shapes.tape import Tape, memory_operator, sharding_of

Extent = tuple[int, ...]


def convolution(
    tape: Tape,
    name: str,
    x: Value,
    channels: tuple[int, int],
    extent: Extent,
    *,
    kernel: int | Extent,
    stride: int = 1,
    padding: int | None = None,
    groups: int = 1,
    bias: bool = False,
) -> tuple[Value, Extent]:
    """A convolution of ``x`` (in, *extent); keeps its input. Returns the output and its extent."""
    inner, outer = channels
    sides = (kernel,) * len(extent) if isinstance(kernel, int) else kernel
    after = _after(extent, sides, stride, padding)
    out = tape.value(outer * prod(after), x.part)
    weight = outer * (inner // groups) * prod(sides)
    flops = 2 * weight * prod(after)
    tape.count(weight + outer * bias)
    moved = x.bytes + out.bytes
    told = (*sides, *(stride for _ in sides), *_pads(sides, padding), *(1 for _ in sides))
    shape = (inner, outer, groups, *extent, *told)
    operator = Operator(
        name, OperatorClass.CONVOLUTION, shape, 1, flops, 2 * flops if x.grad else flops, moved, 2 * moved,
        (weight + outer * bias) * tape.item_bytes, sharding_of(x),
    )  # fmt: skip
    return tape.record(ShapeCall((x,), out, saved=(x,), anchor=(out,)), operator), after


def transposed(
    tape: Tape, name: str, x: Value, channels: tuple[int, int], extent: Extent, *, stride: int, kernel: int = 0
) -> tuple[Value, Extent]:
    """A transposed convolution with bias and without padding; keeps its input.

    Where its kernel is its stride (0) every pixel becomes as many; what a larger one has more comes at the end.
    """
    inner, outer = channels
    sides, kernel = len(extent), kernel or stride
    after = tuple(stride * (side - 1) + kernel for side in extent)
    out = tape.value(outer * prod(after), x.part)
    weight = inner * outer * kernel**sides
    tape.count(weight + outer)
    flops, moved = 2 * weight * prod(extent), x.bytes + out.bytes
    shape = (inner, outer, 1, *extent, *(kernel,) * sides, *(-stride,) * sides, *(0,) * sides, *(1,) * sides)
    operator = Operator(
        name, OperatorClass.CONVOLUTION, shape, 1, flops, 2 * flops if x.grad else flops, moved, 2 * moved,
        (weight + outer) * tape.item_bytes, sharding_of(x),
    )  # fmt: skip
    return tape.record(ShapeCall((x,), out, saved=(x,), anchor=(out,)), operator), after


def interpolated(tape: Tape, name: str, x: Value, channels: int, extent: Extent, *, times: int) -> tuple[Value, Extent]:
    """Linear interpolation to so many times the size along each side: keeps nothing.

    Its window is that of a transposed convolution (Long et al. 2015, arXiv:1411.4038, section 3.3).
    """
    after = tuple(times * side for side in extent)
    out = tape.value(channels * prod(after), x.part)
    moved, sides = x.bytes + out.bytes, len(extent)
    told = (*(2 * times - times % 2,) * sides, *(-times,) * sides, *(times // 2,) * sides, *(1,) * sides)
    operator = memory_operator(name, out, moved, moved)
    return tape.record(
        ShapeCall((x,), out), replace(operator, shape=(*operator.shape, channels, *extent, *told))
    ), after


def _after(extent: Extent, sides: Extent, stride: int, padding: int | None) -> Extent:
    after = tuple(
        (whole + 2 * pad - side) // stride + 1
        for whole, side, pad in zip(extent, sides, _pads(sides, padding), strict=True)
    )
    return _left(after, extent, sides)


def _pads(sides: Extent, padding: int | None) -> Extent:
    return tuple(side // 2 if padding is None else padding for side in sides)


def pooled_extent(extent: Extent, kernel: int, stride: int, padding: int) -> Extent:
    """Extent after a window of this size, stride and padding has passed over."""
    after = tuple((side + 2 * padding - kernel) // stride + 1 for side in extent)
    return _left(after, extent, (kernel,) * len(extent))


def _left(after: Extent, extent: Extent, sides: Extent) -> Extent:
    """The extent after a window."""
    if min(after) < 1:
        shown = (" x ".join(map(str, one)) for one in (sides, extent))
        raise InputError("image_size", extent, "Give larger pictures: a window of {} passes over {}.".format(*shown))
    return after


def batch_norm(tape: Tape, name: str, x: Value, channels: int) -> Value:
    """Batch normalisation in training: keeps its input (statistics are a batch's, not a sample's)."""
    tape.count(2 * channels)
    tape.buffer_bytes += 2 * channels * ops.FP32 + ops.INDEX
    out = tape.value(x.items, x.part)
    operator = memory_operator(name, x, 3 * x.bytes, 5 * x.bytes, 2 * channels * ops.FP32)
    return tape.record(ShapeCall((x,), out, saved=(x,)), replace(operator, statistics=2 * channels))


def relu(tape: Tape, name: str, x: Value) -> Value:
    """ReLU in place: its output takes the place of its input, and is kept."""
    call = ShapeCall((x,), x, saved=(x,), shares_gradient=False)
    return tape.record(call, memory_operator(name, x, 2 * x.bytes, 3 * x.bytes))


def max_pool(
    tape: Tape, name: str, x: Value, channels: int, extent: Extent, *, kernel: int, stride: int
) -> tuple[Value, Extent]:
    """Max pooling: keeps its input and eight bytes of index an output item."""
    after = pooled_extent(extent, kernel, stride, kernel // 2)
    out = tape.value(channels * prod(after), x.part)
    places = tape.value(out.items, x.part, ops.INDEX, grad=False)
    moved = x.bytes + out.bytes + places.bytes
    call = ShapeCall((x,), out, saved=(x, places))
    operator = windowed(memory_operator(name, out, moved, moved), channels, extent, (kernel, stride, kernel // 2))
    return tape.record(call, operator), after


def windowed(operator: Operator, channels: int, extent: Extent, window: tuple[int, int, int]) -> Operator:
    """A pooling operator that says what window passes over its picture: kernel, stride and padding of either side."""
    sides = (figure for figure in (*window, 1) for _ in extent)
    return replace(operator, shape=(*operator.shape, channels, *extent, *sides))


def global_pool(tape: Tape, name: str, x: Value, channels: int) -> Value:
    """Mean over all pixels: keeps nothing."""
    out = tape.value(channels, x.part)
    operator = replace(memory_operator(name, x, x.bytes, x.bytes), statistics=channels)
    return tape.record(ShapeCall((x,), out), operator)


def handed_on(kind: LayerKind, output: Value, tape: Tape) -> tuple[LayerKind, bool]:
    """A kind without its output among what it keeps, and whether it kept it.

    An activation in place at a layer's end keeps its output, which the next layer's first convolution keeps too: one
    tensor, counted with the layer that it enters (``Tape.keep``). While the layer itself computes it is there as well.
    Selective recomputation that would keep more is left out (see ``Tape``).
    """
    if not any(value.key == output.key for call, _ in tape.records for value in call.saved):
        return kind, False
    none = kind.kept[Recompute.NONE]
    left = replace(none, whole=none.whole - output.held)
    kept = {choice: size for choice, size in kind.kept.items() if size.total <= left.total or choice is Recompute.FULL}
    kept |= {Recompute.NONE: left}
    beside = TensorSplit(whole=output.held)
    return replace(
        kind, kept=kept, working=_sum(kind.working, beside), forward_working=_sum(kind.forward_working, beside)
    ), True


def _sum(first: TensorSplit, second: TensorSplit) -> TensorSplit:
    return TensorSplit(first.tensor + second.tensor, first.sequence + second.sequence, first.whole + second.whole)


def enter_image(tape: Tape, channels: int, extent: Extent) -> Value:
    """An image, which takes no gradient."""
    return tape.enter(channels * prod(extent), Division.WHOLE, grad=False)
