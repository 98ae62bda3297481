"""Figures of a captured model's kinds of layers, and the tensors with gradients that layers hand to each other.

Each kind is run in detail once. What autograd keeps counts with one layer only: an output that the next layer keeps too
belongs to that one, and what code between blocks keeps belongs to the block that follows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from galvatron_lite.capture.limits import folded_hidden, split_dims, token_writes
from galvatron_lite.capture.shared import Owners, items_of, passed_tensors
from galvatron_lite.capture.tensor import (
    MixtureFigures,
    TensorFigures,
    mixture_figures,
    run_edges,
    split_block,
    split_edges,
)
from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import LossFn, tensors_of
from galvatron_lite.model.graph import Layer, LayerKind, OperatorClass, Passed, Recompute, Role, SplitDims, TensorSplit
from galvatron_lite.model.trace.figures import SAMPLES, RegionFigures, figures, merge, slope
from galvatron_lite.model.trace.flow import Needs
from galvatron_lite.model.trace.meta import BATCH_NORMS
from galvatron_lite.model.trace.run import BlockCall, Observation, chain_inputs, run_block
from galvatron_lite.parallelism.channel.infer import infer_channels
from galvatron_lite.parallelism.tensor.cost import boundaries


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _with_kept(kind: LayerKind, size: int, choices: Iterable[Recompute]) -> LayerKind:
    """The kind with so many more bytes kept under the choices that it offers."""
    offered = [choice for choice in choices if choice in kind.kept]
    more = {choice: replace(kind.kept[choice], whole=kind.kept[choice].whole + size) for choice in offered}
    return replace(kind, kept=kind.kept | more)


def _sample_shape(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Shape of one sample of the first floating tensor; empty if there is none."""
    return next((tuple(tensor.shape[1:]) for tensor in tensors if tensor.is_floating_point()), ())


