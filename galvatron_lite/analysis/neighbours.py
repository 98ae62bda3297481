"""Alternatives to a plan: its neighbours, and the runner-up in each dimension.

A neighbour changes one dimension of one run of layers, in every stage that has the run and in all layers that share
parameters with it, and is priced again. A runner-up is the best plan of a quick search with one choice pinned, so it is
not proven to be the best.
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

_BATCH = ("data", "zero")  # degrees of ``Strategy`` that split samples, besides those of added dimensions
_STATES = tuple(name for name in parts_of()[_BATCH[1]] if name not in _BATCH)  # how replicas shard their states
_FIELDS = tuple(item.name for item in fields(Strategy) if item.name != "more")
_UNSPLIT = Strategy()


@dataclass(frozen=True, slots=True)
class _DimensionPart:
    """A dimension, or the part of it that ``--forbid`` excludes by a name of its own."""

    name: str
    fields: tuple[StrategyField, ...]  # that it sets
    dependent_fields: frozenset[str]  # that mean nothing without it, and may change when it is added or removed

    @property
    def degrees(self) -> tuple[str, ...]:
        """The fields that multiply to its degree; empty if it splits nothing."""
        names = [field.field for field in self.fields]
        degrees = tuple(name for name in names if name in degree_names())
        return degrees or tuple(name for name in names if type(getattr(_UNSPLIT, name)) is int)

    @property
    def is_batch_dimension(self) -> bool:
        """Whether it splits samples, in exchange for another dimension that does."""
        return bool(self.degrees) and self.degrees[0] in (_BATCH[1], *ADDED)

    @property
    def frees_devices(self) -> bool:
        """Whether devices that it does not use work on other samples."""
        return bool(self.degrees) and self.degrees[0] in DEGREES and not self.is_batch_dimension

    def degree(self, strategy: Strategy) -> int:
        """How many ways it splits a layer; 1 for none."""
        return prod(getattr(strategy, name) for name in self.degrees)

    def is_used(self, strategy: Strategy) -> bool:
        """Whether a strategy uses it."""
        names = [field.field for field in self.fields]
        return any(getattr(strategy, name) != getattr(_UNSPLIT, name, 1) for name in names)

    def is_only_change(self, chosen: Strategy, other: Strategy) -> bool:
        """Whether two strategies differ in this part alone, and in what must follow from it."""
        changed = {name for name in (*_FIELDS, *ADDED) if getattr(chosen, name) != getattr(other, name)}
        own_fields = {field.field for field in self.fields} | (set(_BATCH) if self.name in ADDED else set())
        if not changed & own_fields:
            return False
        if self.is_batch_dimension:
            return changed <= own_fields | set(_BATCH) and chosen.batch_degree == other.batch_degree
        if not self.frees_devices:
            return changed <= own_fields
        allowed = own_fields | {*_BATCH, *_STATES}
        if not (self.is_used(chosen) and self.is_used(other)):
            allowed |= self.dependent_fields
        return changed <= allowed and _split_batch_alike(chosen, other)

    def steps_from(self, chosen: Strategy, offered: Iterable[Strategy]) -> list[Strategy]:
        """The strategies that differ from the chosen one in this part alone.

        Of a part with a degree: those without it, of the same degree, and of the next degrees below and above.
        """
        steps = [other for other in offered if other != chosen and self.is_only_change(chosen, other)]
        if not self.degrees:
            return steps
        degree, degrees = self.degree(chosen), sorted({self.degree(other) for other in steps})
        near = (degree, *_next_to(degrees, degree))
        return [other for other in steps if self.degree(other) in near or not self.is_used(other)]


def _next_to(values: Sequence[int], current: int) -> tuple[int, ...]:
    """The nearest values below and above, of ascending ones."""
    below, above = [value for value in values if value < current], [value for value in values if value > current]
    return (*below[-1:], *above[:1])


def _split_batch_alike(chosen: Strategy, other: Strategy) -> bool:
    """Whether strategies of different batch degrees use the same dimensions for it, as far as they split the batch."""
    if chosen.batch_degree == 1 or other.batch_degree == 1:
        return True
    if any(getattr(chosen, name) != getattr(other, name) for name in _STATES):
        return False
    return chosen.data == other.data if chosen.zero > 1 else other.zero == 1


def _dimension_parts() -> Iterator[_DimensionPart]:
    """Every part of a dimension except plain data parallelism, which takes the devices that no other uses."""
    dimensions = {dimension.name: dimension for dimension in choosing()}.values()
    by_name = {item.field: item for dimension in dimensions for item in dimension.fields if item.field in _FIELDS}
    settings = frozenset(by_name).difference(*parts_of().values())  # fields that ``--forbid`` has no name for
    for dimension in dimensions:
        names = [item.field for item in dimension.fields if item.field in _FIELDS]
        dependent = settings | {name for name in names if name not in DEGREES}
        for part, part_fields in (dimension.parts or {dimension.name: (dimension.degree or dimension.name,)}).items():
            if part_fields != _BATCH[:1]:
                listed = [by_name.get(name, StrategyField(name, name)) for name in part_fields]
                listed += [by_name[name] for name in names if name in settings]
                yield _DimensionPart(part, tuple(listed), dependent.difference(part_fields))


FitsBudget = Callable[[Plan], bool]


@dataclass(frozen=True, slots=True)
class _RunGroup:
    """Runs of layers of the same kinds and strategy, one for each stage that has such a run."""

    stages: tuple[int, ...]
    runs: tuple[LayerRun, ...]
    layers: tuple[int, ...]  # indices in the model


def run_choices(priced: PricedStages, space: Space, fits: FitsBudget) -> tuple[RunChoice, ...]:
    """Return every run of layers with its neighbours, in the order of the model; equal runs of stages count once."""
    layers, choices = priced.pricer.profile.graph.layers, []
    for group in _run_groups(priced):
        kinds = tuple(dict.fromkeys(layers[index].kind for index in group.layers))
        first, *others = (space.strategies(kind, priced.shape.stage_devices, UNPINNED) for kind in kinds)
        common = set(first).intersection(*others)
        offered = [strategy for strategy in first if strategy in common]
        choice = RunChoice(
            stages=group.stages,
            first=group.runs[0].first,
            last=group.runs[-1].last,
            layers=len(group.layers),
            kinds=kinds,
            strategy=str(group.runs[0].strategy),
            step_seconds=_seconds_of_group(priced, group),
            neighbours=tuple(_neighbours(priced, group, offered, fits)),
        )
        choices.append(choice)
    return tuple(choices)


def _run_groups(priced: PricedStages) -> list[_RunGroup]:
    graph = priced.pricer.profile.graph
    groups: dict[object, list[tuple[int, LayerRun, range]]] = {}
    for number, stage in enumerate(priced.plan.stages):
        start = priced.ranges[number].start
        for run in stage.runs:
            indices = range(start, start + run.count)
            key = (run.strategy, frozenset(graph.layers[index].kind for index in indices))
            groups.setdefault(key, []).append((number, run, indices))
            start = indices.stop
    return [
        _RunGroup(
            tuple(dict.fromkeys(number for number, _, _ in members)),
            tuple(run for _, run, _ in members),
            tuple(index for _, _, indices in members for index in indices),
        )
        for members in groups.values()
    ]


def _seconds_of_group(priced: PricedStages, group: _RunGroup) -> float:
    """Seconds of a step that the layers take, mean over their stages."""
    total, microbatches = 0.0, priced.shape.microbatches
    for stage in group.stages:
        for index, cost in zip(priced.ranges[stage], priced.stages[stage].layers, strict=True):
            if index in group.layers:
                total += microbatches * (cost.forward_seconds + cost.backward_seconds) + cost.step_seconds
    return total / len(group.stages)


def _neighbours(
    priced: PricedStages, group: _RunGroup, offered: Sequence[Strategy], fits: FitsBudget
) -> Iterator[Neighbour]:
    """Neighbours by dimension; of each degree the quickest that fits, or the one that needs the least memory."""

    def rank(neighbour: Neighbour) -> tuple[bool, float]:
        return not neighbour.fits, neighbour.added_step_seconds if neighbour.fits else neighbour.added_bytes

    layers = set(group.layers)
    tied = (ties for ties in tied_groups(priced.pricer.profile.graph) if layers & set(ties))
    changed_layers = frozenset(layers.union(*tied))
    for part in _dimension_parts():
        best: dict[object, Neighbour] = {}
        for strategy in part.steps_from(group.runs[0].strategy, offered):
            neighbour = _neighbour(priced, group, changed_layers, part, strategy, fits)
            key: object = part.degree(strategy) if part.degrees else strategy
            if part.is_batch_dimension:
                key = (key, *(getattr(strategy, name) for name in _STATES))
            if neighbour is not None and (key not in best or rank(neighbour) < rank(best[key])):
                best[key] = neighbour
        yield from sorted(best.values(), key=lambda neighbour: (not neighbour.off, neighbour.added_step_seconds))


def _neighbour(
    priced: PricedStages,
    group: _RunGroup,
    changed_layers: frozenset[int],
    part: _DimensionPart,
    strategy: Strategy,
    fits: FitsBudget,
) -> Neighbour | None:
    """The plan with another strategy for some layers; None if the search would not offer it."""
    changed = [strategy if index in changed_layers else before for index, before in enumerate(priced.strategies)]
    graph = priced.pricer.profile.graph
    if _boundaries_agree(graph, priced.ranges, priced.strategies) and not _boundaries_agree(
        graph, priced.ranges, changed
    ):
        return None
    stages = [
        replace(stage, runs=runs_of(graph.layers[indices.start : indices.stop], changed[indices.start : indices.stop]))
        for indices, stage in zip(priced.ranges, priced.plan.stages, strict=True)
    ]
    try:
        other = price_staged(priced.pricer, replace(priced.plan, stages=tuple(stages), prediction=None))
    except InputError:
        return None
    before, after = (max(plan.stages[stage].memory.total for stage in group.stages) for plan in (priced.plan, other))
    assert other.prediction is not None
    added = other.prediction.step_seconds - priced.prediction.step_seconds
    off = part.is_used(group.runs[0].strategy) and not part.is_used(strategy)
    return Neighbour(part.name, str(strategy), off, added, after - before, fits(other))


def _boundaries_agree(graph: ModelGraph, stages: Sequence[range], strategies: Sequence[Strategy]) -> bool:
    """Whether all layers at stage boundaries have one layout, or those at the model's ends if there is one stage."""
    if len(stages) > 1:
        cuts = [indices.start for indices in stages[1:]]
        return len({layout_of(strategies[index]) for cut in cuts for index in (cut - 1, cut)}) <= 1
    edges = [strategy for layer, strategy in zip(graph.layers, strategies, strict=True) if layer.role is not Role.BLOCK]
    return not is_glued(graph) or len({glue_of(layout_of(edge)) for edge in edges}) <= 1


