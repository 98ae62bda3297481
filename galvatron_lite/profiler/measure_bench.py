"""Measures the layers of one model: a block of each kind, and the edges before and after the blocks."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from galvatron_lite.errors import InputError, TraceError
from galvatron_lite.model.batch import LossFn, batch_size, call_model, loss_of, map_tensors, move_batch, tensors_of
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.model.trace.run import block_calls
from galvatron_lite.parallelism.branch.find import find_regions
from galvatron_lite.parallelism.channel.apply import shard_channels
from galvatron_lite.parallelism.channel.infer import infer_channels
from galvatron_lite.parallelism.precision import compute_context, compute_dtype, holding_copies, narrow_norms
from galvatron_lite.parallelism.sharded.groups import ShapeOnlyAxisGroup
from galvatron_lite.parallelism.tensor.apply import shard_layer
from galvatron_lite.parallelism.tensor.group import ShapeOnlyGroup
from galvatron_lite.parallelism.tensor.infer import infer_block, infer_edge
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.profiler.measure_layers import (
    WHOLE,
    SegmentMemory,
    cut_pictures,
    give_gradients,
    layer_point,
    measure_block,
    segment_memory,
)
from galvatron_lite.profiler.measure_overhead import Line, measure_overhead, measure_waiting
from galvatron_lite.profiler.memory import MemoryPhase, track_peak
from galvatron_lite.profiler.schema import HostOverhead, LayerPoint, LayerSetting
from galvatron_lite.profiler.segments import (
    DependentCopy,
    GradientMarker,
    PassThrough,
    SegmentCall,
    Skeleton,
    StopRunError,
    copy_block,
    hidden_state,
    make_skeleton,
    record_calls,
    stub_result,
)
from galvatron_lite.profiler.timing import DEFAULT_RULE, Lap, Timing, TimingRule, launched, time_laps


@dataclass(frozen=True, slots=True)
class EdgeInput:
    """A model without blocks and the batch to run it on."""

    skeleton: Skeleton  # sharded, if a shard is measured
    calls: Mapping[str, SegmentCall]  # a call of each kind of block, whose result the stubs imitate
    batch: Any  # on the skeleton's device
    loss_fn: LossFn | None = None  # see ``model.batch.loss_of``
    precision: str = "fp32"  # precision of compute

    def copied(self) -> EdgeInput:
        """Return the input with a copy of the batch, which then counts as memory of the step."""
        return replace(self, batch=map_tensors(self.batch, Tensor.clone))

    def run(self) -> Tensor:
        """Return the loss, computed as the runtime does."""
        device = next(tensors_of(self.batch)).device
        with compute_context(compute_dtype(self.precision), device):
            return loss_of(call_model(self.skeleton.model, self.batch), self.batch, self.loss_fn)


def measure_edges(
    edges: EdgeInput, settings: tuple[LayerSetting, LayerSetting], device: torch.device, rule: TimingRule = DEFAULT_RULE
) -> tuple[LayerPoint, LayerPoint]:
    """Measure the layers before and after the blocks."""
    give_gradients(edges.skeleton.model)
    compute = compute_dtype(edges.precision)
    if compute is not None:
        narrow_norms(edges.skeleton.model)

    def run(lap: Lap) -> None:
        """Forward before, forward after, backward after, backward before the blocks."""
        _step(edges, lap)
        lap()

    with holding_copies(compute, device):
        memory = edge_memory(edges, device)
        timing = time_laps(run, device, rule)
    laps = timing.laps
    halves = (laps[0], laps[3]), (laps[1], laps[2])
    timings = [Timing(half, timing.repetitions, timing.spread) for half in halves]
    before, after = (layer_point(*parts) for parts in zip(settings, timings, memory, strict=True))
    return before, after


def edge_memory(edges: EdgeInput, device: torch.device) -> tuple[SegmentMemory, SegmentMemory]:
    """Return the memory of the layers before and after the blocks."""
    _step(edges, lambda: None)
    if not edges.skeleton.stubs:  # the full model counts as before
        forward, *_, backward = _step_memory(edges, device)
        return segment_memory(forward, backward, 0), SegmentMemory(0, 0, 0)
    saved, saved_and_shared = _saved_before_blocks(edges, device)
    before, after, after_backward, before_backward = _step_memory(edges, device)
    first = SegmentMemory(saved_and_shared, max(before_backward.peak, saved), max(before.peak, saved_and_shared))
    return first, segment_memory(after, after_backward, saved)


def _step_memory(edges: EdgeInput, device: torch.device) -> tuple[MemoryPhase, ...]:
    """Return the memory of the four parts of a step."""
    with track_peak(device) as tracked:
        _step(edges.copied(), tracked.mark)
    return tracked.phases


def _step(edges: EdgeInput, lap: Callable[[], None]) -> None:
    """Run forward and backward, and call ``lap`` at the ends of the first three of four parts.

    The parts are forward before and after the blocks, backward after and before the blocks. Without blocks the middle
    two are empty; if blocks are frozen and no gradient reaches them, the last one is.
    """
    laps: list[int] = []

    def counted() -> None:
        laps.append(len(laps))
        lap()

    edges.skeleton.visit_with(_lap_visitor(edges.calls, counted))
    loss = edges.run()
    for _ in range(1 if edges.skeleton.stubs else 3):
        counted()
    loss.backward()  # type: ignore[no-untyped-call]
    if len(laps) == 2:  # no gradient reached the blocks
        if any(
            parameter.requires_grad for stub in edges.skeleton.stubs.values() for parameter in stub.block.parameters()
        ):
            raise TraceError("blocks", "the loss", "The loss must depend on what the blocks return; name other blocks.")
        lap()


def _lap_visitor(calls: Mapping[str, SegmentCall], lap: Callable[[], None]) -> Callable[..., Any]:
    """Return a visitor that calls ``lap`` when the first stub is reached and when its gradient arrives."""
    reached: list[bool] = []

    def visit(stub: PassThrough, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = original = hidden_state(args, kwargs)
        if not original.is_floating_point():  # ids have no gradient, but the block's result has
            hidden = torch.zeros((), device=original.device).requires_grad_()
        if not reached:
            reached.append(True)
            lap()
            hidden = mark_gradient(hidden, lap)
        # a decoder's blocks also read the encoder's output, through which gradients reach the first block
        others = [tensor for tensor in tensors_of((args, kwargs)) if tensor.requires_grad and tensor is not original]
        if others:
            hidden = DependentCopy.apply(hidden, *others)  # type: ignore[no-untyped-call]
        return stub_result(calls[stub.kind], hidden)

    return visit


def mark_gradient(hidden: Tensor, reached: Callable[[], None]) -> Tensor:
    """Return a copy of the hidden state that calls ``reached`` when its gradient arrives."""
    start = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
    return GradientMarker.apply(start, reached)  # type: ignore[no-any-return, no-untyped-call]


def _saved_before_blocks(inputs: EdgeInput, device: torch.device) -> tuple[int, int]:
    """Return the bytes that stay once the layer before the blocks has run and its result is released.

    Returns:
        The batch and what autograd saves, and the same with tensors that the blocks share (masks, rotations).
    """
    edges: list[GradientEdge] = []
    shared: list[Tensor] = []

    def stop(_: PassThrough, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = hidden_state(args, kwargs)
        shared.extend(tensor for tensor in tensors_of((args, kwargs)) if tensor is not hidden)
        if hidden.requires_grad:
            edges.append(get_gradient_edge(hidden))
        raise StopRunError

    inputs.skeleton.visit_with(stop)
    gc.collect(1)  # earlier garbage must not be released inside
    with track_peak(device) as tracked:
        copied = inputs.copied()
        with suppress(StopRunError):
            copied.run()
        gc.collect(1)
        tracked.mark()
        shared.clear()
    return max(tracked.end, 0), max(tracked.phases[0].end, 0)


_EDGES = (Role.BEFORE, Role.AFTER)

BranchTimer: TypeAlias = Callable[[torch.device, TimingRule], float]


@dataclass(slots=True)
class LayerBench:
    """Measures the layers of one model on one device."""

    model: nn.Module  # the user's model, perhaps on meta; it is not changed
    graph: ModelGraph  # its graph, which tells which submodules are blocks and of which kind
    batch: Any  # example batch; rows are repeated for more samples
    loss_fn: LossFn | None  # see ``model.batch.loss_of``
    device: torch.device  # where to measure
    rule: TimingRule = DEFAULT_RULE  # how long to time one point
    branch_seconds: BranchTimer | None = None  # measures the host seconds of a call of a branch; None: not measured
    _skeleton: Skeleton | None = None
    _blocks: dict[str, nn.Module] = field(default_factory=dict)
    _plans: dict[str, TensorPlan] = field(default_factory=dict)
    _calls: tuple[int, Mapping[str, SegmentCall]] = field(default_factory=lambda: (0, {}))

    def measure_block(self, setting: LayerSetting) -> list[LayerPoint]:
        """Measure one kind of block; no point if it does not run on a share of its pixels (it flattens them for a
        linear layer) or of its channels."""
        is_split = setting.grid != WHOLE or bool(setting.by)
        return _if_it_runs(lambda: self._measure_block(setting)) if is_split else [self._measure_block(setting)]

    def _measure_block(self, setting: LayerSetting) -> LayerPoint:
        call, block = self._calls_at(ceil(setting.samples))[setting.kind], self._blocks[setting.kind]
        kind = self.graph.kinds[setting.kind]
        call = call.with_arguments(lambda value: cut_pictures(value, kind, setting.grid))
        if setting.tensor > 1 and setting.kind not in self._plans:
            self._plans[setting.kind] = infer_block(block, call.args, call.kwargs)
        plan = self._plans.get(setting.kind)
        return measure_block(block, call, setting, self.device, self.rule, plan, self.graph.precision)

    def measure_edges(self, samples: int, tensor: int) -> tuple[LayerPoint, LayerPoint]:
        """Measure the layers before and after the blocks at one tensor degree."""
        names = [next(layer.kind for layer in self.graph.layers if layer.role is role) for role in _EDGES]
        before, after = (LayerSetting(name, samples, tensor) for name in names)
        return self._measure_edges((before, after), self._batch_at(samples))

    def measure_stem(self, before: LayerSetting) -> list[LayerPoint]:
        """Measure the layer before the blocks on a share of one sample's pixels; no point if it does not run."""
        batch = cut_pictures(self._batch_at(1), self.graph.kinds[before.kind], before.grid)
        with warnings.catch_warnings():
            # The loss may warn or fail, since targets of pixels are cut but predictions, from stubs, are not. Only
            # times up to the first block count, so no figure includes the loss.
            warnings.filterwarnings("ignore", message="Using a target size", category=UserWarning)
            return _if_it_runs(lambda: self._measure_edges((before, before), batch)[0])

    def measure_sliced_edge(self, setting: LayerSetting) -> list[LayerPoint]:
        """Measure the layer before, or after, the blocks with a slice of its weights; no point if it does not run."""
        return _if_it_runs(lambda: self._measure_sliced_edge(setting))

    def _measure_sliced_edge(self, setting: LayerSetting) -> LayerPoint:
        skeleton = self._prepare()
        model = copy.deepcopy(skeleton.model)
        layer = next(layer for layer in self.graph.layers if layer.kind == setting.kind)
        for path, call in block_calls(self.model, layer.modules, self.batch).items():
            module = model.get_submodule(path)
            plan = infer_channels(module, call.args, call.kwargs, setting.by, setting.shares)
            shard_channels(module, plan, ShapeOnlyAxisGroup(plan.degree))
        calls, batch = self._calls_at(ceil(setting.samples)), self._batch_at(ceil(setting.samples))
        edges = EdgeInput(skeleton.twin(model), calls, batch, self.loss_fn, self.graph.precision)
        points = measure_edges(edges, (setting, setting), self.device, self.rule)
        return points[_EDGES.index(layer.role)]

    def _measure_edges(self, settings: tuple[LayerSetting, LayerSetting], batch: Any) -> tuple[LayerPoint, LayerPoint]:
        calls = self._calls_at(ceil(settings[0].samples))
        edges = EdgeInput(self._sharded(settings[0].tensor), calls, batch, self.loss_fn, self.graph.precision)
        return measure_edges(edges, settings, self.device, self.rule)

    def measure_overhead(self, most: int = 1) -> HostOverhead:
        """Measure the runtime's overhead around the most frequent kind of block, and of calls of branches.

        ``most``: most samples at which overhead that grows with pixels is measured.
        """
        kind, overhead = self._frequent_kind(), HostOverhead()
        if kind is not None:
            calls = {samples: self._calls_at(samples)[kind] for samples in (most, self.graph.least_samples)}
            overhead = measure_overhead(
                self._blocks[kind], calls, self.graph.kinds[kind], self.batch, self.device, self.rule
            )
        if self.branch_seconds is not None and launched() and find_regions(self.graph):
            overhead = replace(overhead, branch=self.branch_seconds(self.device, self.rule))
        return overhead

    def measure_waiting(self, most: int) -> Line:
        """Measure the overhead of blocking collectives of that kind of block, from one sample to ``most``."""
        kind = self._frequent_kind()
        if kind is None:
            return Line()
        calls = [self._calls_at(samples)[kind] for samples in (self.graph.least_samples, most)]
        block = self._blocks[kind]
        plan = infer_block(block, calls[0].args, calls[0].kwargs)
        return measure_waiting(block, plan, calls, self.device, self.rule)

    def _frequent_kind(self) -> str | None:
        names = [layer.kind for layer in self.graph.layers if layer.role is Role.BLOCK]
        return max(names, key=names.count) if names else None

    def _prepare(self) -> Skeleton:
        if self._skeleton is None:
            self._skeleton = make_skeleton(self.model, self.graph.layers, self.device)
            for layer in self.graph.layers:
                if layer.role is Role.BLOCK and layer.kind not in self._blocks:
                    self._blocks[layer.kind] = copy_block(self.model, layer.modules[0], self.device)
        return self._skeleton

    def _calls_at(self, samples: int) -> Mapping[str, SegmentCall]:
        skeleton = self._prepare()
        if self._calls[0] != samples:
            dtype, batch = compute_dtype(self.graph.precision), self._batch_at(samples)
            calls = record_calls(skeleton, self._blocks, batch, dtype) if self._blocks else {}
            self._calls = (samples, calls)
        return self._calls[1]

    def _batch_at(self, samples: int) -> Any:
        size = batch_size(self.batch)

        def rows(tensor: Tensor) -> Tensor:
            is_batched = tensor.dim() > 0 and tensor.shape[0] == size
            return tensor[torch.arange(samples, device=tensor.device) % size] if is_batched else tensor

        return move_batch(map_tensors(self.batch, rows), self.device)

    def _sharded(self, tensor: int) -> Skeleton:
        """Return the skeleton with its edges cut to the first shard of a tensor-parallel group."""
        skeleton = self._prepare()
        if tensor == 1:
            return skeleton
        model = copy.deepcopy(skeleton.model)
        for layer in self.graph.layers:
            if layer.role in _EDGES and layer.modules:
                modules = {path: model.get_submodule(path) for path in layer.modules}
                shard_layer(modules, infer_edge(modules, model), ShapeOnlyGroup(tensor), False)
        return skeleton.twin(model)


def _if_it_runs(measure: Callable[[], LayerPoint]) -> list[LayerPoint]:
    try:
        return [measure()]
    except (RuntimeError, InputError):  # from torch for shapes that do not fit, from us for layers
        return []
