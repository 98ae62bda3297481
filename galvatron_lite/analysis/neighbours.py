"""What else a plan could do: each run of layers otherwise in one dimension, and the best plan that chooses otherwise.

For neighbours everything else stays equal: the plan is priced again with the run (in every stage that has it, and the
layers that share its parameters) under the other strategy. Runners-up come from quick searches of the same space with
one choice pinned, so they are not proven; those in a plan's file come from such searches too
(``search.alternatives``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from math import prod

from galvatron_lite.analysis.explanation import Neighbour, RunChoice, RunnerUp
from galvatron_lite.analysis.step_time import PricedStages
from galvatron_lite.analysis.what_ifs import OutOfTimeError, TimeLimit, peak_of
from galvatron_lite.cost.stage import tied_groups
from galvatron_lite.cost.step import price_staged
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.base import StrategyField
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.layout import layout_of
from galvatron_lite.parallelism.registry import choosing, parts_of
from galvatron_lite.parallelism.strategy import ADDED, DEGREES, Strategy, degree_names
from galvatron_lite.plans.schema import LayerRun, Plan
from galvatron_lite.search.alternatives import UNBOUNDED
from galvatron_lite.search.best_first import ANY_TIME, QUICK, finished, search
from galvatron_lite.search.families.family import seconds_of
from galvatron_lite.search.problem import is_glued
from galvatron_lite.search.result import runs_of, summary
from galvatron_lite.search.shapes import Request, Session
from galvatron_lite.search.space import UNPINNED, Fixed, Space, microbatch_counts
from galvatron_lite.search.tables import glue_of


def _keeps_rules(graph: ModelGraph, stages: Sequence[range], strategies: Sequence[Strategy]) -> bool:
    """Whether the layers at the model's ends, or at the boundaries of stages, are laid out alike as they must be."""
    if len(stages) > 1:
        cuts = [inside.start for inside in stages[1:]]
        return len({layout_of(strategies[place]) for cut in cuts for place in (cut - 1, cut)}) <= 1
    edges = [strategy for layer, strategy in zip(graph.layers, strategies, strict=True) if layer.role is not Role.BLOCK]
    return not is_glued(graph) or len({glue_of(layout_of(edge)) for edge in edges}) <= 1


_BATCH = ("data", "zero")
"""The degrees of ``Strategy`` that split samples, besides those of added dimensions."""
_NAMES = tuple(item.name for item in fields(Strategy) if item.name != "more")
_PLAIN = Strategy()


@dataclass(frozen=True, slots=True)
class _Axis:
    name: str  # of a part of a dimension, as ``--forbid`` takes it
    part: tuple[StrategyField, ...]  # what it sets
    between: frozenset[str]  # fields that may follow: what makes no sense without it

    @property
    def trades(self) -> bool:
        """Whether it splits samples, in place of another dimension that does."""
        return bool(self.split) and self.split[0] in (_BATCH[1], *ADDED)

    @property
    def gives(self) -> bool:
        """Whether devices that it does not take work on other samples."""
        return bool(self.split) and self.split[0] in DEGREES and not self.trades

    @property
    def differing(self) -> set[str]:
        """The fields in which neighbours differ."""
        return {field.field for field in self.part} | (set(_BATCH) if self.name in ADDED else set())

    @property
    def split(self) -> tuple[str, ...]:
        """The fields that say into how many parts it splits."""
        names = [field.field for field in self.part]
        degrees = tuple(name for name in names if name in degree_names())
        return degrees or tuple(name for name in names if type(getattr(_PLAIN, name)) is int)

    def degree(self, strategy: Strategy) -> int:
        """Into how many parts it splits; 1 where it splits nothing."""
        return prod(getattr(strategy, name) for name in self.split)

    def used(self, strategy: Strategy) -> bool:
        """Whether a strategy uses it."""
        plain = {field.field: getattr(_PLAIN, field.field, 1) for field in self.part}
        return any(getattr(strategy, name) != value for name, value in plain.items())