PinnedChoice = tuple[str, str, str, Fixed]
"""A dimension, its value in the plan, another value, and the pins for that value."""


def runners_up(
    session: Session, request: Request, clock: TimeLimit, plan: Plan, reserved: Container[str] = ()
) -> tuple[tuple[RunnerUp, ...], str]:
    """Search for the quickest plan that makes another choice, for each dimension.

    Args:
        session: prices of earlier searches.
        request: what the plan was searched for.
        clock: the time limit of all searches.
        plan: the plan, with its prediction.
        reserved: fields of ``Strategy`` that the backend sets only if it is told to.

    Returns:
        The runners-up, and for people what was not searched for lack of time; empty if nothing.
    """

    def rank(other: RunnerUp) -> tuple[bool, float]:
        return not other.fits, other.step_seconds

    best: dict[str, RunnerUp] = {}
    choices = list(_pinned_choices(request, plan, reserved))
    for number, choice in enumerate(choices):
        dimension = choice[0]
        try:
            clock.begin(f"another {dimension}")
        except OutOfTimeError as error:
            left = ", ".join(dict.fromkeys(f"{name} {instead}" for name, _, instead, _ in choices[number:]))
            return tuple(best.values()), f"runner-ups of {left}: {error}"
        other = _runner_up(session, request, plan, choice)
        if other is not None and (dimension not in best or rank(other) < rank(best[dimension])):
            best[dimension] = other
    return tuple(best.values()), ""


