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

from galvatron_lite.cluster.cluster import RankGroup
from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.base import Collective, Communication, DimensionContext, LayerWork, Moment, Strategy
from galvatron_lite.parallelism.ranks import expert_group, expert_slices


@dataclass(frozen=True, slots=True)
class ExpertDimension:
    """Ways that the experts of a mixture are spread."""

    name: str = "expert"

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:  # noqa: ARG002
        """Off: it is priced, not offered, for the runtime cannot apply it."""
        return [{"expert": 1}]

    def reason(self, kind: LayerKind) -> str:
        """Says so of a mixture."""
        return f"expert: {kind.name}: the runtime cannot spread experts over devices" if kind.expert_parameters else ""

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Strategy, context: DimensionContext) -> LayerWork:
        """Fewer experts, and the all-to-alls that bring tokens to them and back.

        Must run after tensor (experts are sliced too) and before recompute, which exchanges tokens again.
        """
        degree = strategy.expert
        if degree == 1 or kind.expert_parameters == 0:
            return work
        own = kind.expert_parameters / (degree * expert_slices(strategy))
        items = work.parameters - kind.expert_parameters / strategy.tensor + own
        return replace(
            work,
            parameters=items,
            state_items=items,
            parameter_items=items,
            gradient_items=items,
            expert_items=own,
            communications=(*work.communications, *self._exchanges(kind, strategy, _tokens(work, strategy), context)),
        )

    def _exchanges(
        self, kind: LayerKind, strategy: Strategy, share: float, context: DimensionContext
    ) -> Iterator[Communication]:
        size, slices = kind.dispatched_bytes * share, expert_slices(strategy)
        if not size:
            return
        group, sent = _route(kind, strategy, context.node_devices)
        near = RankGroup(slices, 1, strategy.devices // slices)
        for moment in (Moment.FORWARD, Moment.BACKWARD):
            yield Communication(Collective.ALL_TO_ALL, size * sent, group, moment, False, 2, self.name)
            if strategy.sequence_parallel and slices > 1:
                for sort in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
                    yield Communication(sort, size * slices, near, moment, False, 1, "tensor")


def _route(kind: LayerKind, strategy: Strategy, node_devices: int) -> tuple[RankGroup, float]:
    """The ranks whose exchange sets the pace, and the share of all copies that they exchange."""
    group, copies = expert_group(strategy), kind.unique_copies
    if not copies:
        return group, 1.0
    inside = max(min(group.size, node_devices // group.stride), 1)
    nodes = group.size // inside
    if nodes == 1 or group.size % inside:
        return group, reached(group.size, copies) / copies
    between = RankGroup(nodes, group.stride * inside, strategy.devices // nodes)
    return between, reached(nodes, copies) / copies


def reached(places: int, copies: int) -> float:
    """Places that get any of so many copies, each of which goes to one of them at random: n (1 - (1 - 1/n)^k)."""
    return places * (1 - (1 - 1 / places) ** copies)


def _tokens(work: LayerWork, strategy: Strategy) -> float:
    """Samples whose copies one rank sends: sequence parallelism, or experts that are not sliced, share them further."""
    whole = work.samples / strategy.batch_degree
    shared = strategy.sequence_parallel or expert_slices(strategy) < strategy.tensor
    return whole / strategy.tensor if shared else whole
