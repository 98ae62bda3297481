"""The model on the bench: its skeleton and one block of each kind, ready to be measured at any number of samples."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import LossFn, batch_size, map_tensors, move_batch
from galvatron_lite.model.block_calls import block_calls
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.branch.find import find_regions
from galvatron_lite.parallelism.channel.infer import infer_channels
from galvatron_lite.parallelism.precision import compute_dtype
from galvatron_lite.parallelism.tensor.apply import shard_layer
from galvatron_lite.parallelism.tensor.group import ShapeOnlyGroup
from galvatron_lite.parallelism.tensor.infer import infer_block, infer_edge
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.profiler.measure_edges import EdgeInput, measure_edges
from galvatron_lite.profiler.measure_layers import LayerSetting, measure_block
from galvatron_lite.profiler.measure_overhead import BlockingCost, measure_overhead, measure_waiting
from galvatron_lite.profiler.measure_pictures import WHOLE, Slicing, cut_pictures
from galvatron_lite.profiler.schema import HostOverhead, LayerPoint
from galvatron_lite.profiler.segments import SegmentCall, Skeleton, copy_block, make_skeleton, record_calls
from galvatron_lite.profiler.timing import DEFAULT_RULE, TimingRule, launched

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

    def measure_block(self, setting: LayerSetting) -> LayerPoint | None:
        """One point of one kind of block; None where it does not run on a share of its pictures (it makes a row of
        them for a linear layer) or of its channels."""
        plain = setting.grid == WHOLE and not setting.by
        return self._measured(setting) if plain else _if_it_runs(lambda: self._measured(setting))

    def _measured(self, setting: LayerSetting) -> LayerPoint:
        call, block = self._calls_at(ceil(setting.samples))[setting.kind], self._blocks[setting.kind]
        kind = self.graph.kinds[setting.kind]
        args, kwargs = (cut_pictures(given, kind, setting.grid) for given in (call.args, call.kwargs))
        call = replace(call, args=args, kwargs=kwargs)
        if setting.tensor > 1 and setting.kind not in self._plans:
            self._plans[setting.kind] = infer_block(block, call.args, call.kwargs)
        plan = self._plans.get(setting.kind)
        return measure_block(block, call, setting, self.device, self.rule, plan, self.graph.precision)

    def measure_edges(self, samples: int, tensor: int) -> tuple[LayerPoint, LayerPoint]:
        """One point of what lies before the blocks and one of what lies after, at one tensor degree."""
        names = [next(layer.kind for layer in self.graph.layers if layer.role is role) for role in _EDGES]
        before, after = (LayerSetting(name, samples, tensor) for name in names)
        return self._measure_edges((before, after), self._batch_at(samples))

    def measure_stem(self, before: LayerSetting) -> LayerPoint | None:
        """One point of what lies before the blocks, on a share of one sample's pixels; None where it does not run."""
        batch = cut_pictures(self._batch_at(1), self.graph.kinds[before.kind], before.grid)
        with warnings.catch_warnings():
            # targets of each pixel are cut here and predictions, from stubs, are not: the loss says so, or does not
            # run (then there is no point); only times up to the first block are taken, so no figure holds the loss
            warnings.filterwarnings("ignore", message="Using a target size", category=UserWarning)
            return _if_it_runs(lambda: self._measure_edges((before, before), batch)[0])

    def measure_sliced_edge(self, setting: LayerSetting) -> LayerPoint | None:
        """One point of what lies before, or after, the blocks, with a slice of its weights; None where it has none."""
        return _if_it_runs(lambda: self._sliced_edge(setting))

    def _sliced_edge(self, setting: LayerSetting) -> LayerPoint:
        skeleton = self._prepare()
        model = copy.deepcopy(skeleton.model)
        layer = next(layer for layer in self.graph.layers if layer.kind == setting.kind)
        for path, call in block_calls(self.model, layer.modules, self.batch).items():
            module = model.get_submodule(path)
            Slicing(infer_channels(module, call.args, call.kwargs, setting.by, setting.ways)).slice(module)
        calls, batch = self._calls_at(ceil(setting.samples)), self._batch_at(ceil(setting.samples))
        given = EdgeInput(skeleton.twin(model), calls, batch, self.loss_fn, self.graph.precision)
        points = measure_edges(given, (setting, setting), self.device, self.rule)
        return points[_EDGES.index(layer.role)]

    def _measure_edges(self, settings: tuple[LayerSetting, LayerSetting], batch: Any) -> tuple[LayerPoint, LayerPoint]:
        calls = self._calls_at(ceil(settings[0].samples))
        given = EdgeInput(self._sharded(settings[0].tensor), calls, batch, self.loss_fn, self.graph.precision)
        return measure_edges(given, settings, self.device, self.rule)

    def measure_overhead(self) -> HostOverhead:
        """The runtime's overhead around the most frequent kind of block, at one sample, and of calls of branches."""
        kind, found = self._frequent_kind(), HostOverhead()
        if kind is not None:
            block, call = self._blocks[kind], self._calls_at(1)[kind]
            found = measure_overhead(block, call, self.graph.kinds[kind], self.batch, self.device, self.rule)
        if self.branch_seconds is not None and launched() and find_regions(self.graph):
            found = replace(found, branch=self.branch_seconds(self.device, self.rule))
        return found

    def measure_waiting(self, most: int) -> BlockingCost:
        """What blocking collectives of that kind of block cost beside the transfer, from one sample to ``most``."""
        kind = self._frequent_kind()
        if kind is None:
            return BlockingCost()
        calls = [self._calls_at(samples)[kind] for samples in (1, most)]
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


def _if_it_runs(measure: Callable[[], LayerPoint]) -> LayerPoint | None:
    try:
        return measure()
    except (RuntimeError, InputError):  # what torch raises for shapes that do not fit, and we for layers
        return None