def _axes() -> Iterator[_Axis]:
    """Every part of a dimension but plain data parallelism, which has the devices that no other takes."""
    every = {one.name: one for one in choosing()}.values()
    by_name = {field.field: field for one in every for field in one.fields if field.field in _NAMES}
    named = {name for part in parts_of().values() for name in part}
    beside = frozenset(by_name) - named  # fields of no part of their own
    for one in every:
        names = [field for field in one.fields if field.field in _NAMES]
        follow = beside | {field.field for field in names if field.field not in DEGREES}
        for name, part in (one.parts or {one.name: (one.degree or one.name,)}).items():
            if part != _BATCH[:1]:
                more = [field for field in names if field.field in beside]
                listed = [by_name.get(field, StrategyField(field, field)) for field in part]
                yield _Axis(name, (*listed, *more), follow - set(part))


def _steps_from(chosen: Strategy, offered: Iterable[Strategy]) -> Iterator[tuple[_Axis, list[Strategy]]]:
    """The strategies next to the chosen one among those that are offered, by the axis in which they differ.

    Along a dimension that splits: no use of it, and the next degrees below and above; where fewer devices share a
    sample, more samples are worked on at once, in the way the chosen strategy splits the batch. Along any other: all.
    """
    every = [one for one in offered if one != chosen]
    for axis in _axes():
        steps = [one for one in every if _differs_only_in(axis, chosen, one)]
        yield axis, _next(axis, chosen, steps) if axis.split else steps


def _differs_only_in(axis: _Axis, chosen: Strategy, other: Strategy) -> bool:
    changed = {name for name in (*_NAMES, *ADDED) if getattr(chosen, name) != getattr(other, name)}
    if not changed & axis.differing:
        return False
    if axis.trades:
        return changed <= axis.differing | set(_BATCH) and chosen.batch_degree == other.batch_degree
    allowed = axis.differing | ({*_BATCH, *_STATES} if axis.gives else set())
    if axis.gives and not (axis.used(chosen) and axis.used(other)):
        allowed |= axis.between
    return changed <= allowed and (not axis.gives or _batch_alike(chosen, other))


_STATES = tuple(name for name in parts_of()[_BATCH[1]] if name not in _BATCH)
"""What those that share samples do with states."""


def _batch_alike(chosen: Strategy, other: Strategy) -> bool:
    """Whether two strategies of unlike batch degrees split the batch in the same way; any way where one does not."""
    if chosen.batch_degree == 1 or other.batch_degree == 1:
        return True
    if any(getattr(chosen, name) != getattr(other, name) for name in _STATES):
        return False
    return chosen.data == other.data if chosen.zero > 1 else other.zero == 1


def _next(axis: _Axis, chosen: Strategy, offered: Sequence[Strategy]) -> list[Strategy]:
    """Those without the axis, those of the same degree, and those of the nearest degrees on either side."""
    here, degrees = axis.degree(chosen), {axis.degree(one) for one in offered}
    below, above = max((d for d in degrees if d < here), default=0), min((d for d in degrees if d > here), default=0)
    return [one for one in offered if axis.degree(one) in (here, below, above) or not axis.used(one)]


Fits = Callable[[Plan], bool]


@dataclass(frozen=True, slots=True)
class _Alike:
    stages: tuple[int, ...]  # that hold them
    runs: tuple[LayerRun, ...]  # one of each stage
    places: tuple[int, ...]  # of all their layers


def choices(priced: PricedStages, space: Space, fits: Fits) -> tuple[RunChoice, ...]:
    """Every run of layers, those of several stages that do the same together, in the order of the model."""
    layers, chosen = priced.pricer.profile.graph.layers, []
    for alike in _alike(priced):
        kinds = tuple(dict.fromkeys(layers[place].kind for place in alike.places))
        first, *others = (space.strategies(kind, priced.shape.stage_devices, UNPINNED) for kind in kinds)
        common = set(first).intersection(*others)
        offered = [one for one in first if one in common]
        choice = RunChoice(
            stages=alike.stages,
            first=alike.runs[0].first,
            last=alike.runs[-1].last,
            layers=len(alike.places),
            kinds=kinds,
            strategy=str(alike.runs[0].strategy),
            step_seconds=_seconds(priced, alike),
            neighbours=tuple(_neighbours(priced, alike, offered, fits)),
        )
        chosen.append(choice)
    return tuple(chosen)


