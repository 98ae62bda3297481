"""Model capture: any module and an example batch become a ``ModelGraph``, with no data run and no weight touched."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.capture.limits import (
    check_replaced,
    dead_parameters,
    folded_argument,
    one_stage_reason,
    split_dims,
    token_writes,
)
from galvatron_lite.capture.shared import (
    Owners,
    find_owners,
    items_of,
    layer_needs,
    lent,
    linked,
    passed_between,
    read_elsewhere,
)
from galvatron_lite.capture.tensor import (
    MixtureFigures,
    TensorFigures,
    mixture_figures,
    run_edges,
    split_block,
    split_edges,
)
from galvatron_lite.errors import InputError, TraceError
from galvatron_lite.model.balancing import undivided_reason
from galvatron_lite.model.batch import (
    LossFn,
    batch_size,
    call_model,
    check_entries,
    loss_of,
    map_tensors,
    places,
    resize_batch,
    sequence_length,
    tensors_of,
)
from galvatron_lite.model.discover import BlockNames, Watched, arrange_layers, kept_error, signature, unit_paths, watch
from galvatron_lite.model.graph import (
    Layer,
    LayerKind,
    ModelGraph,
    OperatorClass,
    Passed,
    Recompute,
    Role,
    SplitDims,
    TensorSplit,
    dead_note,
)
from galvatron_lite.model.trace.figures import SAMPLES, RegionFigures, figures, merge, slope
from galvatron_lite.model.trace.flow import Needs
from galvatron_lite.model.trace.meta import BATCH_NORMS, check_model, dtype_of, meta_copy, precision_of
from galvatron_lite.model.trace.run import BlockCall, Observation, chain_inputs, garbage_waits, observe, run_block
from galvatron_lite.parallelism.channel.infer import infer_channels
from galvatron_lite.parallelism.precision import narrow_norms
from galvatron_lite.parallelism.tensor.cost import boundaries
from galvatron_lite.parallelism.tensor.infer import held_twice


@garbage_waits()
def trace(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    blocks: BlockNames | None = None,
    precision: str | None = None,
    name: str | None = None,
    watched: Watched | None = None,
) -> ModelGraph:
    """Capture a model: its layers and, for one sample, what each computes, moves and keeps.

    Everything runs on a copy of the model on the meta device (shapes only): a 70B model takes seconds and no memory.
    Each kind of structurally equal layers is run in detail once, forward and backward, at two batch sizes, and so is
    one device's share of it under tensor parallelism.

    Operators are those PyTorch runs on CPU, but for attention, which counts as a fused kernel runs it, with dropout
    too. What does not grow with the batch (causal masks, position tables) is left out of every figure.

    Args:
        model: on any device, the meta device included; it is not changed.
        batch: example batch (see ``model.batch``); only its shapes matter, and the batch size does not.
        loss_fn: ``loss_fn(output, batch)``; by default the model's own loss.
        blocks: how to find the repeated blocks (see ``discover_layers``).
        precision: trace as if the model were cast to it (``bf16``); by default as the parameters are.
        name: of the graph; by default the model's class.
        watched: of ``watch_model``, with the same model, batch and blocks, to go on from that run; used up by it.

    Raises:
        TraceError: the model or a block cannot be captured; names it and the cause.
        InputError: no loss can be found in the output.
    """
    check_model(model)
    check_entries(model, batch, loss_fn)
    twin = watched.twin if watched is not None and precision is None else meta_copy(model, precision)
    batches = [_example(batch, samples, precision) for samples in SAMPLES]
    if precision_of(twin) in ("bf16", "fp16"):
        narrow_norms(twin)  # as training has it
    try:
        watched = watched if watched is not None and precision is None else watch(twin, batches[1], blocks)
        fewer = observe(twin, batches[0], unit_paths(twin, watched.blocks, watched.seen.order))
    except TraceError as error:
        other = kept_error(model, batch) or _row_error(twin, batch, precision, blocks, error)
        if other is None:
            raise
        raise other from error
    check_replaced(model, twin)
    with watched.flow:
        outputs = _ends(watched.output, batches[1], loss_fn)
    seen = (fewer, watched.seen)
    layers = arrange_layers(twin, watched.blocks, seen[1].order, _signatures(twin, seen[1]))
    calls = tuple(_block_calls(layers, observation) for observation in seen)
    sequence, shared = _sequence(batches[1], calls[1]), held_twice(twin, layers)
    capture = _Capture(twin, layers, find_owners(twin, layers), seen, calls, sequence, shared)
    ends = [_ends(one.output, example, loss_fn) for one, example in zip(seen, batches, strict=True)]
    needs = layer_needs(watched.flow, twin, layers, watched.flow.sources_of_tensors(outputs))
    kinds, passed = capture.kinds(batches, loss_fn, ends, needs)
    tensors = linked(layers, passed, needs, capture.output_bytes(), watched.forked)
    dead = dead_parameters(twin, watched.flow, outputs if loss_fn is not None else watched.output)
    goal = "what the model returns" if loss_fn is None else "the loss"
    return ModelGraph(
        name=name or type(model).__name__,
        layers=layers,
        kinds=kinds,
        tensors=tensors,
        sequence=sequence,
        precision=precision_of(twin),
        ties=capture.owners.ties + (read_elsewhere(watched.flow, twin, layers) if tensors else ()),
        notes=dead_note(dead, sum(p.numel() for p in twin.parameters()), goal),
        whole=one_stage_reason(twin, layers, seen[0], ends[0], watched.flow),
        dead=dead,
        undivided=undivided_reason(model, batch),
        least_samples=_least_samples(twin, _example(batch, 1, precision)),
        folded=folded_argument(calls[0], calls[1], SAMPLES),
        compares="" if watched.flow.compared is None else watched.flow.compared or "the model",
    )


def _least_samples(twin: nn.Module, sample: Any) -> int:
    """Two where the model refuses one sample: a batch norm of rows has no statistics of it."""
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in twin.modules()):
        return 1
    try:
        with torch.no_grad():
            call_model(twin, sample)
    except ValueError:
        return 2
    return 1


def _example(batch: Any, samples: int, precision: str | None) -> Any:
    resized = resize_batch(batch, samples)
    if precision is None:
        return resized
    dtype = dtype_of(precision)
    return map_tensors(resized, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _row_error(
    twin: nn.Module, batch: Any, precision: str | None, blocks: BlockNames | None, error: TraceError
) -> TraceError | None:
    """Of a model that does not run on fewer samples: that a tensor has none, or a list some; None where it is so with
    all samples, too."""
    rows = batch_size(batch)
    try:
        watch(twin, _example(batch, rows, precision), blocks)
    except TraceError:
        return None
    names = [place.lstrip(".") for place, tensor in places(batch) if tensor.dim() and tensor.shape[0] == rows]
    remedy = (
        f"The batch has {rows} samples, so tensors whose first dimension is {rows} are taken to have a row for each. "
        f"With fewer rows the model does not run. {error.remedy.removesuffix('.')}. Give a tensor without samples a "
        "first dimension of 1, or the example batch another number of samples; make lists of samples tensors."
    )
    return TraceError("batch", ", ".join(names), remedy)


def _signatures(twin: nn.Module, seen: Observation) -> dict[str, Hashable]:
    """What equal blocks share: structure, shapes that enter, which parameters they share with others, and of those with
    frozen parameters whether gradients go further back."""
    holders: dict[int, set[str]] = {}
    for path in {call.path for call in seen.calls}:
        for parameter in twin.get_submodule(path).parameters():
            holders.setdefault(id(parameter), set()).add(path)
    keys: dict[str, Hashable] = {}
    for call in seen.calls:
        block = twin.get_submodule(call.path)
        frozen = any(not parameter.requires_grad for parameter in block.parameters())
        shapes = tuple((tuple(input_.shape), input_.dtype, frozen and input_.requires_grad) for input_ in call.inputs)
        shared = tuple(name for name, p in block.named_parameters() if len(holders[id(p)]) > 1)
        keys.setdefault(call.path, (signature(block), shapes, shared))
    return keys


def _sequence(batch: Any, calls: Sequence[BlockCall]) -> int:
    """Tokens per sample: of the batch, else of a hidden state (samples, tokens, channels)."""
    tokens = sequence_length(batch)
    hidden = [one for call in calls[:1] for one in call.inputs if one.dim() == 3 and one.is_floating_point()]
    return hidden[0].shape[1] if tokens == 1 and hidden else tokens


def _block_calls(layers: Sequence[Layer], seen: Observation) -> tuple[BlockCall, ...]:
    """The calls of blocks, in order."""
    names = dict.fromkeys(layer.name for layer in layers if layer.role is Role.BLOCK)
    calls = tuple(call for call in seen.calls if call.path in names)
    ran = {call.path for call in calls}
    if unused := next((name for name in names if name not in ran), ""):
        remedy = "It never runs on this batch; give a batch that uses it, or name the blocks yourself (blocks=)."
        raise TraceError("block", unused, remedy)
    return calls


def _ends(output: Any, batch: Any, loss_fn: LossFn | None) -> list[Tensor]:
    """The loss; all of the output where that cannot be seen (the user's function may need data)."""
    try:
        with torch.device("meta"):
            return [loss_of(output, batch, loss_fn)]
    except Exception:
        return list(tensors_of(output))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _keeping(kind: LayerKind, size: int, choices: Iterable[Recompute]) -> LayerKind:
    """The kind that keeps so many bytes more under some choices."""
    more = {
        choice: replace(kind.kept[choice], whole=kind.kept[choice].whole + size)
        for choice in choices
        if choice in kind.kept
    }
    return replace(kind, kept=kind.kept | more)


def _sample_shape(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Shape of one sample of the first floating tensor; empty where there is none."""
    return next((tuple(tensor.shape[1:]) for tensor in tensors if tensor.is_floating_point()), ())


def _frozen(region: nn.Module) -> frozenset[str]:
    """Paths of modules in it whose parameters all get no gradient."""
    held = {path: [one.requires_grad for one in part.parameters(recurse=False)] for path, part in
            region.named_modules()}  # fmt: skip
    return frozenset(path for path, trains in held.items() if trains and not any(trains))


@dataclass(frozen=True, slots=True)
class _Capture:
    """A model on the meta device, its layers, and its runs and the blocks' calls at the two batch sizes."""

    twin: nn.Module
    layers: tuple[Layer, ...]
    owners: Owners
    seen: tuple[Observation, ...]
    calls: tuple[tuple[BlockCall, ...], ...]
    sequence: int
    shared: Mapping[str, frozenset[str]]  # see ``held_twice``

    def kinds(
        self,
        batches: Sequence[Any],
        loss_fn: LossFn | None,
        ends: Sequence[Sequence[Tensor]],
        needs: Mapping[str, Needs],
    ) -> tuple[dict[str, LayerKind], tuple[Passed, ...]]:
        """Every kind of layer, in running order, and the tensors with gradients that go between layers.

        Args:
            batches: on the meta device.
            ends: what the loss of each run is made of.
            needs: of each layer.
        """
        first: dict[str, Layer] = {}
        for layer in self.layers:
            if layer.role is Role.BLOCK:
                first.setdefault(layer.kind, layer)
        captured = {kind: self._block(layer) for kind, layer in first.items()}
        borrowing = {kind: own[2] for kind, own in captured.items()}
        tensors = passed_between(self.layers, self.seen, SAMPLES, borrowing, ends, needs)
        blocks, lending = self._lending({kind: block for kind, (block, _, _) in captured.items()}, tensors)
        borrowed = {
            kind: sum(t.size for t in tensors if t.borrowed and t.producer in lending and layer.name in t.readers)
            for kind, layer in first.items()
        }
        regions = {kind: figure.full for kind, (_, figure, _) in captured.items()}
        sides = [region.side - borrowed[kind] for kind, region in regions.items()]
        (before, opening), (after, closing) = self._edges(batches, loss_fn, max(sides, default=0))
        regions |= {"before": opening, "after": closing}
        # an activation in place at a layer's end keeps its output: one tensor, counted with the layer that it enters,
        # also where that does not keep it itself
        extra = dict.fromkeys(("before", *blocks, "after"), 0)
        for left, right in pairwise(self.layers):
            follows = self._follows(left, right)
            alone = (
                regions[left.kind].held - regions[right.kind].handed
                if follows
                else self._held_alone(left.name, right.name)
            )
            extra[right.kind] = max(extra[right.kind], alone)
        kinds = {"before": before, **blocks, "after": after}
        kinds = {name: _keeping(kind, extra[name], (Recompute.NONE,)) for name, kind in kinds.items()}
        for kind, size in self._between_blocks().items():
            kinds[kind] = _keeping(kinds[kind], size, Recompute)  # code between blocks is not computed again
        return kinds, tensors

    def _follows(self, left: Layer, right: Layer) -> bool:
        """Whether what a layer takes is what the one before it gave, as far as that can be seen."""
        taken, before = (next((c for c in self.calls[1] if c.path == one.name), None) for one in (right, left))
        if taken is None or before is None:
            return True
        given = {id(tensor.untyped_storage()) for tensor in tensors_of(before.output)}
        return any(id(tensor.untyped_storage()) in given for tensor in taken.inputs)

    def _held_alone(self, left: str, right: str) -> int:
        """Bytes per sample of what a block gives that it alone keeps, less what the next one keeps of what it takes and
        others keep, too: that counts with each of them."""
        sizes = []
        for seen, calls in zip(self.seen, self.calls, strict=True):
            by_path = {call.path: call for call in reversed(calls)}
            given, taken = (
                {id(one.untyped_storage()) for one in tensors}
                for tensors in (tensors_of(by_path[left].output), by_path[right].inputs)
            )
            last = next(place for place, one in enumerate(seen.calls) if one is calls[-1])
            keepers: dict[int, set[str]] = {}
            for one in seen.kept:
                inside = [path for path in one.inside if path in by_path] or ["after"] * (one.calls > last)
                keepers.setdefault(one.storage, set()).update(inside)
            bytes_of = {one.storage: one.size for one in seen.kept}
            alone = sum(bytes_of[one] for one in given if keepers.get(one) == {left})
            again = sum(bytes_of[one] for one in taken if right in keepers.get(one, ()) and len(keepers[one]) > 1)
            sizes.append(alone - again)
        return slope(*sizes)

    def _between_blocks(self) -> dict[str, int]:
        """Bytes per sample that code between blocks keeps for backward, by the kind of block that comes next."""
        kinds = {layer.name: layer.kind for layer in self.layers if layer.role is Role.BLOCK}
        few, more = (self._kept_between(one, kinds) for one in self.seen)
        sizes = dict.fromkeys(kinds.values(), 0)
        for name in more:
            sizes[kinds[name]] = max(sizes[kinds[name]], slope(few.get(name, 0), more[name]))
        return sizes

    def _kept_between(self, seen: Observation, blocks: Collection[str]) -> dict[str, int]:
        """Bytes that are kept for code between blocks alone, by the block that comes next. What modules with parameters
        keep there counts with the layer that has these (``_between``)."""
        counted = set(blocks).union(
            path for path in self.layers[0].modules if any(True for _ in self.twin.get_submodule(path).parameters())
        )
        elsewhere = {one.storage for one in seen.kept if not counted.isdisjoint(one.inside)}
        places = [place for place, call in enumerate(seen.calls) if call.path in blocks]
        others = {one.storage: one for one in seen.kept if one.storage not in elsewhere}
        sizes = dict[str, int]()
        for one in others.values():
            after = bisect_left(places, one.calls)
            if 0 < after < len(places):
                name = seen.calls[places[after]].path
                sizes[name] = sizes.get(name, 0) + one.size
        return sizes

    def output_bytes(self) -> dict[str, int]:
        """Bytes per sample that each block gives."""
        sizes = [{call.path: _bytes(tensors_of(call.output)) for call in calls} for calls in self.calls]
        return {path: slope(*[size[path] for size in sizes]) for path in sizes[1]}

    def _lending(
        self, blocks: dict[str, LayerKind], tensors: Sequence[Passed]
    ) -> tuple[dict[str, LayerKind], frozenset[str]]:
        """The kinds with what others borrow of them among what they keep, and the names of layers that lend it.

        What a layer lends that is not the only one of its kind counts with what stands before the blocks.
        """
        alone = {layer.name: layer.kind for layer in self.layers if sum(o.kind == layer.kind for o in self.layers) == 1}
        lending = frozenset(t.producer for t in tensors if t.borrowed and alone.get(t.producer) in blocks)
        changed = {
            alone[name]: _keeping(blocks[alone[name]], lent(tensors, name), Recompute) for name in sorted(lending)
        }
        return blocks | changed, lending

    def _block(self, layer: Layer) -> tuple[LayerKind, TensorFigures, tuple[int, ...]]:
        alike = {other.name for other in self.layers if other.kind == layer.kind}
        block = self.twin.get_submodule(layer.name)
        same = [[call for call in chained if call.path in alike] for chained in self.calls]
        # the first of which some input takes a gradient; the first where there is none
        trained = [(call for call in calls if any(one.requires_grad for one in call.inputs)) for calls in same]
        calls = [next(training, alike_calls[0]) for training, alike_calls in zip(trained, same, strict=True)]
        chains = [chain_inputs(chained, alike) for chained in self.calls]
        runs = [run_block(block, call, chain) for call, chain in zip(calls, chains, strict=True)]
        entering = slope(*[_bytes(call.inputs[i] for i in chain) for call, chain in zip(calls, chains, strict=True)])
        leaving = slope(*[_bytes(tensors_of(call.output)) for call in calls])
        figure = split_block(block, calls, chains, figures(runs[0], runs[1]), self.shared[layer.kind])
        kept = {Recompute.NONE: figure.split("kept")}
        if not (figure.full.overwrites or figure.full.overwrites_heavy):
            kept[Recompute.SELECTIVE] = figure.split("selective")
        if not figure.full.overwrites:
            kept[Recompute.FULL] = TensorSplit(sequence=entering)
        shape = _sample_shape([calls[1].inputs[place] for place in chains[1]])
        return self._kind(layer, figure, kept, (entering, leaving), shape), figure, runs[1].needed

    def _edges(
        self, batches: Sequence[Any], loss_fn: LossFn | None, side: int
    ) -> tuple[tuple[LayerKind, RegionFigures], tuple[LayerKind, RegionFigures]]:
        """The layers before and after the blocks, and their figures on one device."""
        before, after = self.layers[0], self.layers[-1]
        runs = [run_edges(self.twin, b, calls, loss_fn) for b, calls in zip(batches, self.calls, strict=True)]
        wholes = [figures(*pair) for pair in zip(*runs, strict=True)]
        modules = [before.modules, after.modules]
        first, last = split_edges(self.twin, modules, batches, self.calls, loss_fn, wholes)
        for path in before.modules:
            for figure, times in self._between(path):
                first = first.with_unsplit(figure, times)
        kept = replace(first.split("kept"), whole=first.split("kept").whole + side)
        batch = slope(*[_bytes(tensors_of(example)) for example in batches])
        entry = leave = 0  # bytes per sample that enter the first block and leave the last one
        if self.calls[0]:
            chains = [chain_inputs(calls, {calls[0].path}) for calls in self.calls]
            pairs = zip(self.calls, chains, strict=True)
            entry = slope(*[_bytes(calls[0].inputs[place] for place in chain) for calls, chain in pairs])
            leave = slope(*[_bytes(tensors_of(calls[-1].output)) for calls in self.calls])
        sample_shape = _sample_shape(tensors_of(batches[1]))
        handed = _sample_shape(tensors_of(self.calls[1][-1].output)) if self.calls[1] else sample_shape
        opening = self._kind(before, first, {Recompute.NONE: kept}, (batch, entry), sample_shape)
        closing = self._kind(after, last, {Recompute.NONE: last.split("kept")}, (leave, 0), handed)
        return (opening, wholes[0]), (closing, wholes[1])

    def _between(self, path: str) -> list[tuple[RegionFigures, int]]:
        """Figures of a module that runs several times, for each size of what goes in, with how often it does so between
        blocks, where edges do not run."""
        blocks = {layer.name for layer in self.layers if layer.role is Role.BLOCK}
        block = self.twin.get_submodule(path)
        alike: list[dict[int, list[BlockCall]]] = []  # calls by size, in both runs
        for one in self.seen:
            places = [place for place, call in enumerate(one.calls) if call.path in blocks]
            calls = one.calls[places[0] : places[-1]] if places and any(True for _ in block.parameters()) else []
            by_size = defaultdict(list)
            for call in calls:
                if call.path == path:
                    by_size[_bytes(call.inputs)].append(call)
            alike.append(by_size)
        return [
            (figures(*(run_block(block, calls[0], range(len(calls[0].inputs))) for calls in pair)), len(pair[0]))
            for pair in zip(*(one.values() for one in alike), strict=True)
        ]

    def _kind(
        self,
        layer: Layer,
        figure: TensorFigures,
        kept: dict[Recompute, TensorSplit],
        boundary: tuple[int, int],
        entering: Sequence[int],
    ) -> LayerKind:
        modules = [self.twin.get_submodule(path) for path in layer.modules]
        operators = merge(
            figure.full.calls, figure.shardings(), _frozen(modules[0] if layer.role is Role.BLOCK else self.twin)
        )
        plan = figure.plan
        mixture = MixtureFigures()
        if layer.role is Role.BLOCK:
            mixture = mixture_figures(modules[0], figure.full.calls, self.sequence)
        dims = split_dims(self.twin, modules, layer.role, operators, self.sequence, entering)
        returned = [one for call in self.calls[1] if call.path in layer.modules for one in tensors_of(call.output)]
        if any(tensor.dim() < 2 for tensor in returned):  # a loss beside the picture has no channels to share
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
                one.shape[0] * one.shape[2] * self.twin.get_submodule(one.name).get_parameter("weight").element_size()
                for one in operators
                if one.kind is OperatorClass.MATMUL and one.name in plan.heads
            ),
            loss_bytes=figure.loss_bytes,
            tensor_gathers=None if layer.role is Role.BLOCK else len(plan.heads),
            tensor_scatters=None if layer.role is Role.BLOCK else len(plan.embeddings),
            channel_reasons=self._channel_reasons(layer, dims),
            context_reason=self._context_reason(layer, dims),
            expert_parameters=mixture.parameters,
            dispatched_bytes=mixture.dispatched_bytes,
            routing=mixture.routing,
            expert_reason=mixture.reason,
        )
        usual = {boundary for boundary in boundaries(kind) if kind.sequence_parallel or not boundary.shared}
        told = figure.boundaries if kind.frozen.total or layer.role is not Role.BLOCK else ()
        return replace(kind, boundaries=told) if told and set(told) != usual else kind

    def _channel_reasons(self, layer: Layer, dims: SplitDims) -> dict[str, str]:
        """Why a block does not run on shares of its output or input channels; tried on two."""
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
        """Why a block does not run on shares of the tokens."""
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
        """Parameter items, or the frozen ones.

        ``sharded`` names those split, from the layer where it is one block, else from the model.
        """
        prefix = f"{layer.name}." if layer.role is Role.BLOCK else ""
        parts = {f"{prefix}{name}" for name in sharded}
        parameters = self.owners.parameters[layer.name]
        split = items_of((parameter for name, parameter in parameters.items() if name in parts), frozen=frozen)
        return TensorSplit(tensor=split, whole=items_of(parameters.values(), frozen=frozen) - split)
