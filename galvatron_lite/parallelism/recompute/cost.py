"""Recomputation: activations thrown away in forward are computed again in backward (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from galvatron_lite.model.graph import LayerKind, Recompute
from galvatron_lite.parallelism.base import DimensionContext, LayerWork, Moment, Strategy


@dataclass(frozen=True, slots=True)
class RecomputeDimension:
    """What is thrown away in forward and computed again in backward."""

    name: str = "recompute"

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:  # noqa: ARG002
        """What capture found runnable."""
        return [{"recompute": choice} for choice in Recompute if choice in kind.kept]

    def reason(self, kind: LayerKind) -> str:
        """Names the choices that cannot be run."""
        missing = [choice.value for choice in Recompute if choice not in kind.kept]
        return f"recompute: {kind.name} offers no {' or '.join(missing)} recomputation" if missing else ""

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Strategy, context: DimensionContext) -> LayerWork:  # noqa: ARG002
        """Forward's communication so far happens again in backward; its compute is part of the profile's points.

        Must run after the dimensions whose communication is part of the layer's own forward (tensor), and before
        those whose communication wraps the layer (ZeRO: parameters are still gathered when forward runs again).
        """
        if strategy.recompute is Recompute.NONE:
            return work
        again = tuple(replace(c, moment=Moment.BACKWARD) for c in work.communications if c.moment is Moment.FORWARD)
        return replace(work, recompute=strategy.recompute, communications=(*work.communications, *again))