def _alike(priced: PricedStages) -> list[_Alike]:
    graph = priced.pricer.profile.graph
    groups: dict[object, list[tuple[int, LayerRun, range]]] = {}
    for number, stage in enumerate(priced.plan.stages):
        start = priced.ranges[number].start
        for run in stage.runs:
            places = range(start, start + run.count)
            key = (run.strategy, frozenset(graph.layers[place].kind for place in places))
            groups.setdefault(key, []).append((number, run, places))
            start = places.stop
    return [
        _Alike(
            tuple(dict.fromkeys(number for number, _, _ in members)),
            tuple(run for _, run, _ in members),
            tuple(place for _, _, places in members for place in places),
        )
        for members in groups.values()
    ]


def _seconds(priced: PricedStages, alike: _Alike) -> float:
    total, times = 0.0, priced.shape.microbatches
    for stage in alike.stages:
        for place, cost in zip(priced.ranges[stage], priced.stages[stage].layers, strict=True):
            if place in alike.places:
                total += times * (cost.forward_seconds + cost.backward_seconds) + cost.step_seconds
    return total / len(alike.stages)


def _neighbours(priced: PricedStages, alike: _Alike, offered: Sequence[Strategy], fits: Fits) -> Iterator[Neighbour]:
    """The neighbours; of those of a dimension and degree the quickest that fits, or the one of least memory."""
    chosen = alike.runs[0].strategy
    own = set(alike.places)  # and those that share their parameters, which have one strategy
    places = frozenset(own.union(*(group for group in tied_groups(priced.pricer.profile.graph) if own & set(group))))
    for axis, steps in _steps_from(chosen, offered):
        neighbours: dict[object, Neighbour] = {}
        for strategy in steps:
            other = _neighbour(priced, alike, places, axis, strategy, fits)
            key: object = axis.degree(strategy) if axis.split else strategy
            if axis.trades:
                key = (key, *(getattr(strategy, name) for name in _STATES))
            if other is not None and (key not in neighbours or _rank(other) < _rank(neighbours[key])):
                neighbours[key] = other
        yield from sorted(neighbours.values(), key=lambda other: (not other.off, other.added_step_seconds))


def _rank(other: Neighbour) -> tuple[bool, float]:
    return not other.fits, other.added_step_seconds if other.fits else other.added_bytes


def _neighbour(
    priced: PricedStages, alike: _Alike, places: frozenset[int], axis: _Axis, strategy: Strategy, fits: Fits
) -> Neighbour | None:
    changed = [strategy if place in places else before for place, before in enumerate(priced.strategies)]
    graph = priced.pricer.profile.graph
    if _keeps_rules(graph, priced.ranges, priced.strategies) and not _keeps_rules(graph, priced.ranges, changed):
        return None
    stages = [
        replace(stage, runs=runs_of(graph.layers[part.start : part.stop], changed[part.start : part.stop]))
        for part, stage in zip(priced.ranges, priced.plan.stages, strict=True)
    ]
    try:
        other = price_staged(priced.pricer, replace(priced.plan, stages=tuple(stages), prediction=None))
    except InputError:
        return None
    before, after = (max(plan.stages[stage].memory.total for stage in alike.stages) for plan in (priced.plan, other))
    assert other.prediction is not None
    added = other.prediction.step_seconds - priced.prediction.step_seconds
    off = axis.used(alike.runs[0].strategy) and not axis.used(strategy)
    return Neighbour(axis.name, str(strategy), off, added, after - before, fits(other))


Pinned = tuple[str, str, str, Fixed]
"""Dimension, what the plan chooses, what is chosen instead, and the pins for it."""


def runners_up(
    session: Session, request: Request, clock: TimeLimit, plan: Plan, reserved: Container[str] = ()
) -> tuple[tuple[RunnerUp, ...], str]:
    """The quickest plan met in each dimension, and what was not looked at, for people; empty: nothing.

    ``reserved``: fields of ``Strategy`` that the backend sets only where it is told to.
    """

    def rank(other: RunnerUp) -> tuple[bool, float]:
        return not other.fits, other.step_seconds

    best: dict[str, RunnerUp] = {}
    pins = list(_others(request, plan, reserved))
    for number, pin in enumerate(pins):
        try:
            clock.begin(f"another {pin[0]}")
        except OutOfTimeError as error:
            left = ", ".join(dict.fromkeys(f"{name} {instead}" for name, _, instead, _ in pins[number:]))
            return tuple(best.values()), f"runner-ups of {left}: {error}"
        other = _best(session, request, plan, pin)
        if other is not None and (pin[0] not in best or rank(other) < rank(best[pin[0]])):
            best[pin[0]] = other
    return tuple(best.values()), ""


