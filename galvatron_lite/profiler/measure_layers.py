"""What one block costs: seconds and bytes of forward and backward, by running the very block (or its shard)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.model.graph import LayerKind, Recompute
from galvatron_lite.model.trace.meta import left_to_the_plan
from galvatron_lite.parallelism.channel.apply import shard_channels
from galvatron_lite.parallelism.channel.cost import BY
from galvatron_lite.parallelism.channel.infer import infer_channels
from galvatron_lite.parallelism.channel.parts import ChannelPlan, divides, splits_channels
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
from galvatron_lite.profiler.schema import LayerPoint
from galvatron_lite.profiler.segments import SegmentCall, entering, hidden_state, leaf_of, run_on
from galvatron_lite.profiler.timing import DEFAULT_RULE, Lap, Timing, TimingRule, time_laps

WHOLE: Grid = (1, 1, 1)
WAYS = (2, 4, 8)
"""Devices whose shares are measured, however many there are here; between them, and below, time is a straight line."""
_PICTURE = 2  # dims of samples and channels, before those of the sides


def measured_grids(kind: LayerKind) -> tuple[Grid, ...]:
    """The grids on whose first device a kind of layer is measured."""
    if not splits_pixels(kind):
        return ()
    grids = (sensible_grids(kind, ways) for ways in WAYS)
    return tuple(grid[0] for grid in grids if grid)


def share_on(kind: LayerKind, grid: Grid) -> float:
    """Samples that the first device of a grid works on, of one sample."""
    return float(layout_on(kind, grid).share)


def cut_pictures(value: Any, kind: LayerKind, grid: Grid, rank: int = 0) -> Any:
    """Arguments or a batch with one device's pixels of every picture (samples, channels, sides ...).

    ``rank``: of the device, on a grid that shares one side only; 0 on others.
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


def on_share(
    block: nn.Module, call: SegmentCall, kind: LayerKind, grid: Grid, group: AxisGroup | None = None
) -> nn.Module:
    """The block, changed to work on its device's pixels as training does.

    ``group``: the devices that share the one side that the grid cuts; None: the first device works without the others.
    """
    groups = tuple((group or ShapeOnlyAxisGroup(degree)) if degree > 1 else None for degree in grid)
    bind_modules(block)
    plain, sides = block.forward, _sides(kind)
    wholes = [tensor.shape for tensor in tensors_of((call.args, call.kwargs))]

    def run(*args: Any, **kwargs: Any) -> Any:
        shapes = iter(wholes)

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


def measured_slices(kind: LayerKind, degrees: Sequence[int]) -> Iterator[tuple[str, int]]:
    """How the channels of a kind of layer are measured: ``filters`` or ``channels``, and devices that share them."""
    for by in BY:
        if splits_channels(kind, by):
            yield from ((by, degree) for degree in degrees if degree > 1 and divides(kind, by, degree))


def first_channels(value: Any, plan: ChannelPlan | None) -> Any:
    """Arguments as the first device gets them: its channels of every tensor, where inputs are shared."""
    if plan is None or plan.by != "channels":
        return value

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() < _PICTURE or not tensor.is_floating_point():
            return tensor
        return tensor.narrow(1, *share(tensor.shape[1], plan.degree, 0)).contiguous()

    return map_tensors(value, cut)


_MOST_COPIES = 8
"""Equal blocks that are timed in turn: each finds its weights out of the caches, as in a model (on a CPU a block of
3 MiB takes 19 % longer among eight than alone, and 2 % longer still among twelve)."""
_CPU_ROOM = 2**29


@dataclass(frozen=True, slots=True)
class LayerSetting:
    """Under which choices a layer is measured; the key of a ``LayerPoint``."""

    kind: str  # kind, samples, tensor, sequence_parallel, recompute: see ``LayerPoint``
    samples: float
    tensor: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = Recompute.NONE
    grid: Grid = WHOLE  # devices that share the pixels of one sample, of which the first has ``samples``
    by: str = ""  # ``filters`` or ``channels`` where devices share channels of convolutions
    shares: int = 1  # how many do


@dataclass(frozen=True, slots=True)
class SegmentMemory:
    """Bytes of one segment of the model; see ``LayerPoint`` for the meaning of each."""

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
        block: a whole block on ``device``; it is copied, not changed.
        call: what it is called with at ``setting.samples`` samples.
        setting: tensor degree, sequence parallelism and recompute choice to run it under. Communication is left out:
            one shard runs alone.
        plan: how the block is split; found out if needed and not given.
        precision: of compute, as the runtime has it.
    """
    chosen = plan or (infer_block(block, call.args, call.kwargs) if setting.tensor > 1 else TensorPlan())
    share = local_call(call, setting.tensor if setting.sequence_parallel else 1)
    cut = infer_channels(block, call.args, call.kwargs, setting.by, setting.shares) if setting.shares > 1 else None
    share = share.with_arguments(partial(first_channels, plan=cut))
    with holding_copies(compute_dtype(precision), device):
        shard = make_shard(block, setting, chosen, device, precision, cut)
        memory = block_memory(shard, share, device)
        room = torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else _CPU_ROOM
        each = 2 * storage_bytes(shard.parameters()) + memory.working
        copies = max(1, min(_MOST_COPIES, room // max(each, 1)))
        shards = [shard, *(make_shard(block, setting, chosen, device, precision, cut) for _ in range(copies - 1))]
        return layer_point(setting, time_blocks(shards, share, device, rule), memory)


def layer_point(setting: LayerSetting, timing: Timing, memory: SegmentMemory) -> LayerPoint:
    """The point of a setting from its two measurements; ``timing`` has forward and backward as its laps."""
    return LayerPoint(
        kind=setting.kind,
        samples=setting.samples,
        tensor=setting.tensor,
        sequence_parallel=setting.sequence_parallel,
        recompute=setting.recompute,
        forward=timing.laps[0],
        backward=timing.laps[1],
        kept=memory.kept,
        working=memory.working,
        forward_working=memory.forward_working,
        spread=timing.spread,
        filters=setting.shares if setting.by == "filters" else 1,
        channels=setting.shares if setting.by == "channels" else 1,
    )


def make_shard(
    block: nn.Module,
    setting: LayerSetting,
    plan: TensorPlan,
    device: torch.device,
    precision: str = "fp32",
    cut: ChannelPlan | None = None,
) -> nn.Module:
    """A copy of the block as training has it: first shard of its group, recomputing as told, with gradients."""
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
    shard.forward = computing_in(precision, device, shard.forward)
    return shard


def computing_in(precision: str, device: torch.device, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward function that computes in a precision, as the runtime does."""
    dtype = compute_dtype(precision)

    def run(*args: Any, **kwargs: Any) -> Any:
        with compute_context(dtype, device), left_to_the_plan():
            return forward(*args, **kwargs)

    return run


