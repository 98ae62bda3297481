"""What lies before and after the blocks, with the glue code and the loss, by running the model without its blocks.

One run of the skeleton is split at the first block: forward where the first stub is reached, backward where the
gradient of what the stubs passed on arrives.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from galvatron_lite.errors import TraceError
from galvatron_lite.model.batch import LossFn, call_model, loss_of, map_tensors, tensors_of
from galvatron_lite.parallelism.precision import compute_context, compute_dtype, holding_copies, narrow_norms
from galvatron_lite.profiler.measure_layers import (
    LayerSetting,
    SegmentMemory,
    give_gradients,
    layer_point,
    segment_memory,
)
from galvatron_lite.profiler.memory import track_peak
from galvatron_lite.profiler.schema import LayerPoint
from galvatron_lite.profiler.segments import (
    Boundary,
    Joined,
    PassThrough,
    SegmentCall,
    Skeleton,
    StopRunError,
    hidden_state,
    passed_on,
)
from galvatron_lite.profiler.timing import DEFAULT_RULE, Lap, Timing, TimingRule, time_laps


@dataclass(frozen=True, slots=True)
class EdgeInput:
    """What the edges are run on."""

    skeleton: Skeleton  # the model without blocks; sharded already where a shard is measured
    calls: Mapping[str, SegmentCall]  # what each kind of block returns, for the stubs
    batch: Any  # on the skeleton's device
    loss_fn: LossFn | None = None  # see ``model.batch.loss_of``
    precision: str = "fp32"  # of compute, as the runtime has it

    def copied(self) -> EdgeInput:
        """The same on a copy of the batch, as training has its samples on the device; so they count as held."""
        return replace(self, batch=map_tensors(self.batch, Tensor.clone))

    def run(self) -> Tensor:
        """The loss, computed as the runtime does."""
        device = next(tensors_of(self.batch)).device
        with compute_context(compute_dtype(self.precision), device):
            return loss_of(call_model(self.skeleton.model, self.batch), self.batch, self.loss_fn)


def measure_edges(
    edges: EdgeInput, settings: tuple[LayerSetting, LayerSetting], device: torch.device, rule: TimingRule = DEFAULT_RULE
) -> tuple[LayerPoint, LayerPoint]:
    """Measure what lies before and after the blocks."""
    give_gradients(edges.skeleton.model)
    compute = compute_dtype(edges.precision)
    if compute is not None:
        narrow_norms(edges.skeleton.model)
    with holding_copies(compute, device):
        memory = edge_memory(edges, device)
        timing = time_edges(edges, device, rule)
    laps = timing.laps
    halves = (laps[0], laps[3]), (laps[1], laps[2])
    timings = [Timing(half, timing.repetitions, timing.spread) for half in halves]
    before, after = (layer_point(*parts) for parts in zip(settings, timings, memory, strict=True))
    return before, after


def time_edges(edges: EdgeInput, device: torch.device, rule: TimingRule) -> Timing:
    """Seconds of before's forward, after's forward, after's backward, before's backward."""

    def once(lap: Lap) -> None:
        _step(edges, lap)
        lap()

    return time_laps(once, device, rule)


def edge_memory(edges: EdgeInput, device: torch.device) -> tuple[SegmentMemory, SegmentMemory]:
    """Bytes of what lies before and of what lies after the blocks."""
    _step(edges, _nothing)
    if not edges.skeleton.stubs:
        return _whole_memory(edges, device), SegmentMemory(0, 0, 0)
    alone, with_side = _kept_before(edges, device)
    with track_peak(device) as tracked:
        _step(edges.copied(), tracked.mark)
    before, after, after_back, before_back = tracked.phases
    first = SegmentMemory(with_side, max(before_back.peak, alone), max(before.peak, with_side))
    return first, segment_memory(after, after_back, alone)


def _whole_memory(edges: EdgeInput, device: torch.device) -> SegmentMemory:
    """Bytes of a model without blocks: all of it counts as before."""
    with track_peak(device) as tracked:
        _step(edges.copied(), tracked.mark)
    forward, *_, backward = tracked.phases
    return segment_memory(forward, backward, 0)


def _nothing() -> None:
    return None


def _step(edges: EdgeInput, lap: Callable[[], None]) -> None:
    """One forward and backward; ``lap`` is called at the ends of the first three of its four parts.

    In a model without blocks the middle two parts are empty, the last one where no gradient reaches them.
    """
    laps: list[int] = []

    def counted() -> None:
        laps.append(len(laps))
        lap()

    edges.skeleton.visit_with(_passing(edges.calls, counted))
    loss = edges.run()
    for _ in range(1 if edges.skeleton.stubs else 3):
        counted()
    loss.backward()  # type: ignore[no-untyped-call]
    if len(laps) == 2:  # no gradient reaches the blocks: where they are frozen, all of backward was behind them
        if any(one.requires_grad for stub in edges.skeleton.stubs.values() for one in stub.block.parameters()):
            raise TraceError("blocks", "the loss", "The loss must depend on what the blocks return; name other blocks.")
        lap()


def _passing(calls: Mapping[str, SegmentCall], lap: Callable[[], None]) -> Callable[..., Any]:
    """A visitor that calls ``lap`` when the first stub is reached and when its gradient arrives."""
    reached: list[bool] = []

    def visit(stub: PassThrough, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entering = hidden_state(args, kwargs)
        hidden = _trained(entering)
        if not reached:
            reached.append(True)
            lap()
            hidden = boundary(hidden, lap)
        # a decoder's blocks read what the encoder's gave, where the first block is
        others = [one for one in tensors_of((args, kwargs)) if one.requires_grad and one is not entering]
        if others:
            hidden = Joined.apply(hidden, *others)  # type: ignore[no-untyped-call]
        return passed_on(calls[stub.kind], hidden)

    return visit


def _trained(hidden: Tensor) -> Tensor:
    """The hidden state; a scalar that takes a gradient, as the block's result does, where it cannot (ids)."""
    return hidden if hidden.is_floating_point() else torch.zeros((), device=hidden.device, requires_grad=True)


def boundary(hidden: Tensor, reached: Callable[[], None]) -> Tensor:
    """A copy of the hidden state that calls ``reached`` when its gradient arrives."""
    start = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
    return Boundary.apply(start, reached)  # type: ignore[no-any-return, no-untyped-call]


def _kept_before(inputs: EdgeInput, device: torch.device) -> tuple[int, int]:
    """Bytes that stay once what lies before the first block has run and its result was let go of.

    Returns:
        The batch and what autograd keeps, and the same with all else that was made for the blocks to share (masks,
        rotations).
    """
    edges: list[GradientEdge] = []
    side: list[Tensor] = []

    def stop(_: PassThrough, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = hidden_state(args, kwargs)
        side.extend(tensor for tensor in tensors_of((args, kwargs)) if tensor is not hidden)
        if hidden.requires_grad:
            edges.append(get_gradient_edge(hidden))
        raise StopRunError

    inputs.skeleton.visit_with(stop)
    gc.collect(1)  # what is garbage already is not to be released inside
    with track_peak(device) as tracked:
        held = inputs.copied()
        _run_until_stopped(held)
        gc.collect(1)
        tracked.mark()
        side.clear()
    return max(tracked.end, 0), max(tracked.phases[0].end, 0)


def _run_until_stopped(edges: EdgeInput) -> None:
    try:
        edges.run()
    except StopRunError:
        return