def _best(session: Session, request: Request, plan: Plan, pin: Pinned) -> RunnerUp | None:
    name, chosen, instead, fixed = pin
    schedules = request.schedules if fixed.schedule is None else (fixed.schedule,)
    pinned_request = replace(request, fixed=fixed, schedules=schedules)
    try:
        soon = partial(search, pricer=session.pricer, effort=QUICK, below=ANY_TIME)
        fitting = soon(pinned_request)
        other = fitting or soon(replace(pinned_request, budget=UNBOUNDED))
    except InputError:
        return None
    if other is None:
        return None
    done = finished(request, session.pricer, other)
    # zero-bubble plans may hold more once their passes are in order than the search counts
    added, fits = seconds_of(done) - seconds_of(plan), fitting is not None and request.fits(done)
    return RunnerUp(name, chosen, instead, summary(done), seconds_of(done), added, peak_of(done), fits)


def _others(request: Request, plan: Plan, reserved: Container[str]) -> Iterator[Pinned]:
    degrees, here = request.pipelines, plan.pipeline
    for degree in _beside(degrees, here):
        yield "pipeline", str(here), str(degree), Fixed(pipeline=degree)
    for count in _beside(microbatch_counts(request.global_batch, Fixed()), plan.microbatches):
        yield "micro-batches", str(plan.microbatches), str(count), Fixed(pipeline=here, microbatches=count)
    if here > 1:
        for schedule in request.schedules:
            if schedule is not plan.schedule and schedule.executable:
                yield "schedule", plan.schedule.value, schedule.value, Fixed(pipeline=here, schedule=schedule)
    used = Counter[Strategy]()
    for run in (run for stage in plan.stages for run in stage.runs):
        used[run.strategy] += run.count
    most = min(used, key=lambda strategy: (-used[strategy], str(strategy)))
    for axis in _axes():
        yield from _along(axis, request, plan, most, reserved)


def _beside(values: tuple[int, ...], here: int) -> tuple[int, ...]:
    return (*[value for value in values if value < here][-1:], *[value for value in values if value > here][:1])


def _along(axis: _Axis, request: Request, plan: Plan, most: Strategy, reserved: Container[str]) -> Iterator[Pinned]:
    devices = request.devices // plan.pipeline
    for chosen, instead, pin in _values(axis, most, plan, devices, reserved):
        free = Fixed(pipeline=None if axis.split else plan.pipeline)
        pins = (pin,)
        kinds = sorted({layer.kind for layer in request.graph.layers})
        offering = [kind for kind in kinds if request.space.offers(kind, devices, replace(free, strategy=pins))]
        if len(offering) == len(kinds):
            yield axis.name, chosen, instead, replace(free, strategy=pins)
        elif offering:
            own = tuple((layer.name, *pin) for layer in request.graph.layers if layer.kind in offering)
            yield axis.name, chosen, instead, replace(free, layers=own)


def _values(
    axis: _Axis, most: Strategy, plan: Plan, devices: int, reserved: Container[str]
) -> Iterator[tuple[str, str, tuple[str, object]]]:
    """What most layers do in a dimension, what they might do, and the field of ``Strategy`` and value that say so."""
    for field in axis.part:
        name, here, plain = field.field, getattr(most, field.field), getattr(_PLAIN, field.field, 1)
        if isinstance(plain, Enum):
            used = {getattr(run.strategy, name) for stage in plan.stages for run in stage.runs}
            text = "some layers" if len(used) > 1 else here.value
            for choice in (plain,) if name in reserved else (plain, list(type(plain))[-1]):
                if used != {choice}:
                    yield text, choice.value, (name, choice)
        elif isinstance(plain, bool):
            if here != plain:
                yield "yes", "no", (name, plain)
        elif axis.gives and len(axis.split) == 1:
            for other in _beside(divisors(devices), here):
                yield str(here), str(other), (name, other)
        elif field.most is not None:
            for value in range(field.least, field.most + 1):
                if value != here:
                    yield f"stage {here}", f"stage {value}", (name, value)
