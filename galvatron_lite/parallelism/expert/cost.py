"""Expert parallelism: the experts of a mixture are spread over ranks with different tokens.

Each rank sends the copies of its tokens to the ranks of their experts and receives the results: two all-to-alls in
forward, two in backward (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2). A rank processes tokens of all ranks of
its group in 1/e of the experts. All wait for the most loaded rank, in exchanges and in matmuls (``rank_load``).

Some software sends a token to a rank once even if it visits several experts there, and over the network once to a node,
which forwards it (DeepSeek-V3, arXiv:2412.19437, section 3.2.2; github.com/deepseek-ai/DeepEP). It sends a copy to each
rank or node that a token reaches (``reached``). Transfers between and inside nodes are pipelined, so only the slower
ones, between nodes, count.

If experts are sliced and tokens shared (sequence parallelism), the slices of an expert gather the copies that each of
them received, and reduce-scatter their results (Megatron-Core's ``MoEAlltoAllTokenDispatcher``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import comb, log, sqrt
from types import MappingProxyType

from galvatron_lite.arrays import Real, Whole, each, largest, least, never, where
from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.model.graph import LayerKind, Routing
from galvatron_lite.parallelism.axes import ParameterSpread, Purpose, RankAxis, RankLine
from galvatron_lite.parallelism.base import (
    AvailableDevices,
    Chosen,
    Communication,
    Dimension,
    DimensionContext,
    LayerWork,
    Moment,
    StrategyField,
    degree_in,
)
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.ranks import Either, expert_group, expert_slices, expert_spread_of
from galvatron_lite.parallelism.strategy import Strategy


@dataclass(frozen=True, slots=True)
class ExpertDimension(Dimension):
    """Ranks that the experts of a mixture are spread over."""

    name: str = "expert"

    runs = ("expert",)
    stands_in = True  # a profile measured on one device has only figures of all experts, for as many tokens
    purposes = (Purpose.EXPERTS,)
    fields = (
        StrategyField("expert", "expert", ("ep",), "expert-parallel degree"),
        StrategyField("expert_tensor", "expert_tensor", ("etp",), "tensor degree of experts"),
    )
    forbids = MappingProxyType({"expert": ("expert",), "ep": ("expert",)})
    examples = "expert4, expert4-whole"

    def word(self, strategy: Strategy) -> str:
        """``expert4``, ``expert4-whole``."""
        slices_experts = strategy.expert_tensor and strategy.tensor > 1
        return f"expert{strategy.expert}" + ("-whole" if slices_experts else "") if strategy.expert > 1 else ""

    def in_words(self, strategy: Strategy) -> str:
        """See ``Dimension.in_words``."""
        return f"experts spread {strategy.expert} ways" if strategy.expert > 1 else ""

    def read(self, word: str) -> dict[str, object] | None:
        """See ``word``."""
        degree = degree_in(word.removesuffix("-whole"), "expert")
        if degree is None:
            return None
        return {"expert": degree, "expert_tensor": 1} if word.endswith("-whole") else {"expert": degree}

    def features(self, strategy: Strategy) -> set[str]:
        """See ``Dimension.features``."""
        if strategy.expert == 1:
            return set()
        return {"expert", "whole experts"} if strategy.expert_tensor else {"expert"}

    def shrunk(self, smaller: Strategy, strategy: Strategy) -> Sequence[dict[str, object]]:
        """See ``Dimension.shrunk``; experts are spread over ranks with other samples or tokens."""
        ranks = smaller.batch_degree * smaller.context
        return [
            {"expert": degree, "expert_tensor": strategy.expert_tensor if degree > 1 and smaller.tensor > 1 else 0}
            for degree in divisors(strategy.expert)
            if ranks % degree == 0
        ]

    def spread(self, strategy: Strategy) -> ParameterSpread | None:
        """The ranks of experts, in the order slices, experts, shards, replicas, the first innermost."""
        if strategy.expert == 1:
            return None
        states, slices = expert_spread_of(strategy), int(expert_slices(strategy))
        shards, replicas = (RankAxis(int(group.size), int(group.stride)) for group in (states.shards, states.replicas))
        return ParameterSpread(
            RankLine(Purpose.STATES, (shards,)),
            RankLine(Purpose.STATES, (replicas,)),
            RankLine(Purpose.GRADIENTS, (replicas, shards)),
            RankLine(Purpose.EXPERTS, (RankAxis(strategy.expert, slices),)),
            slices,
        )

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:
        """Off, or common divisors of devices and experts, with experts sliced by the tensor group or not."""
        off: dict[str, object] = {"expert": 1, "expert_tensor": 0}
        if not kind.expert_parameters:
            return [off]
        degrees = [degree for degree in divisors(devices)[1:] if kind.dims.experts % degree == 0]
        on: list[dict[str, object]] = [{"expert": d, "expert_tensor": slices} for d in degrees for slices in (0, 1)]
        return [off, *on]

    def allows(self, kind: LayerKind, chosen: Chosen, room: AvailableDevices) -> bool:
        """Sliced experts are spread over the ranks above the tensor group, unsliced experts over all ranks.

        Sensible: with a tensor group only beside sequence parallelism, since its ranks would send the same tokens
        (Megatron-Core requires it); unsliced experts only if no two ranks of a tensor group hold the same expert, which
        they should slice instead.
        """
        degree, tensor, slices_experts = chosen["expert"], chosen["tensor"], chosen["expert_tensor"] == 1
        if degree == 1:
            return True
        legal = (tensor > 1 or not slices_experts) and room.devices % (degree * (1 if slices_experts else tensor)) == 0
        shared = tensor == 1 or chosen["sequence_parallel"] or not kind.sequence_parallel
        return legal and (room.node is None or (shared and not (slices_experts and degree < tensor)))

    def reason(self, kind: LayerKind) -> str:
        """A mixture whose experts cannot be spread, or whose number is unknown."""
        if kind.expert_reason:
            return f"expert: {kind.name}: {kind.expert_reason}"
        if not kind.expert_parameters or kind.dims.experts > 1:
            return ""
        return f"expert: {kind.name}: how many experts it has is not known"

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:
        """Fewer experts, and the all-to-alls of tokens.

        Must run after tensor (experts are sliced too) and before recompute, which exchanges tokens again.
        """
        spread = strategy.expert > 1
        if never(spread) or kind.expert_parameters == 0:
            return work
        parts = strategy.expert * expert_slices(strategy)
        local, frozen = (where(spread, items / parts, 0.0) for items in (kind.expert_parameters, kind.frozen_experts))
        items = where(spread, work.parameters - kind.expert_parameters / strategy.tensor + local, work.parameters)
        rest = where(spread, work.frozen_items - kind.frozen_experts / strategy.tensor + frozen, work.frozen_items)
        exchanges = self._exchanges(kind, strategy, _tokens(work, strategy), context)
        work = work.with_parameters(items, rest).with_communications(*exchanges)
        return replace(work, expert_items=local, frozen_experts=frozen)

    def _exchanges(
        self, kind: LayerKind, strategy: Either, samples: Real, context: DimensionContext
    ) -> Iterator[Communication]:
        size, slices, spread = kind.dispatched_bytes * samples, expert_slices(strategy), strategy.expert > 1
        group, share = _route(kind, strategy, context.node_devices)
        slice_group = RankGroup(slices, 1, strategy.devices // slices)
        exchanged, gathered = size * share, size * slices
        calls, load = (spread & (size > 0)) * 2, rank_load(kind, strategy.expert)
        gathers = (calls > 0) * (strategy.sequence_parallel & (slices > 1))
        for moment in (Moment.FORWARD, Moment.BACKWARD):
            yield Communication(Collective.ALL_TO_ALL, exchanged, group, moment, False, calls, self.name, load)
            for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
                yield Communication(collective, gathered, slice_group, moment, False, gathers, "tensor", load)


def _route(kind: LayerKind, strategy: Either, node_devices: int) -> tuple[RankGroup, Real]:
    """Return the group whose exchange takes longest, and the share of all copies that it exchanges."""
    group, routing = expert_group(strategy), kind.routing
    if not routing.unique:
        return group, 1.0
    inside = largest(least(group.size, node_devices // group.stride), 1)
    nodes = group.size // inside
    between = (nodes > 1) & (group.size % inside == 0)
    places = where(between, nodes, group.size)
    stride = where(between, group.stride * inside, group.stride)
    share = each(lambda size: reached(size, routing) / routing.choices, places)
    return RankGroup(places, stride, strategy.devices // places), share


def reached(places: int, routing: Routing) -> float:
    """Return how many of ``places`` (ranks or nodes with equally many experts) a token's copies reach on average.

    A copy goes to one of the ``chosen_groups`` of the ``groups`` of experts, which are chosen at random. Out of m
    chosen groups and k copies, a place that holds j chosen groups gets no copy with probability (1 - j/m)^k, and a
    place that holds a share s of a chosen group with probability (1 - s/m)^k. Without groups: n (1 - (1 - 1/n)^k).
    """
    groups, chosen, copies = routing.groups, routing.chosen_groups, routing.choices
    if places % groups == 0:
        return places * chosen / groups * (1 - (1 - groups / (places * chosen)) ** copies)
    per_place, rest = divmod(groups, places)
    if rest:
        return reached(places, replace(routing, groups=1, chosen_groups=1))
    missed = [
        comb(per_place, j) * comb(groups - per_place, chosen - j) * (1 - j / chosen) ** copies
        for j in range(per_place + 1)
        if j <= chosen
    ]
    return places * (1 - sum(missed) / comb(groups, chosen))


def rank_load(kind: LayerKind, degree: Whole) -> Real:
    """Return the tokens of the most loaded of ``degree`` ranks with experts, over the mean.

    The loads of the E experts are independent, with the deviation at which the largest is ``excess`` above the mean.
    The largest of n normal values lies sqrt(2 ln n) deviations above the mean, and a rank's load is the mean of E / e
    experts: 1 + excess sqrt(ln e / ln E) sqrt(e / E).
    """
    experts, excess = kind.dims.experts, kind.routing.excess
    if not excess or experts < 2:
        return 1.0
    return each(lambda ranks: 1 + excess * sqrt(log(ranks) / log(experts) * ranks / experts), degree)


def _tokens(work: LayerWork, strategy: Either) -> Real:
    """Samples whose copies a rank sends: a tensor group shares them if tokens are shared, or experts not sliced."""
    samples = work.samples / strategy.batch_degree
    shared = strategy.sequence_parallel | (expert_slices(strategy) < strategy.tensor)
    return where(shared, samples / strategy.tensor, samples)
