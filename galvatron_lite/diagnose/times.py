"""What one rank's time went to in a step, from a trace or from a log, in one form. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Where(StrEnum):
    """Where in a step communication is waited for."""

    LAYERS = "inside layers"
    GRADIENTS = "sums of gradients"
    CHECK = "the check behind every step"
    OPTIMIZER = "handing out updated parameters"


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Seconds of a mean step on a rank; they add up to ``seconds``.

    Attributes:
        rank: in the world.
        seconds: of a step.
        steps: that the figures are of.
        forward: by layer; of a trace without communication, of a log with it.
        backward: the same; of a log under an empty name alone, for all layers together.
        communication: that nothing hides, by where it is and its kind (``all_reduce``).
        optimizer: the update.
        waiting: for other stages of a pipeline.
        other: all else: host work, what is outside layers, an idle device.
        between: seconds between steps, not part of ``seconds``.
        traced: whether it is from a trace.
        groups: what a trace calls the groups of ranks, by kind of communication.
        layered: whether forward passes were told apart by layer.
        parted: whether the parts of a step were told apart.
    """

    rank: int
    seconds: float
    steps: int
    forward: Mapping[str, float] = field(default_factory=dict)
    backward: Mapping[str, float] = field(default_factory=dict)
    communication: Mapping[tuple[Where, str], float] = field(default_factory=dict)
    optimizer: float = 0.0
    waiting: float = 0.0
    other: float = 0.0
    between: float = 0.0
    traced: bool = False
    groups: Mapping[str, str] = field(default_factory=dict)
    layered: bool = True
    parted: bool = True

    def exposed(self, where: Where) -> float:
        """Seconds of communication of all kinds at a place."""
        return sum(seconds for (place, _), seconds in self.communication.items() if place is where)

    def kinds(self, where: Where) -> dict[str, float]:
        """Seconds by kind at a place, the longest first."""
        found = {kind: seconds for (place, kind), seconds in self.communication.items() if place is where}
        return dict(sorted(found.items(), key=lambda item: -item[1]))