def _frozen_modules(region: nn.Module) -> frozenset[str]:
    """Paths of modules that have parameters, none of which gets a gradient."""
    trains = {
        path: [parameter.requires_grad for parameter in module.parameters(recurse=False)]
        for path, module in region.named_modules()
    }
    return frozenset(path for path, flags in trains.items() if flags and not any(flags))


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """Builds the kinds of layers of a model from its runs at two batch sizes."""

    twin: nn.Module  # the model on the meta device
    layers: tuple[Layer, ...]
    owners: Owners
    runs: tuple[Observation, ...]  # one for each batch size
    calls: tuple[tuple[BlockCall, ...], ...]  # of blocks, for each run
    sequence: int  # tokens per sample
    shared: Mapping[str, frozenset[str]]  # modules that several layers hold, by kind; see ``held_twice``

    def build(
        self,
        batches: Sequence[Any],
        loss_fn: LossFn | None,
        ends: Sequence[Sequence[Tensor]],
        needs: Mapping[str, Needs],
    ) -> tuple[dict[str, LayerKind], tuple[Passed, ...]]:
        """Return all kinds, in running order, and the tensors with gradients that go between layers.

        Args:
            batches: on the meta device, for each run.
            loss_fn: the user's, if any.
            ends: for each run, the tensors that the loss is made of.
            needs: by layer.
        """
        first: dict[str, Layer] = {}  # of each kind of block
        for layer in self.layers:
            if layer.role is Role.BLOCK:
                first.setdefault(layer.kind, layer)
        captured = {kind: self._block(layer) for kind, layer in first.items()}
        borrowing = {kind: needed for kind, (_, _, needed) in captured.items()}
        passed = passed_tensors(self.layers, self.runs, SAMPLES, borrowing, ends, needs)
        blocks = {kind: block for kind, (block, _, _) in captured.items()}
        lent = self._lent_bytes(passed)
        blocks |= {kind: _with_kept(blocks[kind], size, Recompute) for kind, size in lent.items()}
        lenders = {layer.name for layer in self.layers if layer.kind in lent}
        borrowed = {
            kind: sum(t.size for t in passed if t.borrowed and t.producer in lenders and layer.name in t.readers)
            for kind, layer in first.items()
        }
        regions = {kind: figure.full for kind, (_, figure, _) in captured.items()}
        side = max((region.side - borrowed[kind] for kind, region in regions.items()), default=0)
        (before, opening), (after, closing) = self._edges(batches, loss_fn, side)
        regions |= {"before": opening, "after": closing}
        kinds = {"before": before, **blocks, "after": after}
        outputs = self._kept_outputs(regions)
        kinds = {name: _with_kept(kind, outputs.get(name, 0), (Recompute.NONE,)) for name, kind in kinds.items()}
        for name, size in self._kept_between_blocks().items():
            kinds[name] = _with_kept(kinds[name], size, Recompute)  # no recomputation covers code between blocks
        return kinds, passed

    def output_bytes(self) -> dict[str, int]:
        """Return bytes per sample of each block's output."""
        sizes = [{call.path: _bytes(tensors_of(call.output)) for call in calls} for calls in self.calls]
        return {path: slope(*[size[path] for size in sizes]) for path in sizes[1]}

    def _lent_bytes(self, passed: Sequence[Passed]) -> dict[str, int]:
        """Bytes per sample of tensors that others borrow, by the kind of the block that keeps them.

        A layer that is not the only one of its kind keeps none: what it lends counts with the layer before the blocks.
        """
        kinds = [layer.kind for layer in self.layers]
        alone = {
            layer.name: layer.kind for layer in self.layers if layer.role is Role.BLOCK and kinds.count(layer.kind) == 1
        }
        lent: dict[str, int] = {}
        for tensor in passed:
            if tensor.borrowed and tensor.producer in alone:
                kind = alone[tensor.producer]
                lent[kind] = lent.get(kind, 0) + tensor.size
        return lent

    def _kept_outputs(self, regions: Mapping[str, RegionFigures]) -> dict[str, int]:
        """Bytes per sample of the previous layer's output that autograd keeps, by kind; the largest of each kind.

        An activation in place at a layer's end keeps its output, which the next layer may keep too: the tensor counts
        once, with the next layer, even if that does not keep it.
        """
        sizes: dict[str, int] = {}
        for left, right in pairwise(self.layers):
            if self._reads_output(left, right):
                size = regions[left.kind].held - regions[right.kind].handed
            else:
                size = self._kept_output_alone(left.name, right.name)
            sizes[right.kind] = max(sizes.get(right.kind, 0), size)
        return sizes

    def _reads_output(self, left: Layer, right: Layer) -> bool:
        """Whether a layer's inputs are the previous layer's outputs; true if either is not a block."""
        calls = {call.path: call for call in reversed(self.calls[1])}
        if left.name not in calls or right.name not in calls:
            return True
        outputs = {id(tensor.untyped_storage()) for tensor in tensors_of(calls[left.name].output)}
        return any(id(tensor.untyped_storage()) in outputs for tensor in calls[right.name].inputs)

    def _kept_output_alone(self, left: str, right: str) -> int:
        """Bytes per sample of a block's output that this block alone keeps, less those of the next block's input that
        it and others keep: they count with each of them."""
        sizes = []
        for run, calls in zip(self.runs, self.calls, strict=True):
            by_path = {call.path: call for call in reversed(calls)}
            last = next(index for index, call in enumerate(run.calls) if call is calls[-1])
            keepers: dict[int, set[str]] = {}
            for kept in run.kept:
                inside = [path for path in kept.inside if path in by_path] or ["after"] * (kept.calls > last)
                keepers.setdefault(kept.storage, set()).update(inside)
            bytes_of = {kept.storage: kept.size for kept in run.kept}
            outputs = {id(tensor.untyped_storage()) for tensor in tensors_of(by_path[left].output)}
            inputs = {id(tensor.untyped_storage()) for tensor in by_path[right].inputs}
            alone = sum(bytes_of[storage] for storage in outputs if keepers.get(storage) == {left})
            both = [storage for storage in inputs if right in keepers.get(storage, ()) and len(keepers[storage]) > 1]
            sizes.append(alone - sum(map(bytes_of.__getitem__, both)))
        return slope(*sizes)

    def _kept_between_blocks(self) -> dict[str, int]:
        """Bytes per sample that autograd keeps for code between blocks, by the kind of the block that follows."""
        kinds = {layer.name: layer.kind for layer in self.layers if layer.role is Role.BLOCK}
        small, large = (self._kept_before_blocks(run, kinds) for run in self.runs)
        sizes = dict.fromkeys(kinds.values(), 0)
        for name in large:
            sizes[kinds[name]] = max(sizes[kinds[name]], slope(small.get(name, 0), large[name]))
        return sizes

    def _kept_before_blocks(self, run: Observation, blocks: Collection[str]) -> dict[str, int]:
        """Bytes that code between blocks alone keeps, by the path of the block that follows.

        Modules with parameters count with the layer that has them (``_between``).
        """
        weighty = [p for p in self.layers[0].modules if any(True for _ in self.twin.get_submodule(p).parameters())]
        counted = {*blocks, *weighty}
        elsewhere = {kept.storage for kept in run.kept if not counted.isdisjoint(kept.inside)}
        calls = [index for index, call in enumerate(run.calls) if call.path in blocks]
        sizes: dict[str, int] = {}
        for kept in {kept.storage: kept for kept in run.kept if kept.storage not in elsewhere}.values():
            following = bisect_left(calls, kept.calls)
            if 0 < following < len(calls):
                path = run.calls[calls[following]].path
                sizes[path] = sizes.get(path, 0) + kept.size
        return sizes

    def _block(self, layer: Layer) -> tuple[LayerKind, TensorFigures, tuple[int, ...]]:
        """The kind of a block, its figures, and indices of inputs at its side that backward needs."""
        alike = {other.name for other in self.layers if other.kind == layer.kind}
        block = self.twin.get_submodule(layer.name)
        calls = []
        for block_calls in self.calls:
            candidates = [call for call in block_calls if call.path in alike]
            training = (call for call in candidates if any(tensor.requires_grad for tensor in call.inputs))
            calls.append(next(training, candidates[0]))
        chains = [chain_inputs(block_calls, alike) for block_calls in self.calls]
        runs = [run_block(block, call, chain) for call, chain in zip(calls, chains, strict=True)]
        entering = slope(*[_bytes(call.inputs[i] for i in chain) for call, chain in zip(calls, chains, strict=True)])
        leaving = slope(*[_bytes(tensors_of(call.output)) for call in calls])
        figure = split_block(block, calls, chains, figures(runs[0], runs[1]), self.shared[layer.kind])
        kept = {Recompute.NONE: figure.split("kept")}
        if not (figure.full.overwrites or figure.full.overwrites_heavy):
            kept[Recompute.SELECTIVE] = figure.split("selective")
        if not figure.full.overwrites:
            kept[Recompute.FULL] = TensorSplit(sequence=entering)
        shape = _sample_shape([calls[1].inputs[index] for index in chains[1]])
        return self._kind(layer, figure, kept, (entering, leaving), shape), figure, runs[1].needed

    def _edges(
        self, batches: Sequence[Any], loss_fn: LossFn | None, side: int
    ) -> tuple[tuple[LayerKind, RegionFigures], tuple[LayerKind, RegionFigures]]:
        """The kinds before and after the blocks, each with its figures on one device.

        ``side``: bytes per sample that blocks keep of tensors that all of them read; they count with the first layer.
        """
        before, after = self.layers[0], self.layers[-1]
        runs = [run_edges(self.twin, b, calls, loss_fn) for b, calls in zip(batches, self.calls, strict=True)]
        wholes = [figures(*pair) for pair in zip(*runs, strict=True)]
        first, last = split_edges(
            self.twin, [before.modules, after.modules], batches, self.calls, loss_fn, wholes
        )  # fmt: skip
        for path in before.modules:
            for figure, times in self._between(path):
                first = first.with_unsplit(figure, times)
        kept = replace(first.split("kept"), whole=first.split("kept").whole + side)
        batch = slope(*[_bytes(tensors_of(example)) for example in batches])
        entry = leave = 0  # bytes per sample that enter the first block and leave the last one
        sample_shape = output_shape = _sample_shape(tensors_of(batches[1]))
        if self.calls[0]:
            pairs = [(calls[0], chain_inputs(calls, {calls[0].path})) for calls in self.calls]
            entry = slope(*[_bytes(call.inputs[index] for index in chain) for call, chain in pairs])
            leave = slope(*[_bytes(tensors_of(calls[-1].output)) for calls in self.calls])
            output_shape = _sample_shape(tensors_of(self.calls[1][-1].output))
        opening = self._kind(before, first, {Recompute.NONE: kept}, (batch, entry), sample_shape)
        closing = self._kind(after, last, {Recompute.NONE: last.split("kept")}, (leave, 0), output_shape)
        return (opening, wholes[0]), (closing, wholes[1])

    def _between(self, path: str) -> list[tuple[RegionFigures, int]]:
        """Figures and number of a module's calls between blocks, for each size of its input; other runs miss them."""
        blocks = {layer.name for layer in self.layers if layer.role is Role.BLOCK}
        module = self.twin.get_submodule(path)
        by_size: list[dict[int, list[BlockCall]]] = []  # calls by bytes of their inputs, for each run
        for run in self.runs:
            indices = [index for index, call in enumerate(run.calls) if call.path in blocks]
            weighty = indices and any(True for _ in module.parameters())
            calls = defaultdict(list)
            for call in run.calls[indices[0] : indices[-1]] if weighty else ():
                if call.path == path:
                    calls[_bytes(call.inputs)].append(call)
            by_size.append(calls)
        return [
            (figures(*(run_block(module, calls[0], range(len(calls[0].inputs))) for calls in pair)), len(pair[0]))
            for pair in zip(*(calls.values() for calls in by_size), strict=True)
        ]

    def _kind(
        self,
        layer: Layer,
        figure: TensorFigures,
        kept: dict[Recompute, TensorSplit],
        boundary: tuple[int, int],
        entering: Sequence[int],
    ) -> LayerKind:
        """Put a kind together; ``boundary``: bytes per sample of input and output, ``entering``: shape of the input."""
        is_block, plan = layer.role is Role.BLOCK, figure.plan
        modules = [self.twin.get_submodule(path) for path in layer.modules]
        frozen_modules = _frozen_modules(modules[0] if is_block else self.twin)
        operators = merge(figure.full.calls, figure.shardings(), frozen_modules)
        mixture = mixture_figures(modules[0], figure.full.calls, self.sequence) if is_block else MixtureFigures()
        dims = split_dims(self.twin, modules, layer.role, operators, self.sequence, entering)
        outputs = [x for call in self.calls[1] if call.path in layer.modules for x in tensors_of(call.output)]
        if any(tensor.dim() < 2 for tensor in outputs):  # a loss beside the picture has no channels to split
            dims = replace(dims, out_channels=0)
        kind = LayerKind(
            name=layer.kind,
            parameters=self._parameters(layer, figure.sharded),
            frozen=self._parameters(layer, figure.sharded, frozen=True),
            frozen_experts=mixture.frozen,
            operators=operators,
            kept=kept,
            working=figure.split("working"),
            forward_working=figure.split("forward_working"),
            input_bytes=boundary[0],
            output_bytes=boundary[1],
            dims=replace(dims, experts=mixture.experts or dims.experts),
            buffer_bytes=self.owners.buffer_bytes[layer.name],
            tensor_degrees=plan.max_degree,
            tensor_reason=plan.reason,
            tensor_collectives=plan.collectives,
            sequence_parallel=plan.sequence_parallel,
            regathers=len(plan.regions) if plan.sequence_parallel else 0,
            gathered_output_bytes=sum(
                op.shape[0] * op.shape[2] * self.twin.get_submodule(op.name).get_parameter("weight").element_size()
                for op in operators
                if op.kind is OperatorClass.MATMUL and op.name in plan.heads
            ),
            loss_bytes=figure.loss_bytes,
            tensor_gathers=None if is_block else len(plan.heads),
            tensor_scatters=None if is_block else len(plan.embeddings),
            channel_reasons=self._channel_reasons(layer, dims),
            context_reason=self._context_reason(layer, dims),
            expert_parameters=mixture.parameters,
            dispatched_bytes=mixture.dispatched_bytes,
            routing=mixture.routing,
            expert_reason=mixture.reason,
        )
        usual = {boundary for boundary in boundaries(kind) if kind.sequence_parallel or not boundary.shared}
        seen = figure.boundaries if kind.frozen.total or not is_block else ()
        return replace(kind, boundaries=seen) if seen and set(seen) != usual else kind

    def _channel_reasons(self, layer: Layer, dims: SplitDims) -> dict[str, str]:
        """Why a block does not run on half of its output or input channels; empty if it does."""
        if layer.role is not Role.BLOCK or not dims.height:
            return {}
        call = next(call for call in self.calls[1] if call.path == layer.name)
        reasons = {}
        for by in ("filters", "channels"):
            try:
                infer_channels(self.twin.get_submodule(layer.name), call.args, call.kwargs, by, 2)
            except InputError as error:
                reasons[by] = f"{error.field}: {error.remedy}"
        return reasons

    def _context_reason(self, layer: Layer, dims: SplitDims) -> str:
        """Why a layer does not run on a shard of the tokens; empty if it does."""
        if dims.sequence > 1 and (folded := folded_hidden(self.calls[0], self.calls[1], SAMPLES)):
            return f"{folded} takes several rows a sample, or its samples along another dim than the first"
        if layer.role is not Role.BLOCK or dims.sequence == 1 or dims.in_channels:
            return ""
        block = self.twin.get_submodule(layer.name)
        for path, module in block.named_modules():
            if isinstance(module, BATCH_NORMS) and module.num_features == dims.sequence:
                return f"{path or layer.name} takes statistics of each token, as of a channel"
        call = next(call for call in self.calls[1] if call.path == layer.name)
        name = token_writes(block, call)
        return f"{name} writes to shares of the tokens" if name else ""

    def _parameters(self, layer: Layer, sharded: frozenset[str], *, frozen: bool = False) -> TensorSplit:
        """Parameter items, or the frozen ones; names in ``sharded`` are relative to a block, or else to the model."""
        prefix = f"{layer.name}." if layer.role is Role.BLOCK else ""
        parts = {f"{prefix}{name}" for name in sharded}
        parameters = self.owners.parameters[layer.name]
        split = items_of((parameter for name, parameter in parameters.items() if name in parts), frozen=frozen)
        return TensorSplit(tensor=split, whole=items_of(parameters.values(), frozen=frozen) - split)