def _runner_up(session: Session, request: Request, plan: Plan, choice: PinnedChoice) -> RunnerUp | None:
    dimension, chosen, instead, fixed = choice
    schedules = request.schedules if fixed.schedule is None else (fixed.schedule,)
    pinned = replace(request, fixed=fixed, schedules=schedules)
    quick_search = partial(search, pricer=session.pricer, effort=QUICK, below=ANY_TIME)
    try:
        fitting = quick_search(pinned)
        other = fitting or quick_search(replace(pinned, budget=UNBOUNDED))
    except InputError:
        return None
    if other is None:
        return None
    done = finished(request, session.pricer, other)
    # The final order of a zero-bubble plan's passes may hold more memory than the search counted.
    fits = fitting is not None and request.fits(done)
    added = seconds_of(done) - seconds_of(plan)
    return RunnerUp(dimension, chosen, instead, summary(done), seconds_of(done), added, peak_of(done), fits)


def _pinned_choices(request: Request, plan: Plan, reserved: Container[str]) -> Iterator[PinnedChoice]:
    pipeline = plan.pipeline
    for degree in _next_to(request.pipelines, pipeline):
        yield "pipeline", str(pipeline), str(degree), Fixed(pipeline=degree)
    for count in _next_to(microbatch_counts(request.global_batch, Fixed()), plan.microbatches):
        yield "micro-batches", str(plan.microbatches), str(count), Fixed(pipeline=pipeline, microbatches=count)
    if pipeline > 1:
        for schedule in request.schedules:
            if schedule is not plan.schedule and schedule.executable:
                yield "schedule", plan.schedule.value, schedule.value, Fixed(pipeline=pipeline, schedule=schedule)
    counts = Counter[Strategy]()
    for run in (run for stage in plan.stages for run in stage.runs):
        counts[run.strategy] += run.count
    main = min(counts, key=lambda strategy: (-counts[strategy], str(strategy)))
    devices = request.devices // pipeline
    for part in _dimension_parts():
        free = Fixed(pipeline=None if part.degrees else pipeline)
        for chosen, instead, pin in _other_values(part, main, plan, devices, reserved):
            kinds = sorted({layer.kind for layer in request.graph.layers})
            pinned = replace(free, strategy=(pin,))
            offering = [kind for kind in kinds if request.space.offers(kind, devices, pinned)]
            if len(offering) == len(kinds):
                yield part.name, chosen, instead, pinned
            elif offering:
                layers = tuple((layer.name, *pin) for layer in request.graph.layers if layer.kind in offering)
                yield part.name, chosen, instead, replace(free, layers=layers)


def _other_values(
    part: _DimensionPart, main: Strategy, plan: Plan, devices: int, reserved: Container[str]
) -> Iterator[tuple[str, str, tuple[str, object]]]:
    """The value that most layers have in a dimension, another one, and the pin for that: a field and its value."""
    for field in part.fields:
        name, current, unsplit = field.field, getattr(main, field.field), getattr(_UNSPLIT, field.field, 1)
        if isinstance(unsplit, Enum):
            used = {getattr(run.strategy, name) for stage in plan.stages for run in stage.runs}
            text = "some layers" if len(used) > 1 else current.value
            for option in (unsplit,) if name in reserved else (unsplit, list(type(unsplit))[-1]):
                if used != {option}:
                    yield text, option.value, (name, option)
        elif isinstance(unsplit, bool):
            if current != unsplit:
                yield "yes", "no", (name, unsplit)
        elif part.frees_devices and len(part.degrees) == 1:
            for degree in _next_to(divisors(devices), current):
                yield str(current), str(degree), (name, degree)
        elif field.most is not None:
            for value in range(field.least, field.most + 1):
                if value != current:
                    yield f"stage {current}", f"stage {value}", (name, value)
