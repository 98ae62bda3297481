"""Figures of a layer under tensor and expert parallelism: what one device computes, moves and keeps of it.

A shard of each layer really runs, on the meta device; comparing its figures with those of the full layer tells how each
figure is divided.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.capture.limits import nodes_behind
from galvatron_lite.capture.shared import items_of
from galvatron_lite.errors import GalvatronError
from galvatron_lite.model.batch import LossFn, call_model, loss_of, map_tensors, tensors_of
from galvatron_lite.model.gates import keeping_gates
from galvatron_lite.model.graph import OperatorClass, Routing, Sharding, TensorBoundary, TensorSplit
from galvatron_lite.model.shapes.fields import AUXILIARY_LOSS, CORRECTED_SCORES
from galvatron_lite.model.trace.figures import RegionFigures, figures, slope
from galvatron_lite.model.trace.meta import copy_with
from galvatron_lite.model.trace.record import OperatorCall, Recorder, Recording
from galvatron_lite.model.trace.run import BlockCall, RegionRun, entered, explaining, region_end, run_block, shapes_only
from galvatron_lite.parallelism.expert.find import BlockMixture, find_mixtures
from galvatron_lite.parallelism.tensor.apply import shard_layer
from galvatron_lite.parallelism.tensor.group import ListeningGroup
from galvatron_lite.parallelism.tensor.infer import NOT_OFFERED, infer_block, infer_edge
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement


class _BlockStandIn:
    """Runs in place of the blocks: returns what they returned, detached from their inputs.

    Hooks of the model on modules inside a block are called with what these modules returned.
    """

    def __init__(self, twin: nn.Module, recorder: Recorder, calls: Sequence[BlockCall], after: Recording) -> None:
        self.twin, self.recorder, self.calls, self.after = twin, recorder, calls, after
        self.entry: list[Tensor] = []  # inputs of the first block
        self.leaves: list[Tensor] = []  # outputs of all blocks, and what hooks take from inside them
        self.last_outputs: tuple[int, ...] = ()  # storages of the last block's outputs
        self.earlier_outputs: list[int] = []  # storages of other outputs
        self._next = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._next == 0:
            self.entry = [*tensors_of(args), *tensors_of(kwargs)]
        self.recorder.target = None
        call = self.calls[self._next]
        for inner in call.heard:
            output, storages = self._detached_output(inner)
            self.earlier_outputs += storages
            module = self.twin.get_submodule(inner.path)
            with _replaced([module], lambda *_args, output=output, **_kwargs: output):
                module(*inner.args, **inner.kwargs)
        self.earlier_outputs += self.last_outputs
        output, self.last_outputs = self._detached_output(call)
        self._next += 1
        if self._next == len(self.calls):
            self.recorder.target = self.after
        return output

    def _detached_output(self, call: BlockCall) -> tuple[Any, tuple[int, ...]]:
        """An output made of new leaves, which are noted, and its storages."""

        def fresh(tensor: Tensor) -> Tensor:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            return empty.requires_grad_(tensor.requires_grad)

        leaves = map_tensors(call.output, fresh)
        self.leaves += tensors_of(leaves)
        output = map_tensors(leaves, entered)
        return output, tuple(self.recorder.number(tensor) for tensor in tensors_of(output))


@contextmanager
def _replaced(modules: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    for module in modules:
        module.forward = forward  # an attribute of the instance takes precedence over the method of its class
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def run_edges(
    twin: nn.Module, batch: Any, calls: Sequence[BlockCall], loss_fn: LossFn | None
) -> tuple[RegionRun, RegionRun]:
    """Run what lies before and after the blocks forward and backward on the meta device.

    Args:
        twin: the model on the meta device.
        calls: the blocks' calls in order; without any, everything belongs to the region before them.

    Raises:
        TraceError: the model does not run.
        InputError: it returns no loss.
    """
    recorder, before, after = Recorder(), Recording(), Recording()
    blocks = {call.path: twin.get_submodule(call.path) for call in calls}
    stand_in = _BlockStandIn(twin, recorder, calls, after)
    with (
        keeping_gates(twin),
        explaining("", twin),
        shapes_only(recorder),
        recorder.watching(twin),
        _replaced(list(blocks.values()), stand_in),
    ):
        recorder.target = before
        batch_storages = tuple(recorder.number(tensor) for tensor in tensors_of(batch))
        loss = loss_of(call_model(twin, batch), batch, loss_fn)
        recorder.claim(loss, "")
        recorder.claim(stand_in.entry, "")
        last = after if calls else before
        recorder.target = None
        ends = [tensor for tensor in (*twin.parameters(), *stand_in.leaves) if tensor.requires_grad]
        # those that are read behind the blocks
        trained = [tensor for tensor in ends if not calls or recorder.number(tensor) in after.sizes]
        recorder.start_backward(last)
        if trained and loss.requires_grad:
            # a skip connection around the blocks leads to what runs before them, which runs backward once more
            variables = {id(getattr(node, "variable", None)) for node in nodes_behind(stand_in.entry, ())}
            retain = any(id(tensor) in variables for tensor in trained)
            torch.autograd.backward([loss], inputs=trained, retain_graph=retain)
        recorder.finish(last, twin.parameters())
        end = region_end(stand_in.entry)
        if end is not None:
            recorder.start_backward(before)
            torch.autograd.backward([end])
            recorder.finish(before, twin.parameters())
        leaving = tuple(recorder.number(tensor) for tensor in stand_in.entry)
    entering = (*stand_in.last_outputs, *stand_in.earlier_outputs, *batch_storages)
    return (
        RegionRun(before, batch_storages, (), leaving=leaving),
        RegionRun(after, entering, (), handed=stand_in.last_outputs),
    )


_CLOSE = 0.05  # relative difference of work up to which a call counts as divided
_NO_PAIR = f"No two matmuls with weights run in it, one to split by columns and one by rows{NOT_OFFERED}."


@dataclass(frozen=True, slots=True)
class TensorFigures:
    """Figures of a full region, and of one device's share of it in a tensor group."""

    full: RegionFigures  # on one device
    plan: TensorPlan  # how it is split
    degree: int  # of the group whose share ran; 1 if the region is not split
    share: RegionFigures  # ``full`` if the region is not split
    tokens: RegionFigures  # the share under sequence parallelism; ``share`` if that is not offered
    sharded: frozenset[str] = frozenset()  # names of parameters (inside the layer) that are split
    loss_bytes: int = 0  # see ``LayerKind``
    boundaries: tuple[TensorBoundary, ...] = ()  # of its regions

    def split(self, figure: str) -> TensorSplit:
        """Split a figure of ``RegionFigures`` by how it is divided.

        Solves share = tensor / degree + sequence + rest and tokens = tensor / degree + sequence / degree + rest. The
        parts add up to the figure of the full region, so copies that only a split layer makes are left out.
        """
        total, share, tokens = (getattr(region, figure) for region in (self.full, self.share, self.tokens))
        if self.degree == 1:
            return TensorSplit(whole=total)

        def part(saved: int, most: int) -> int:
            return min(max(0, saved * self.degree // (self.degree - 1)), most)

        tensor = part(total - share, total)
        sequence = part(share - tokens, total - tensor)
        return TensorSplit(tensor=tensor, sequence=sequence, whole=total - tensor - sequence)

    def with_unsplit(self, more: RegionFigures, times: int) -> TensorFigures:
        """Add a region that is not split and runs ``times`` times."""
        full, share, tokens = (
            replace(
                region,
                calls=region.calls + more.calls * times,
                kept=region.kept + more.kept * times,
                selective=region.selective + more.selective * times,
                working=max(region.working, more.working),
                forward_working=max(region.forward_working, more.forward_working),
            )
            for region in (self.full, self.share, self.tokens)
        )
        return replace(self, full=full, share=share, tokens=tokens)

    def shardings(self) -> dict[tuple[str, OperatorClass], Sharding]:
        """Return how the calls of each module and class are divided; empty if the region is not split."""
        if self.degree == 1:
            return {}
        full, share, tokens = (_forward_work(region) for region in (self.full, self.share, self.tokens))

        def is_divided(part: int, total: int) -> bool:
            return total > 0 and abs(part * self.degree - total) <= _CLOSE * total

        shardings = dict.fromkeys(full, Sharding.NONE)
        shardings |= {key: Sharding.SEQUENCE for key, total in full.items() if is_divided(tokens[key], total)}
        return shardings | {key: Sharding.TENSOR for key, total in full.items() if is_divided(share[key], total)}


def _forward_work(region: RegionFigures) -> Counter[tuple[str, OperatorClass]]:
    """FLOPs, or bytes of memory-bound calls, by module and class."""
    work: Counter[tuple[str, OperatorClass]] = Counter()
    for call in region.calls:
        if not call.backward:
            work[call.path, call.kind] += call.flops or call.moved
    return work


def _unsplit(figures: RegionFigures, reason: str) -> TensorFigures:
    """Figures of a layer without tensor parallelism."""
    return TensorFigures(figures, TensorPlan(reason=reason), 1, figures, figures)


def split_block(
    block: nn.Module,
    calls: Sequence[BlockCall],
    chains: Sequence[Sequence[int]],
    figures: RegionFigures,
    shared: Collection[str] = (),
) -> TensorFigures:
    """Run one device's share of a block and return its figures beside those of the full block.

    Args:
        block: on the meta device; not changed.
        calls: its call at both batch sizes.
        chains: indices of the inputs that come from the previous layer, at both batch sizes.
        figures: of the full block.
        shared: names of modules that other layers hold too.
    """
    matmuls = (call for call in figures.calls if call.kind is OperatorClass.MATMUL and not call.backward)
    if sum(call.weight_bytes > 0 for call in matmuls) < 2:
        return _unsplit(figures, _NO_PAIR)  # before the block runs on real data, for which pictures may be too large
    plan = infer_block(block, calls[1].args, calls[1].kwargs, shared)
    if plan.max_degree == 1:
        return _unsplit(figures, plan.reason)
    degree = next(factor for factor in range(2, plan.max_degree + 1) if plan.max_degree % factor == 0)
    chained = [calls[1].inputs[index] for index in chains[1]]
    divisible = all(tensor.dim() > 1 and tensor.shape[1] % degree == 0 for tensor in chained)
    choices = [False, True] if plan.sequence_parallel and divisible else [False]
    try:
        shares = [_run_share(block, calls, chains, plan, degree, choice) for choice in choices]
    except GalvatronError as error:
        return _unsplit(figures, f"One device's share of it does not run: {error}")
    (share, sharded, _), (tokens, _, _) = shares[0], shares[-1]
    boundaries = tuple(boundary for _, _, found in shares for boundary in found)
    return TensorFigures(figures, plan, degree, share, tokens, sharded, boundaries=boundaries)


def _fresh_leaf(tensor: Tensor) -> Tensor:
    """A copy detached from its graph, which a tensor that a run left in an attribute still has."""
    return tensor.detach().clone().requires_grad_(tensor.is_leaf and tensor.requires_grad)


def _run_share(
    block: nn.Module,
    calls: Sequence[BlockCall],
    chains: Sequence[Sequence[int]],
    plan: TensorPlan,
    degree: int,
    sequence_parallel: bool,
) -> tuple[RegionFigures, frozenset[str], tuple[TensorBoundary, ...]]:
    """One device's figures, names of the parameters that are split, and the collectives of the tensor group."""
    runs = []
    groups = [ListeningGroup(degree) for _ in calls]
    for call, chain, group in zip(calls, chains, groups, strict=True):
        twin = copy_with(block, _fresh_leaf)
        shards = shard_layer(twin, plan, group, sequence_parallel)
        shard = _shard_tokens(call, chain, degree) if sequence_parallel else call
        runs.append(run_block(twin, shard, chain))
    rows = {row for region in plan.regions for row in region.rows}
    share = figures(*runs, rows=rows, degree=degree if sequence_parallel else 1)
    counts: dict[int, Counter[str]] = defaultdict(Counter)  # collectives of the group, by bytes a sample
    for (kind, small), (_, large) in zip(*(group.heard for group in groups), strict=True):
        counts[slope(small, large)][kind] += 1
    boundaries = tuple(TensorBoundary(size, sequence_parallel, **numbers) for size, numbers in counts.items())
    return share, _sharded(shards), boundaries


def _shard_tokens(call: BlockCall, chain: Sequence[int], degree: int) -> BlockCall:
    """The call with one device's tokens (dim 1) of the inputs that come from the previous layer."""
    indices = count()

    def shard(tensor: Tensor) -> Tensor:
        if next(indices) not in chain:
            return tensor
        part = tensor.new_empty(tensor.shape[0], tensor.shape[1] // degree, *tensor.shape[2:])
        return part.requires_grad_(tensor.requires_grad)

    args, kwargs = map_tensors((call.args, call.kwargs), shard)
    return BlockCall(call.path, args, kwargs, call.output)


def _sharded(shards: Mapping[str, ParameterShard]) -> frozenset[str]:
    return frozenset(name for name, shard in shards.items() if shard.placement is Placement.SHARDED)


def split_edges(
    twin: nn.Module,
    modules: Sequence[Sequence[str]],
    batches: Sequence[Any],
    calls: Sequence[Sequence[BlockCall]],
    loss_fn: LossFn | None,
    wholes: Sequence[RegionFigures],
) -> tuple[TensorFigures, TensorFigures]:
    """Run one device's share of the layers before and after the blocks; return figures of both.

    Args:
        twin: the model on the meta device; not changed.
        modules: paths of the modules before the blocks, and of those after.
        batches: on the meta device, at both batch sizes.
        calls: the blocks' calls at both batch sizes.
        loss_fn: the user's, if any.
        wholes: figures on one device, before and after.
    """
    plans = [infer_edge({path: twin.get_submodule(path) for path in paths}, twin) for paths in modules]
    degree = 2
    runs, sharded = [], [frozenset[str]()] * 2
    groups = [ListeningGroup(degree) for _ in batches]
    try:
        for batch, chained, group in zip(batches, calls, groups, strict=True):
            model = copy_with(twin, _fresh_leaf)
            parts = [{path: model.get_submodule(path) for path in paths} for paths in modules]
            shards = [shard_layer(p, plan, group) for p, plan in zip(parts, plans, strict=True)]
            sharded = [_sharded(held) for held in shards]
            runs.append(run_edges(model, batch, chained, loss_fn))
    except GalvatronError as error:
        reason = f"One device's share of it does not run: {error}"
        return _unsplit(wholes[0], reason), _unsplit(wholes[1], reason)
    shares = [figures(*pair) for pair in zip(*runs, strict=True)]
    first, last = (TensorFigures(wholes[i], plans[i], degree, shares[i], shares[i], sharded[i]) for i in (0, 1))
    returns = any(kind == "returns" for kind, _ in groups[0].heard)
    silent = (TensorBoundary(0),) if plans[1].heads and not returns else ()  # nothing before it trains
    # of a loss on shards of logits; none if full logits were gathered
    sent = slope(*(sum(group.figures) // group.size for group in groups))
    return first, replace(last, loss_bytes=0 if any(group.outputs for group in groups) else sent, boundaries=silent)


@dataclass(frozen=True, slots=True)
class MixtureFigures:
    """Figures of a layer's mixtures of experts; 0 if it has none, or experts that cannot be spread."""

    experts: int = 0  # greatest common divisor of the numbers of experts of all mixtures
    parameters: int = 0  # items of all experts
    frozen: int = 0  # items of experts that get no gradient
    dispatched_bytes: int = 0  # per sample, see ``LayerKind``
    routing: Routing = Routing()  # noqa: RUF009  frozen
    reason: str = ""  # why experts cannot be spread


def mixture_figures(block: nn.Module, calls: Sequence[OperatorCall], tokens: int) -> MixtureFigures:
    """Return the figures of a block's mixtures of experts.

    A router with a buffer of one number per expert is assumed to balance loads by it.

    Args:
        block: on any device.
        calls: of the block, for one sample.
        tokens: of the sample.
    """
    mixtures = find_mixtures(block)
    reasons = [mixture.reason for mixture in mixtures if mixture.reason]
    if not mixtures or reasons:
        return MixtureFigures(reason="; ".join(reasons))
    parameters = [
        block.get_submodule(mixture.path).get_parameter(name) for mixture in mixtures for name in mixture.parameters
    ]
    copies = [_copies(block, mixture, calls) for mixture in mixtures]
    experts = gcd(*(mixture.experts for mixture in mixtures))
    corrected = any(buffer.shape == (experts,) and buffer.is_floating_point() for buffer in block.buffers())
    excess = CORRECTED_SCORES if corrected else AUXILIARY_LOSS
    return MixtureFigures(
        experts,
        items_of(parameters),
        items_of(parameters, frozen=True),
        sum(rows * width for rows, width in copies),
        Routing(max(rows for rows, _ in copies) // tokens, excess=excess),
    )


def _copies(block: nn.Module, mixture: BlockMixture, calls: Sequence[OperatorCall]) -> tuple[int, int]:
    """Rows of the input of a mixture's first matmul, and the bytes of each."""
    matmuls = (call for call in calls if call.path == mixture.path and call.groups > 1 and not call.backward)
    first = next(matmuls, None)
    if first is None:
        return 0, 0
    weight = block.get_submodule(mixture.path).get_parameter(mixture.parameters[0])
    return first.flops // (2 * prod(first.shape[1:])), first.shape[1] * weight.element_size()
