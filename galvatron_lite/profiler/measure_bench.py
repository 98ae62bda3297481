"""The model on the bench: its skeleton and one block of each kind, ready to be measured at any number of samples."""

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
    LayerSetting,
    SegmentMemory,
    cut_pictures,
    give_gradients,
    layer_point,
    measure_block,
    segment_memory,
)
from galvatron_lite.profiler.measure_overhead import Line, measure_overhead, measure_waiting
from galvatron_lite.profiler.memory import MemoryPhase, track_peak
from galvatron_lite.profiler.schema import HostOverhead, LayerPoint
from galvatron_lite.profiler.segments import (
    Boundary,
    Joined,
    PassThrough,
    SegmentCall,
    Skeleton,
    StopRunError,
    copy_block,
    hidden_state,
    make_skeleton,
    passed_on,
    record_calls,
)
from galvatron_lite.profiler.timing import DEFAULT_RULE, Lap, Timing, TimingRule, launched, time_laps


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

    def once(lap: Lap) -> None:
        """Before's forward, after's forward, after's backward, before's backward."""
        _step(edges, lap)
        lap()

    with holding_copies(compute, device):
        memory = edge_memory(edges, device)
        timing = time_laps(once, device, rule)
    laps = timing.laps
    halves = (laps[0], laps[3]), (laps[1], laps[2])
    timings = [Timing(half, timing.repetitions, timing.spread) for half in halves]
    before, after = (layer_point(*parts) for parts in zip(settings, timings, memory, strict=True))
    return before, after


def edge_memory(edges: EdgeInput, device: torch.device) -> tuple[SegmentMemory, SegmentMemory]:
    """Bytes of what lies before and of what lies after the blocks."""
    _step(edges, lambda: None)
    if not edges.skeleton.stubs:  # all of the model counts as before
        forward, *_, backward = _phases(edges, device)
        return segment_memory(forward, backward, 0), SegmentMemory(0, 0, 0)
    alone, with_side = _kept_before(edges, device)
    before, after, after_back, before_back = _phases(edges, device)
    first = SegmentMemory(with_side, max(before_back.peak, alone), max(before.peak, with_side))
    return first, segment_memory(after, after_back, alone)


def _phases(edges: EdgeInput, device: torch.device) -> tuple[MemoryPhase, ...]:
    """Memory of the four parts of a step."""
    with track_peak(device) as tracked:
        _step(edges.copied(), tracked.mark)
    return tracked.phases


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
        if any(
            parameter.requires_grad for stub in edges.skeleton.stubs.values() for parameter in stub.block.parameters()
        ):
            raise TraceError("blocks", "the loss", "The loss must depend on what the blocks return; name other blocks.")
        lap()


def _passing(calls: Mapping[str, SegmentCall], lap: Callable[[], None]) -> Callable[..., Any]:
    """A visitor that calls ``lap`` when the first stub is reached and when its gradient arrives."""
    reached: list[bool] = []

    def visit(stub: PassThrough, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entering = hidden_state(args, kwargs)
        # ids take no gradient: a scalar that does, as the block's result has one
        hidden = entering if entering.is_floating_point() else torch.zeros((), device=entering.device).requires_grad_()
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
        with suppress(StopRunError):
            held.run()
        gc.collect(1)
        tracked.mark()
        side.clear()
    return max(tracked.end, 0), max(tracked.phases[0].end, 0)


_EDGES = (Role.BEFORE, Role.AFTER)

BranchTimer: TypeAlias = Callable[[torch.device, TimingRule], float]


@dataclass(slots=True)
class LayerBench:
    """Measures the layers of one model on one device."""

    model: nn.Module  # the user's model, perhaps on meta; it is not changed
    graph: ModelGraph  # what it was captured as; says which submodules are blocks and of which kind
    batch: Any  # example batch; rows are repeated where more samples are asked for
    loss_fn: LossFn | None  # see ``model.batch.loss_of``
    device: torch.device  # where to measure
    rule: TimingRule = DEFAULT_RULE  # how long to time one point
    branch_seconds: BranchTimer | None = None  # measures what a call of a branch costs the host; None: nothing does
    _skeleton: Skeleton | None = None
    _blocks: dict[str, nn.Module] = field(default_factory=dict)
    _plans: dict[str, TensorPlan] = field(default_factory=dict)
    _calls: tuple[int, Mapping[str, SegmentCall]] = field(default_factory=lambda: (0, {}))

    def measure_block(self, setting: LayerSetting) -> list[LayerPoint]:
        """One point of one kind of block; none where it does not run on a share of its pictures (it makes a row of
        them for a linear layer) or of its channels."""
        plain = setting.grid == WHOLE and not setting.by
        return [self._measured(setting)] if plain else _if_it_runs(lambda: self._measured(setting))

    def _measured(self, setting: LayerSetting) -> LayerPoint:
        call, block = self._calls_at(ceil(setting.samples))[setting.kind], self._blocks[setting.kind]
        kind = self.graph.kinds[setting.kind]
        call = call.with_arguments(lambda value: cut_pictures(value, kind, setting.grid))
        if setting.tensor > 1 and setting.kind not in self._plans:
            self._plans[setting.kind] = infer_block(block, call.args, call.kwargs)
        plan = self._plans.get(setting.kind)
        return measure_block(block, call, setting, self.device, self.rule, plan, self.graph.precision)

    def measure_edges(self, samples: int, tensor: int) -> tuple[LayerPoint, LayerPoint]:
        """One point of what lies before the blocks and one of what lies after, at one tensor degree."""
        names = [next(layer.kind for layer in self.graph.layers if layer.role is role) for role in _EDGES]
        before, after = (LayerSetting(name, samples, tensor) for name in names)
        return self._measure_edges((before, after), self._batch_at(samples))

    def measure_stem(self, before: LayerSetting) -> list[LayerPoint]:
        """One point of what lies before the blocks, on a share of one sample's pixels; none where it does not run."""
        batch = cut_pictures(self._batch_at(1), self.graph.kinds[before.kind], before.grid)
        with warnings.catch_warnings():
            # targets of each pixel are cut here and predictions, from stubs, are not: the loss says so, or does not
            # run (then there is no point); only times up to the first block are taken, so no figure holds the loss
            warnings.filterwarnings("ignore", message="Using a target size", category=UserWarning)
            return _if_it_runs(lambda: self._measure_edges((before, before), batch)[0])

    def measure_sliced_edge(self, setting: LayerSetting) -> list[LayerPoint]:
        """One point of what lies before, or after, the blocks, with a slice of its weights; none where it has none."""
        return _if_it_runs(lambda: self._sliced_edge(setting))

    def _sliced_edge(self, setting: LayerSetting) -> LayerPoint:
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
        """The runtime's overhead around the most frequent kind of block, at one sample, and of calls of branches.

        ``most``: samples at which what grows with pixels is measured besides.
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
        """What blocking collectives of that kind of block cost beside the transfer, from one sample to ``most``."""
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
        """The skeleton, its edges cut to the first shard of a tensor-parallel group."""
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
    except (RuntimeError, InputError):  # what torch raises for shapes that do not fit, and we for layers
        return []
