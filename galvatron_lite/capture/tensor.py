"""What one device computes, moves and keeps of a block under tensor parallelism and with its experts spread."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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


class _LeftOut:
    """Stands in for the blocks: gives what they gave, cut off from what they took, also to whom listens inside them."""

    def __init__(self, twin: nn.Module, recorder: Recorder, calls: Sequence[BlockCall], after: Recording) -> None:
        self.twin, self.recorder, self.calls, self.after = twin, recorder, list(calls), after
        self.entry: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.numbers: tuple[int, ...] = ()
        self.earlier: list[int] = []
        self._done = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._done == 0:
            self.entry = [*tensors_of(args), *tensors_of(kwargs)]
        self.recorder.target = None
        call = self.calls[self._done]
        for inner in call.heard:  # the model's own hooks on modules inside hear of what they gave
            leaves, output, numbers = self._cut_off(inner)
            self.leaves += tensors_of(leaves)
            self.earlier += numbers
            module = self.twin.get_submodule(inner.path)
            with _replaced([module], lambda *_args, output=output, **_kwargs: output):
                module(*inner.args, **inner.kwargs)
        self.earlier += self.numbers
        leaves, output, self.numbers = self._cut_off(call)
        self.leaves += tensors_of(leaves)
        self._done += 1
        if self._done == len(self.calls):
            self.recorder.target = self.after
        return output

    def _cut_off(self, call: BlockCall) -> tuple[Any, Any, tuple[int, ...]]:
        """New leaves shaped like what a call gave, what is handed on of them, and its storages' numbers."""

        def fresh(tensor: Tensor) -> Tensor:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            return empty.requires_grad_(tensor.requires_grad)

        leaves = map_tensors(call.output, fresh)
        output = map_tensors(leaves, entered)
        return leaves, output, tuple(self.recorder.number(tensor) for tensor in tensors_of(output))


@contextmanager
def _replaced(blocks: Sequence[nn.Module], stand_in: Callable[..., Any]) -> Iterator[None]:
    for block in blocks:
        block.forward = stand_in  # a module's own attribute comes before its class's method
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def run_edges(
    twin: nn.Module, batch: Any, calls: Sequence[BlockCall], loss_fn: LossFn | None
) -> tuple[RegionRun, RegionRun]:
    """Run what lies before and after the blocks forward and backward on the meta device.

    Args:
        twin: the model on the meta device.
        calls: the blocks' calls in order; without any, everything counts as before.

    Raises:
        TraceError: the model does not run.
        InputError: it gives no loss.
    """
    recorder, before, after = Recorder(), Recording(), Recording()
    blocks = {call.path: twin.get_submodule(call.path) for call in calls}
    stand_in = _LeftOut(twin, recorder, calls, after)
    with (
        keeping_gates(twin),
        explaining("", twin),
        shapes_only(recorder),
        recorder.watching(twin),
        _replaced(list(blocks.values()), stand_in),
    ):
        recorder.target = before
        numbers = tuple(recorder.number(tensor) for tensor in tensors_of(batch))
        loss = loss_of(call_model(twin, batch), batch, loss_fn)
        recorder.claim(loss, "")
        recorder.claim(stand_in.entry, "")
        last = after if calls else before
        recorder.target = None
        ends = [one for one in (*twin.parameters(), *stand_in.leaves) if one.requires_grad]
        trained = [one for one in ends if not calls or recorder.number(one) in after.sizes]  # read behind the blocks
        recorder.start_backward(last)
        if trained and loss.requires_grad:
            # a skip connection around the blocks leads to what runs before them, which runs backward once more
            trains = {id(getattr(node, "variable", None)) for node in nodes_behind(stand_in.entry, ())}
            keeps = any(id(parameter) in trains for parameter in trained)
            torch.autograd.backward([loss], inputs=trained, retain_graph=keeps)
        recorder.finish(last, twin.parameters())
        end = region_end(stand_in.entry)
        if end is not None:
            recorder.start_backward(before)
            torch.autograd.backward([end])
            recorder.finish(before, twin.parameters())
        leaving = tuple(recorder.number(tensor) for tensor in stand_in.entry)
    return (
        RegionRun(before, numbers, (), leaving=leaving),
        RegionRun(after, (*stand_in.numbers, *stand_in.earlier, *numbers), (), handed=stand_in.numbers),
    )


_CLOSE = 0.05
_PAIR = 2
_NO_PAIR = f"No two matmuls with weights run in it, one to split by columns and one by rows{NOT_OFFERED}."


