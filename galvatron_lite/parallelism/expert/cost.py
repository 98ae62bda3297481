"""Expert parallelism: the experts of a mixture are spread over ranks that hold different tokens.

Each rank sends every copy of its tokens to the rank of its expert and takes the result back: two all-to-alls in
forward, two in backward (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2). A rank then works on tokens of all ranks
of its group for 1/e of the experts: as many as before where the router is balanced, as its auxiliary loss makes it.

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

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Strategy, context: DimensionContext) -> LayerWork:  # noqa: ARG002
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
            communications=(*work.communications, *self._exchanges(kind, strategy, _tokens(work, strategy))),
        )

    def _exchanges(self, kind: LayerKind, strategy: Strategy, share: float) -> Iterator[Communication]:
        size, slices = kind.dispatched_bytes * share, expert_slices(strategy)
        if not size:
            return
        near = RankGroup(slices, 1, strategy.devices // slices)
        for moment in (Moment.FORWARD, Moment.BACKWARD):
            yield Communication(Collective.ALL_TO_ALL, size, expert_group(strategy), moment, False, 2, self.name)
            if strategy.sequence_parallel and slices > 1:
                for sort in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
                    yield Communication(sort, size * slices, near, moment, False, 1, "tensor")


def _tokens(work: LayerWork, strategy: Strategy) -> float:
    """Samples whose copies one rank sends: sequence parallelism, or experts that are not sliced, share them further."""
    whole = work.samples / strategy.batch_degree
    shared = strategy.sequence_parallel or expert_slices(strategy) < strategy.tensor
    return whole / strategy.tensor if shared else whole
