"""Context parallelism: devices share the tokens of each sample, and pass keys and values around for attention.

Ring attention (Liu et al. 2023, arXiv:2310.01889, section 3; Megatron-Core's default): each of c devices holds 1/c of
the queries, keys and values. In forward its block of keys and values makes c - 1 hops; in backward the block makes them
again, and so do its gradients. All hops run beside attention of the block before. Causal masks leave every device the
same work, as each takes one early and one late piece of the sequence (Megatron-Core; Brandon et al. 2023, striped
attention, arXiv:2311.09431).

Everything else is linear in the tokens of a device, so a device works on ``samples`` / c samples; attention too: 1/c
of the queries with all keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from galvatron_lite.cluster.cluster import RankGroup
from galvatron_lite.model.graph import LayerKind, OperatorClass
from galvatron_lite.parallelism.base import Collective, Communication, DimensionContext, LayerWork, Moment, Strategy


@dataclass(frozen=True, slots=True)
class ContextDimension:
    """Devices that share the tokens of each sample, attention included."""

    name: str = "context"

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:  # noqa: ARG002
        """Off: it is priced, not offered, for the runtime cannot apply it."""
        return [{"context": 1}]

    def reason(self, kind: LayerKind) -> str:  # noqa: ARG002
        """Nothing: it is of use for the longest sequences only."""
        return ""

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Strategy, context: DimensionContext) -> LayerWork:
        """Fewer tokens, and the hops of keys and values in both passes.

        Must run after tensor (each slice passes its own heads) and before recompute (the ring runs again with
        attention).
        """
        degree = strategy.context
        if degree == 1:
            return work
        whole = key_value_items(kind, strategy.tensor) * context.activation_item_bytes
        block = whole * work.samples / strategy.token_degree
        group = RankGroup(degree, strategy.tensor, context.devices // degree)
        hops = tuple(
            Communication(Collective.SEND_RECV, block, group, moment, True, times * (degree - 1), self.name)
            for moment, times in ((Moment.FORWARD, 1), (Moment.BACKWARD, 2))
            if block
        )
        return replace(work, samples=work.samples / degree, communications=(*work.communications, *hops))


def key_value_items(kind: LayerKind, tensor: int) -> float:
    """Items of keys and values per sample on one of ``tensor`` slices, over the whole sequence.

    Heads fewer than slices are copied. 0 for a kind without attention.
    """
    fused = [one for one in kind.operators if one.kind is OperatorClass.ATTENTION]
    if fused:
        return sum(2 * one.count * max(one.shape[1] / tensor, 1.0) * one.shape[3] * one.shape[4] for one in fused)
    dims = kind.dims
    if not dims.heads or not dims.sequence:
        return 0.0
    heads = max((dims.kv_heads or dims.heads) / tensor, 1.0)
    return 2 * heads * dims.sequence * dims.hidden / dims.heads