@dataclass(frozen=True, slots=True)
class TensorFigures:
    """A region run whole, and one device's share of it."""

    full: RegionFigures  # on one device
    plan: TensorPlan  # how it is split
    degree: int  # ways it was split to see the share; 1 where it was not
    share: RegionFigures  # of a tensor group; ``full`` where it was not split
    tokens: RegionFigures  # of a tensor group with sequence parallelism; ``share`` where that is not offered
    sharded: frozenset[str] = frozenset()  # names of parameters (inside the layer) that are split
    loss_bytes: int = 0  # of an edge, see ``LayerKind``
    boundaries: tuple[TensorBoundary, ...] = ()  # of its regions

    def split(self, figure: str) -> TensorSplit:
        """The parts of a figure of ``RegionFigures`` by how they are divided.

        From share = tensor / degree + sequence + rest and tokens = tensor / degree + sequence / degree + rest. The sum
        is always what one device holds that has the whole layer, so copies that only a split layer makes are left out.
        """
        total, share, tokens = (getattr(region, figure) for region in (self.full, self.share, self.tokens))
        if self.degree == 1:
            return TensorSplit(whole=total)
        tensor = _part(total - share, self.degree, total)
        sequence = _part(share - tokens, self.degree, total - tensor)
        return TensorSplit(tensor=tensor, sequence=sequence, whole=total - tensor - sequence)

    def with_unsplit(self, more: RegionFigures, times: int) -> TensorFigures:
        """With a region that is not split and runs so many times beside it."""
        full, share, tokens = (
            replace(
                one,
                calls=one.calls + more.calls * times,
                kept=one.kept + more.kept * times,
                selective=one.selective + more.selective * times,
                working=max(one.working, more.working),
                forward_working=max(one.forward_working, more.forward_working),
            )
            for one in (self.full, self.share, self.tokens)
        )
        return replace(self, full=full, share=share, tokens=tokens)

    def shardings(self) -> dict[tuple[str, OperatorClass], Sharding]:
        """How each module's calls of each class are divided."""
        if self.degree == 1:
            return {}
        full, share, tokens = (_work(region) for region in (self.full, self.share, self.tokens))

        def divided(part: int, total: int) -> bool:
            return total > 0 and abs(part * self.degree - total) <= _CLOSE * total

        shardings = dict.fromkeys(full, Sharding.NONE)
        shardings |= {key: Sharding.SEQUENCE for key, total in full.items() if divided(tokens[key], total)}
        return shardings | {key: Sharding.TENSOR for key, total in full.items() if divided(share[key], total)}


