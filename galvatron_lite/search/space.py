"""What may be chosen: the strategies of a kind of layer, and what the user pinned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, ModelGraph
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.registry import DIMENSIONS


@dataclass(frozen=True, slots=True)
class Fixed:
    """What is not left to the search.

    Attributes:
        pipeline: stages; None: searched.
        microbatches: a step; None: searched.
        strategy: fields of ``Strategy`` and the value each must have in every layer, where a stage has more than one
            device; ``recompute`` also where it has one.
    """

    pipeline: int | None = None
    microbatches: int | None = None
    strategy: tuple[tuple[str, object], ...] = ()

    def allows(self, strategy: Strategy) -> bool:
        """Whether a strategy has the pinned values."""
        pinned = ((name, value) for name, value in self.strategy if strategy.devices > 1 or name == "recompute")
        return all(getattr(strategy, name) == value for name, value in pinned)


def strategies_for(kind: LayerKind, devices: int) -> tuple[Strategy, ...]:
    """Every legal strategy of a kind of layer on a stage of so many devices, all of them taken, in a fixed order."""

    def widen(partial: list[Strategy], options: Sequence[dict[str, object]]) -> list[Strategy]:
        wider = [replace(strategy, **option) for strategy in partial for option in options]  # type: ignore[arg-type]
        return [strategy for strategy in wider if devices % strategy.devices == 0]

    options = [dimension.choices(kind, devices) for dimension in DIMENSIONS]
    whole = reduce(widen, options, [Strategy()])
    return tuple(sorted(strategy for strategy in whole if strategy.devices == devices))


def microbatch_counts(global_batch: int, fixed: Fixed) -> tuple[int, ...]:
    """The micro-batch counts to try.

    Raises:
        InputError: the pinned count does not divide the batch; names the nearest that do.
    """
    counts = divisors(global_batch)
    if fixed.microbatches is None:
        return counts
    if fixed.microbatches not in counts:
        raise InputError("microbatches", fixed.microbatches, f"Give a divisor of the batch: {nearest(counts, fixed)}.")
    return (fixed.microbatches,)


def nearest(counts: Iterable[int], fixed: Fixed) -> str:
    """The two numbers nearest to the pinned micro-batch count, for an error message."""
    wanted = fixed.microbatches or 1
    return " or ".join(str(count) for count in sorted(sorted(counts, key=lambda count: abs(count - wanted))[:2]))


def pipeline_degrees(devices: int, layers: int, fixed: Fixed) -> tuple[int, ...]:
    """The pipeline degrees to try: divisors of the devices, no more than there are layers.

    Raises:
        InputError: the pinned degree is none of them.
    """
    degrees = tuple(degree for degree in divisors(devices) if degree <= layers)
    if fixed.pipeline is None:
        return degrees
    if fixed.pipeline not in degrees:
        raise InputError("pipeline", fixed.pipeline, f"Give one of {', '.join(map(str, degrees))}.")
    return (fixed.pipeline,)


def reasons(graph: ModelGraph) -> tuple[str, ...]:
    """What dimensions say about the model's layers: why they are limited or not offered."""
    said = (dimension.reason(kind) for kind in graph.kinds.values() for dimension in DIMENSIONS)
    return tuple(dict.fromkeys(reason for reason in said if reason))
