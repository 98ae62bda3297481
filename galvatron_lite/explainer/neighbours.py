"""Strategies next to one: what a layer might do otherwise in one dimension, everything else equal. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Offload, Strategy, Strided

_BATCH = ("data", "zero", "zero_stage")
_NAMES = tuple(item.name for item in fields(Strategy))


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension as a reader knows it.

    Attributes:
        name: of it.
        own: fields of ``Strategy`` that it sets.
        degree: into how many parts it splits; None where it splits nothing.
        used: whether a strategy uses it.
        gives: whether devices that it does not take work on other samples.
        between: fields that may follow: what makes no sense without it.
    """

    name: str
    own: tuple[str, ...]
    degree: Callable[[Strategy], int] | None
    used: Callable[[Strategy], bool]
    gives: bool = False
    between: tuple[str, ...] = ()


AXES = (
    Axis(
        "tensor", ("tensor",), lambda s: s.tensor, lambda s: s.tensor > 1, True, ("sequence_parallel", "expert_tensor")
    ),
    Axis("sequence", ("sequence_parallel",), None, lambda s: s.sequence_parallel),
    Axis("context", ("context",), lambda s: s.context, lambda s: s.context > 1, True, ("ulysses", "strided")),
    Axis("ulysses", ("ulysses",), None, lambda s: s.ulysses),
    Axis("expert", ("expert", "expert_tensor"), lambda s: s.expert, lambda s: s.expert > 1),
    Axis("zero", ("zero", "zero_stage", "data"), lambda s: s.zero, lambda s: s.zero_stage > 0),
    Axis("spatial", ("depth", "height", "width"), lambda s: s.spatial, lambda s: s.spatial > 1, True),
    Axis("filters", ("filters",), lambda s: s.filters, lambda s: s.filters > 1, True),
    Axis("channels", ("channels",), lambda s: s.channels, lambda s: s.channels > 1, True),
    Axis("recompute", ("recompute",), None, lambda s: s.recompute is not Recompute.NONE),
    Axis("offload", ("offload",), None, lambda s: s.offload is not Offload.NONE),
    Axis("placement", ("strided",), None, lambda s: s.strided is not Strided.NONE),
)


@dataclass(frozen=True, slots=True)
class Step:
    """A strategy next to another one.

    Attributes:
        axis: in which they differ.
        strategy: the other.
        off: whether it does without the axis, which the first one uses.
    """

    axis: Axis
    strategy: Strategy
    off: bool


def steps_from(chosen: Strategy, offered: Iterable[Strategy]) -> Iterator[Step]:
    """The strategies next to the chosen one among those that are offered.

    Along a dimension that splits: no use of it, and the next degrees below and above; where fewer devices share a
    sample, more samples are worked on at once, in the way the chosen strategy splits the batch. Along any other: all.
    """
    every = [one for one in offered if one != chosen]
    for axis in AXES:
        found = [one for one in every if _differs_only_in(axis, chosen, one)]
        for one in found if axis.degree is None else _next(axis, chosen, found):
            yield Step(axis, one, axis.used(chosen) and not axis.used(one))


def _differs_only_in(axis: Axis, chosen: Strategy, other: Strategy) -> bool:
    changed = {name for name in _NAMES if getattr(chosen, name) != getattr(other, name)}
    if not changed & set(axis.own):
        return False
    if axis.name == "zero":
        return changed <= set(axis.own) and chosen.batch_degree == other.batch_degree
    allowed = {*axis.own, *(_BATCH if axis.gives else ())}
    if not (axis.used(chosen) and axis.used(other)):
        allowed |= set(axis.between)
    return changed <= allowed and (not axis.gives or _batch_alike(chosen, other))


def _batch_alike(chosen: Strategy, other: Strategy) -> bool:
    """Whether two strategies of unlike batch degrees split the batch in the same way; any way where one does not."""
    if chosen.batch_degree == 1 or other.batch_degree == 1:
        return True
    if chosen.zero_stage != other.zero_stage:
        return False
    return chosen.data == other.data if chosen.zero > 1 else other.zero == 1


def _next(axis: Axis, chosen: Strategy, found: Sequence[Strategy]) -> list[Strategy]:
    """Those without the axis, those of the same degree, and those of the nearest degrees on either side."""
    assert axis.degree is not None
    here, degrees = axis.degree(chosen), {axis.degree(one) for one in found}
    below, above = max((d for d in degrees if d < here), default=0), min((d for d in degrees if d > here), default=0)
    return [one for one in found if axis.degree(one) in (here, below, above) or not axis.used(one)]