def _part(less: int, degree: int, most: int) -> int:
    return min(max(0, less * degree // (degree - 1)), most)


def _work(region: RegionFigures) -> Counter[tuple[str, OperatorClass]]:
    """Forward FLOPs, or bytes where there are none, by module and class."""
    work: Counter[tuple[str, OperatorClass]] = Counter()
    for call in region.calls:
        if not call.backward:
            work[call.path, call.kind] += call.flops or call.moved
    return work


def unsplit(figures: RegionFigures, reason: str) -> TensorFigures:
    """Figures of a layer that tensor parallelism is not offered for."""
    return TensorFigures(figures, TensorPlan(reason=reason), 1, figures, figures)


def split_block(
    block: nn.Module,
    calls: Sequence[BlockCall],
    chains: Sequence[Sequence[int]],
    figures: RegionFigures,
    shared: Collection[str] = (),
) -> TensorFigures:
    """Figures of a block and of one device's share of it.

    Args:
        block: on the meta device; it is not changed.
        calls: its call at both batch sizes.
        chains: places of the inputs that come from the layer before, at both batch sizes.
        figures: its figures on one device.
        shared: names of modules that other layers hold too.
    """
    matmuls = (call for call in figures.calls if call.kind is OperatorClass.MATMUL and not call.backward)
    if sum(call.weight_bytes > 0 for call in matmuls) < _PAIR:
        return unsplit(
            figures, _NO_PAIR
        )  # told without running the block for real, for which pictures may be too large
    plan = infer_block(block, calls[1].args, calls[1].kwargs, shared)
    if plan.max_degree == 1:
        return unsplit(figures, plan.reason)
    degree = next(factor for factor in range(2, plan.max_degree + 1) if plan.max_degree % factor == 0)
    divisible = all(calls[1].inputs[place].shape[1] % degree == 0 for place in chains[1])
    choices = [False, True] if plan.sequence_parallel and divisible else [False]
    try:
        runs = [_run_share(block, calls, chains, plan, degree, choice) for choice in choices]
    except GalvatronError as error:
        return unsplit(figures, f"One device's share of it does not run: {error}")
    boundaries = tuple(one for run in runs for one in run[2])
    return TensorFigures(figures, plan, degree, runs[0][0], runs[-1][0], runs[0][1], boundaries=boundaries)


def _fresh(tensor: Tensor) -> Tensor:
    """A tensor of its own; of one that a run left in an attribute, without what it was made of."""
    return tensor.detach().clone().requires_grad_(tensor.is_leaf and tensor.requires_grad)


def _run_share(
    block: nn.Module,
    calls: Sequence[BlockCall],
    chains: Sequence[Sequence[int]],
    plan: TensorPlan,
    degree: int,
    sequence_parallel: bool,
) -> tuple[RegionFigures, frozenset[str], tuple[TensorBoundary, ...]]:
    runs = []
    groups = [ListeningGroup(degree) for _ in calls]
    for call, chain, group in zip(calls, chains, groups, strict=True):
        twin = copy_with(block, _fresh)
        shards = shard_layer(twin, plan, group, sequence_parallel)
        taken = _fewer_tokens(call, chain, degree) if sequence_parallel else call
        runs.append(run_block(twin, taken, chain))
    rows = {row for region in plan.regions for row in region.rows}
    share = figures(*runs, rows=rows, degree=degree if sequence_parallel else 1)
    counts: dict[int, Counter[str]] = defaultdict(Counter)  # collectives of the group, by bytes a sample
    for (count, small), (_, large) in zip(*(group.heard for group in groups), strict=True):
        counts[slope(small, large)][count] += 1
    boundaries = tuple(TensorBoundary(size, sequence_parallel, **count) for size, count in counts.items())
    return share, _sharded(shards), boundaries


def _fewer_tokens(call: BlockCall, chain: Sequence[int], degree: int) -> BlockCall:
    """The call with one device's tokens (dim 1) of what comes from the layer before."""
    supply = iter(range(len(call.inputs)))

    def cut(tensor: Tensor) -> Tensor:
        if next(supply) not in chain:
            return tensor
        fewer = tensor.new_empty(tensor.shape[0], tensor.shape[1] // degree, *tensor.shape[2:])
        return fewer.requires_grad_(tensor.requires_grad)

    args, kwargs = map_tensors((call.args, call.kwargs), cut)
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
    """Figures of the layers before and after the blocks, and of one device's share of them.

    Args:
        twin: the model on the meta device; it is not changed.
        modules: paths of the modules before, and of those after.
        batches: on the meta device, at both batch sizes.
        calls: the blocks' calls at both batch sizes.
        wholes: figures on one device, before and after.
    """
    plans = [infer_edge({path: twin.get_submodule(path) for path in paths}, twin) for paths in modules]
    degree = 2
    runs, sharded = [], [frozenset[str]()] * 2
    groups = [ListeningGroup(degree) for _ in batches]
    try:
        for batch, chained, group in zip(batches, calls, groups, strict=True):
            model = copy_with(twin, _fresh)
            parts = [{path: model.get_submodule(path) for path in paths} for paths in modules]
            shards = [shard_layer(p, plan, group) for p, plan in zip(parts, plans, strict=True)]
            sharded = [_sharded(held) for held in shards]
            runs.append(run_edges(model, batch, chained, loss_fn))
    except GalvatronError as error:
        reason = f"One device's share of it does not run: {error}"
        return unsplit(wholes[0], reason), unsplit(wholes[1], reason)
    shares = [figures(*pair) for pair in zip(*runs, strict=True)]
    first, last = (TensorFigures(wholes[i], plans[i], degree, shares[i], shares[i], sharded[i]) for i in (0, 1))
    returns = any(count == "returns" for count, _ in groups[0].heard)
    silent = (TensorBoundary(0),) if plans[1].heads and not returns else ()  # nothing before it trains
    # of a loss on shares of logits; none where whole ones were asked for
    sent = slope(*(sum(group.figures) // group.size for group in groups))
    return first, replace(last, loss_bytes=0 if any(group.outputs for group in groups) else sent, boundaries=silent)


@dataclass(frozen=True, slots=True)
class MixtureFigures:
    """Mixtures of one layer; 0 where it has none whose experts can be spread."""

    experts: int = 0  # every divisor of it divides the experts of each mixture
    parameters: int = 0  # items of all experts
    frozen: int = 0  # those among them that get no gradient
    dispatched_bytes: int = 0  # per sample, see ``LayerKind``
    routing: Routing = Routing()  # noqa: RUF009  frozen
    reason: str = ""  # why experts cannot be spread


def mixture_figures(block: nn.Module, calls: Sequence[OperatorCall], tokens: int) -> MixtureFigures:
    """Figures of a block's mixtures; routers that correct every expert's score by a buffer are taken to balance by it.

    Args:
        block: on any device.
        calls: what it called, for one sample.
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
    """Rows that a mixture's first matmul takes, and the bytes of each."""
    matmuls = (c for c in calls if c.path == mixture.path and c.groups > 1 and not c.backward)
    first = next(matmuls, None)
    if first is None:
        return 0, 0
    weight = block.get_submodule(mixture.path).get_parameter(mixture.parameters[0])
    return first.flops // (2 * prod(first.shape[1:])), first.shape[1] * weight.element_size()
