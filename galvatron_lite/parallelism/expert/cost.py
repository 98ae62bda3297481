"""Expert parallelism: the experts of a mixture are spread over ranks that hold different tokens.

Each rank sends every copy of its tokens to the rank of its expert and takes the result back: two all-to-alls in
forward, two in backward (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2). A rank then works on tokens of all ranks
of its group for 1/e of the experts: as many as before where the router is balanced, as its auxiliary loss makes it.

Software that sends a token once to a rank, however many of its experts the token visits, and once over the network to
a node, from where it goes on inside (DeepSeek-V3, arXiv:2412.19437, section 3.2.2; github.com/deepseek-ai/DeepEP),
moves less: of k copies to one of n places each, evenly, n (1 - (1 - 1/n)^k) places get any. Its transfers between and
inside nodes run as one pipeline, so that those between nodes, the slower ones, count.

Where tokens are shared (sequence parallelism) and experts sliced, the slices of an expert gather the copies that each
of them received and scatter the sums of their results (Megatron-Core's ``MoEAlltoAllTokenDispatcher``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from galvatron_lite.arrays import Real, Whole, largest, least, never, power, where
from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.base import (
    Chosen,
    Communication,
    Dimension,
    DimensionContext,
    LayerWork,
    Moment,
    Room,
    StrategyField,
    degree_in,
)
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.ranks import Either, expert_group, expert_slices
from galvatron_lite.parallelism.strategy import Strategy


@dataclass(frozen=True, slots=True)
class ExpertDimension(Dimension):
    """Ways that the experts of a mixture are spread."""

    name: str = "expert"

    fields = (
        StrategyField("expert", "expert", ("ep",), "expert-parallel degree"),
        StrategyField("expert_tensor", "expert_tensor", ("etp",), "tensor degree of experts"),
    )
    forbids = MappingProxyType({"expert": ("expert",), "ep": ("expert",)})
    parts = MappingProxyType({"expert": ("expert",)})
    examples = "expert4, expert4-whole"

    def word(self, strategy: Strategy) -> str:
        """``expert4``, ``expert4-whole``."""
        whole = strategy.expert_tensor and strategy.tensor > 1
        return f"expert{strategy.expert}" + ("-whole" if whole else "") if strategy.expert > 1 else ""

    def in_words(self, strategy: Strategy) -> str:
        """See ``Dimension.in_words``."""
        return f"experts spread {strategy.expert} ways" if strategy.expert > 1 else ""

    def read(self, word: str) -> dict[str, object] | None:
        """See ``word``."""
        degree = degree_in(word.removesuffix("-whole"), "expert")
        if degree is None:
            return None
        return {"expert": degree, "expert_tensor": 1} if word.endswith("-whole") else {"expert": degree}

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:
        """Off, or the divisors of the devices and of the experts, each expert sliced by the tensor group or whole."""
        off: dict[str, object] = {"expert": 1, "expert_tensor": 0}
        if not kind.expert_parameters:
            return [off]
        degrees = [degree for degree in divisors(devices)[1:] if kind.dims.experts % degree == 0]
        on: list[dict[str, object]] = [{"expert": d, "expert_tensor": slices} for d in degrees for slices in (0, 1)]
        return [off, *on]

    def allows(self, kind: LayerKind, chosen: Chosen, room: Room) -> bool:
        """Sliced experts go over the ranks above the tensor group, whole ones over all ranks.

        Sensible: only with sequence parallelism where there is a tensor group, as its ranks would send the same tokens
        (Megatron-Core demands it); whole experts only where none lies on two ranks of a tensor group, which had better
        slice it.
        """
        degree, tensor, whole = chosen["expert"], chosen["tensor"], chosen["expert_tensor"] == 1
        if degree == 1:
            return True
        legal = (tensor > 1 or not whole) and room.devices % (degree * (1 if whole else tensor)) == 0
        shared = tensor == 1 or chosen["sequence_parallel"] or not kind.sequence_parallel
        return legal and (room.node is None or (shared and not (whole and degree < tensor)))

    def reason(self, kind: LayerKind) -> str:
        """Says so of a mixture whose experts cannot be spread, or are not counted."""
        if kind.expert_reason:
            return f"expert: {kind.name}: {kind.expert_reason}"
        if not kind.expert_parameters or kind.dims.experts > 1:
            return ""
        return f"expert: {kind.name}: how many experts it has is not known"

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:
        """Fewer experts, and the all-to-alls that bring tokens to them and back.

        Must run after tensor (experts are sliced too) and before recompute, which exchanges tokens again.
        """
        degree, spread = strategy.expert, strategy.expert > 1
        if never(spread) or kind.expert_parameters == 0:
            return work
        own = where(spread, kind.expert_parameters / (degree * expert_slices(strategy)), 0.0)
        items = where(spread, work.parameters - kind.expert_parameters / strategy.tensor + own, work.parameters)
        exchanges = self._exchanges(kind, strategy, _tokens(work, strategy), context)
        return replace(work.sliced(items).sending(*exchanges), expert_items=own)

    def _exchanges(
        self, kind: LayerKind, strategy: Either, share: Real, context: DimensionContext
    ) -> Iterator[Communication]:
        size, slices, spread = kind.dispatched_bytes * share, expert_slices(strategy), strategy.expert > 1
        group, part = _route(kind, strategy, context.node_devices)
        near = RankGroup(slices, 1, strategy.devices // slices)
        out, whole = size * part, size * slices
        calls = (spread & (size > 0)) * 2
        joins = (calls > 0) * (strategy.sequence_parallel & (slices > 1))
        for moment in (Moment.FORWARD, Moment.BACKWARD):
            yield Communication(Collective.ALL_TO_ALL, out, group, moment, False, calls, self.name)
            for sort in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
                yield Communication(sort, whole, near, moment, False, joins, "tensor")


def _route(kind: LayerKind, strategy: Either, node_devices: int) -> tuple[RankGroup, Real]:
    """The ranks whose exchange sets the pace, and the share of all copies that they exchange."""
    group, copies = expert_group(strategy), kind.unique_copies
    if not copies:
        return group, 1.0
    inside = largest(least(group.size, node_devices // group.stride), 1)
    nodes = group.size // inside
    between = (nodes > 1) & (group.size % inside == 0)
    places = where(between, nodes, group.size)
    stride = where(between, group.stride * inside, group.stride)
    return RankGroup(places, stride, strategy.devices // places), reached(places, copies) / copies


def reached(places: Whole, copies: int) -> Real:
    """Places that get any of so many copies, each of which goes to one of them at random: n (1 - (1 - 1/n)^k)."""
    return places * (1 - power(1 - 1 / places, copies))


def _tokens(work: LayerWork, strategy: Either) -> Real:
    """Samples whose copies one rank sends: sequence parallelism, or experts that are not sliced, share them further."""
    whole = work.samples / strategy.batch_degree
    shared = strategy.sequence_parallel | (expert_slices(strategy) < strategy.tensor)
    return where(shared, whole / strategy.tensor, whole)
