"""Measures one block, or its shard: seconds and bytes of forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.model.graph import LayerKind, Recompute
from galvatron_lite.model.trace.meta import left_to_the_plan
from galvatron_lite.parallelism.channel.apply import shard_channels
from galvatron_lite.parallelism.channel.infer import infer_channels
from galvatron_lite.parallelism.channel.parts import BY, ChannelPlan, divides, splits_channels
from galvatron_lite.parallelism.precision import (
    compute_context,
    compute_dtype,
    hold_frozen,
    holding_copies,
    narrow_experts,
    narrow_norms,
)
from galvatron_lite.parallelism.recompute.apply import apply_recompute
from galvatron_lite.parallelism.sharded.groups import AxisGroup, ShapeOnlyAxisGroup
from galvatron_lite.parallelism.sharded.tensor import from_local, image_specs, to_local
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.spatial.apply import bind_modules
from galvatron_lite.parallelism.spatial.grids import Grid, layout_on, sensible_grids, splits_pixels
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES
from galvatron_lite.parallelism.tensor.apply import shard_layer
from galvatron_lite.parallelism.tensor.group import ShapeOnlyGroup
from galvatron_lite.parallelism.tensor.infer import infer_block
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.profiler.memory import MemoryPhase, storage_bytes, track_peak
from galvatron_lite.profiler.schema import LayerPoint, LayerSetting
from galvatron_lite.profiler.segments import SegmentCall, fresh_input, hidden_state, input_leaf, run_with
from galvatron_lite.profiler.timing import DEFAULT_RULE, Lap, Timing, TimingRule, time_laps

WHOLE: Grid = (1, 1, 1)
WAYS = (2, 4, 8)
"""Numbers of devices whose shares of pixels are measured; the cost model interpolates between them."""
_PICTURE = 2  # dims of samples and channels, before those of the sides


def measured_grids(kind: LayerKind) -> tuple[Grid, ...]:
    """Return the grids whose first device's share of a kind of layer is measured."""
    if not splits_pixels(kind):
        return ()
    grids = (sensible_grids(kind, ways) for ways in WAYS)
    return tuple(grid[0] for grid in grids if grid)


def first_share(kind: LayerKind, grid: Grid) -> float:
    """Return the share of one sample that the first device of a grid works on."""
    return float(layout_on(kind, grid).share)


def cut_pictures(value: Any, kind: LayerKind, grid: Grid, rank: int = 0) -> Any:
    """Cut the pictures (samples, channels, sides ...) of arguments or a batch to one device's pixels.

    ``rank``: the device, on a grid that splits one side only; 0 on other grids.
    """
    if grid == WHOLE:
        return value
    degrees = grid[len(grid) - _sides(kind) :]

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() != _PICTURE + len(degrees) or not tensor.is_floating_point():
            return tensor
        for dim, degree in enumerate(degrees, _PICTURE):
            tensor = tensor.narrow(dim, *share(tensor.shape[dim], degree, min(rank, degree - 1)))
        return tensor.contiguous()

    return map_tensors(value, cut)


def with_sharded_pixels(
    block: nn.Module, call: SegmentCall, kind: LayerKind, grid: Grid, group: AxisGroup | None = None
) -> nn.Module:
    """Change a block to work on its device's pixels as training does.

    ``group``: the devices that share the side that the grid splits; None: the first device works without the others.
    """
    groups = tuple((group or ShapeOnlyAxisGroup(degree)) if degree > 1 else None for degree in grid)
    bind_modules(block)
    plain, sides = block.forward, _sides(kind)
    full_shapes = [tensor.shape for tensor in tensors_of((call.args, call.kwargs))]

    def run(*args: Any, **kwargs: Any) -> Any:
        shapes = iter(full_shapes)

        def marked(tensor: Tensor) -> Tensor:
            full_shape = next(shapes)
            if len(full_shape) != _PICTURE + sides or not tensor.is_floating_point():
                return tensor
            return from_local(tensor.view_as(tensor), image_specs(full_shape, groups), PIXELS_RULES)

        marked_args, named = map_tensors((args, kwargs), marked)
        return map_tensors(plain(*marked_args, **named), to_local)

    block.forward = run
    return block


def _sides(kind: LayerKind) -> int:
    return sum(extent > 0 for extent in (kind.dims.depth, kind.dims.height, kind.dims.width))