def local_call(call: SegmentCall, degree: int) -> SegmentCall:
    """The call with the hidden state's tokens (dim 1) cut to one rank's share; tensors shaped like it are cut too."""
    if degree == 1:
        return call
    hidden = hidden_state(call.args, call.kwargs)

    def cut(tensor: Tensor) -> Tensor:
        return tensor.chunk(degree, dim=1)[0].contiguous() if tensor is hidden else tensor

    return call.with_arguments(lambda value: map_tensors(value, cut))


def give_gradients(module: nn.Module) -> None:
    """Give every trained parameter a gradient buffer, as it has in training from the second step on."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


class Seed(torch.autograd.Function):
    """Ends a segment: its backward makes the gradients that the next layer's backward would hand over."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        """A scalar that depends on the outputs."""
        ctx.like = [(output.shape, output.dtype, output.device) for output in outputs]
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Fresh gradients of ones, which backward releases as soon as they are used."""
        return tuple(torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def block_memory(run: Callable[..., Any], call: SegmentCall, device: torch.device) -> SegmentMemory:
    """Bytes of one forward and backward of a block whose parameters have gradients.

    The input is made inside the tracked region and let go of by the caller, so it counts for as long as the block
    itself keeps it. The output is let go of after forward; what the block keeps of it all the same (a ReLU at its end
    does) counts with the layer that it enters, as in a captured graph.
    """
    leaf = leaf_of(call)
    _forward_backward(run, call, leaf, lambda: None)
    leaf.grad = None
    passed = _kept_output(run, call, leaf)
    with track_peak(device) as tracked:
        _forward_backward(run, call, leaf, tracked.mark)
    forward, backward = tracked.phases
    memory = segment_memory(forward, backward, 0, small=(512 if device.type == "cuda" else 4))
    return replace(memory, kept=max(memory.kept - passed, 0))


def segment_memory(forward: MemoryPhase, backward: MemoryPhase, earlier: int, small: int = 0) -> SegmentMemory:
    """What a segment holds beyond what earlier ones keep; ``small``: bytes of the scalar that ends it."""
    kept = max(forward.end - earlier - small, 0)
    return SegmentMemory(kept, max(backward.peak - earlier, kept), max(forward.peak - earlier, kept))


def _forward_backward(run: Callable[..., Any], call: SegmentCall, leaf: Tensor, between: Callable[[], None]) -> None:
    """On a copy of ``leaf`` that nobody else holds."""
    seed = seeded(differentiable(run_on(run, call, leaf.clone())), leaf.device)
    between()
    seed.backward()  # type: ignore[no-untyped-call]


def _kept_output(run: Callable[..., Any], call: SegmentCall, leaf: Tensor) -> int:
    """Bytes of a block's result that its own operators keep for backward."""
    kept: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = differentiable(run_on(run, call, leaf.clone()))
    return storage_bytes(output for output in outputs if output.untyped_storage().data_ptr() in kept)


def seeded(outputs: Sequence[Tensor], device: torch.device) -> Tensor:
    """A scalar whose backward gives every output a gradient; one that nothing hangs on where there is no output."""
    if not outputs:
        return torch.zeros((), device=device, requires_grad=True)
    return Seed.apply(*outputs)  # type: ignore[no-any-return, no-untyped-call]


def differentiable(result: Any) -> list[Tensor]:
    """The tensors of a block's result that have a gradient."""
    return [tensor for tensor in tensors_of(result) if tensor.requires_grad]


def time_blocks(modules: list[nn.Module], call: SegmentCall, device: torch.device, rule: TimingRule) -> Timing:
    """Seconds of one forward and one backward of a block, of which several equal copies are given.

    The copies run one after another, forward all and then backward all, as the layers of a model do: their
    parameters and activations push one another out of the caches, and autograd is entered once for all.
    """
    leaf = leaf_of(call)
    gradients = [torch.full_like(tensor, 1e-3) for tensor in differentiable(run_on(modules[0], call, entering(leaf)))]

    def once(lap: Lap) -> None:
        inputs = [entering(leaf) for _ in modules]
        lap()
        outputs = [differentiable(run_on(module, call, input_)) for module, input_ in zip(modules, inputs, strict=True)]
        lap()
        flat = [tensor for output in outputs for tensor in output]
        if flat:
            torch.autograd.backward(flat, gradients * len(modules))
        lap()

    timing = time_laps(once, device, rule)
    _, forward, backward = timing.laps
    return Timing((forward / len(modules), backward / len(modules)), timing.repetitions, timing.spread)