def measured_channel_splits(kind: LayerKind, degrees: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield the splits of channels to measure: ``filters`` or ``channels``, and the degree."""
    for by in BY:
        if splits_channels(kind, by):
            yield from ((by, degree) for degree in degrees if degree > 1 and divides(kind, by, degree))


def cut_channels(value: Any, plan: ChannelPlan | None) -> Any:
    """Cut the channels of arguments to those of the first device, if input channels are split."""
    if plan is None or plan.by != "channels":
        return value

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() < _PICTURE or not tensor.is_floating_point():
            return tensor
        return tensor.narrow(1, *share(tensor.shape[1], plan.degree, 0)).contiguous()

    return map_tensors(value, cut)


_MOST_COPIES = 8
"""Equal blocks that are timed in turn, so that weights of each have left the caches, as in a model (on a CPU a block of
3 MiB takes 19 % longer among eight than alone, and 2 % longer still among twelve)."""
_CPU_ROOM = 2**29  # bytes for these copies on a CPU


@dataclass(frozen=True, slots=True)
class SegmentMemory:
    """Bytes of one segment of the model, as in ``LayerPoint``."""

    kept: int
    working: int
    forward_working: int


def measure_block(
    block: nn.Module,
    call: SegmentCall,
    setting: LayerSetting,
    device: torch.device,
    rule: TimingRule = DEFAULT_RULE,
    plan: TensorPlan | None = None,
    precision: str = "fp32",
) -> LayerPoint:
    """Measure one block on this device (and at the same moment on every other rank).

    Args:
        block: a full block on ``device``; it is copied, not changed.
        call: its call with ``setting.samples`` samples.
        setting: the choices to measure. Communication is left out: one shard runs alone.
        device: where to measure.
        rule: how long to time.
        plan: how the block is split; None: inferred if needed.
        precision: precision of compute.
    """
    chosen = plan or (infer_block(block, call.args, call.kwargs) if setting.tensor > 1 else TensorPlan())
    local = cut_tokens(call, setting.tensor if setting.sequence_parallel else 1)
    channels = infer_channels(block, call.args, call.kwargs, setting.by, setting.shares) if setting.shares > 1 else None
    local = local.with_arguments(partial(cut_channels, plan=channels))

    def shard() -> nn.Module:
        return make_shard(block, setting, chosen, device, precision, channels)

    with holding_copies(compute_dtype(precision), device):
        first = shard()
        memory = block_memory(first, local, device)
        room = torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else _CPU_ROOM
        size = 2 * storage_bytes(first.parameters()) + memory.working
        copies = max(1, min(_MOST_COPIES, room // max(size, 1)))
        shards = [first, *(shard() for _ in range(copies - 1))]
        return layer_point(setting, time_blocks(shards, local, device, rule), memory)


def layer_point(setting: LayerSetting, timing: Timing, memory: SegmentMemory) -> LayerPoint:
    """Return the point of a setting from a timing with forward and backward as laps, and its memory."""
    forward, backward = timing.laps
    return setting.point(forward=forward, backward=backward, spread=timing.spread, **asdict(memory))


def make_shard(
    block: nn.Module,
    setting: LayerSetting,
    plan: TensorPlan,
    device: torch.device,
    precision: str = "fp32",
    cut: ChannelPlan | None = None,
) -> nn.Module:
    """Return a copy of the block as in training: the first shard of its group, with recomputation and gradients."""
    shard = copy.deepcopy(block)
    if compute_dtype(precision) is not None:
        narrow_experts(shard)
    if cut is not None:
        shard_channels(shard, cut, ShapeOnlyAxisGroup(cut.degree))
    if setting.tensor > 1:
        regather = setting.recompute is Recompute.NONE
        shard_layer(shard, plan, ShapeOnlyGroup(setting.tensor), setting.sequence_parallel, regather=regather)
    give_gradients(shard)
    apply_recompute(shard, setting.recompute)
    if compute_dtype(precision) is not None:
        narrow_norms(shard)
        hold_frozen(shard)
    shard.forward = with_precision(precision, device, shard.forward)
    return shard


def with_precision(precision: str, device: torch.device, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward function to compute in a precision, as the runtime does."""
    dtype = compute_dtype(precision)

    def run(*args: Any, **kwargs: Any) -> Any:
        with compute_context(dtype, device), left_to_the_plan():
            return forward(*args, **kwargs)

    return run


def cut_tokens(call: SegmentCall, degree: int) -> SegmentCall:
    """Return the call with the hidden state's tokens (dim 1) cut to the first of ``degree`` ranks."""
    if degree == 1:
        return call
    hidden = hidden_state(call.args, call.kwargs)

    def cut(tensor: Tensor) -> Tensor:
        return tensor.chunk(degree, dim=1)[0].contiguous() if tensor is hidden else tensor

    return call.with_arguments(lambda value: map_tensors(value, cut))


def give_gradients(module: nn.Module) -> None:
    """Allocate the gradient of each trained parameter, as in training from the second step on."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


class SeedGradients(torch.autograd.Function):
    """Ends a segment: its backward creates the gradients that the next layer's backward would pass on."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        """Return a scalar that depends on the outputs."""
        ctx.like = [(output.shape, output.dtype, output.device) for output in outputs]
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Return new gradients of ones, which backward releases as soon as they are used."""
        return tuple(torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def block_memory(run: Callable[..., Any], call: SegmentCall, device: torch.device) -> SegmentMemory:
    """Return the memory of one forward and backward of a block whose parameters have gradients.

    The input is created in the tracked region and released by the caller, so it counts for as long as the block keeps
    it. The output is released after forward; if the block saves it (as a ReLU at its end does), it counts with the next
    layer, as in a captured graph.
    """
    leaf = input_leaf(call)
    _forward_backward(run, call, leaf, lambda: None)
    leaf.grad = None
    passed = _kept_output(run, call, leaf)
    with track_peak(device) as tracked:
        _forward_backward(run, call, leaf, tracked.mark)
    forward, backward = tracked.phases
    memory = segment_memory(forward, backward, 0, small=(512 if device.type == "cuda" else 4))
    return replace(memory, kept=max(memory.kept - passed, 0))


def segment_memory(forward: MemoryPhase, backward: MemoryPhase, earlier: int, small: int = 0) -> SegmentMemory:
    """Return the memory of a segment beyond what earlier ones keep; ``small``: bytes of the scalar that ends it."""
    kept = max(forward.end - earlier - small, 0)
    return SegmentMemory(kept, max(backward.peak - earlier, kept), max(forward.peak - earlier, kept))


def _forward_backward(run: Callable[..., Any], call: SegmentCall, leaf: Tensor, between: Callable[[], None]) -> None:
    """Run forward and backward on a copy of ``leaf`` that nobody else holds."""
    seed = with_seed_gradients(differentiable(run_with(run, call, leaf.clone())), leaf.device)
    between()
    seed.backward()  # type: ignore[no-untyped-call]


def _kept_output(run: Callable[..., Any], call: SegmentCall, leaf: Tensor) -> int:
    """Return the bytes of a block's result that its operators save for backward."""
    kept: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = differentiable(run_with(run, call, leaf.clone()))
    return storage_bytes(output for output in outputs if output.untyped_storage().data_ptr() in kept)


def with_seed_gradients(outputs: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a scalar whose backward passes a gradient to each output; a constant if there are none."""
    if not outputs:
        return torch.zeros((), device=device, requires_grad=True)
    return SeedGradients.apply(*outputs)  # type: ignore[no-any-return, no-untyped-call]


def differentiable(result: Any) -> list[Tensor]:
    """Return the tensors of a block's result that require a gradient."""
    return [tensor for tensor in tensors_of(result) if tensor.requires_grad]


def time_blocks(modules: list[nn.Module], call: SegmentCall, device: torch.device, rule: TimingRule) -> Timing:
    """Time one forward and one backward of a block, of which ``modules`` are equal copies.

    All copies run forward and then backward, like the layers of a model: their parameters and activations displace one
    another from the caches, and autograd is entered once for all.
    """
    leaf = input_leaf(call)
    gradients = [
        torch.full_like(tensor, 1e-3) for tensor in differentiable(run_with(modules[0], call, fresh_input(leaf)))
    ]

    def once(lap: Lap) -> None:
        inputs = [fresh_input(leaf) for _ in modules]
        lap()
        outputs = [
            differentiable(run_with(module, call, input_)) for module, input_ in zip(modules, inputs, strict=True)
        ]
        lap()
        flat = [tensor for output in outputs for tensor in output]
        if flat:
            torch.autograd.backward(flat, gradients * len(modules))
        lap()

    timing = time_laps(once, device, rule)
    _, forward, backward = timing.laps
    return Timing((forward / len(modules), backward / len(modules)), timing.repetitions, timing.spread)
