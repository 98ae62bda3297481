"""What was chosen for each run of layers, and what a step and a device would take if it were done otherwise.

Everything else stays equal: the whole plan is priced again with the run (in all stages that have such a run, and the
layers that share its parameters) under the other strategy. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from galvatron_lite.cost.sharing import tied_groups
from galvatron_lite.cost.step import price_staged
from galvatron_lite.errors import InputError
from galvatron_lite.explainer.neighbours import Step, steps_from
from galvatron_lite.explainer.priced import Priced
from galvatron_lite.explainer.rules import keeps_rules
from galvatron_lite.explainer.schema import Neighbour, RunChoice
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import LayerRun, Plan, Stage
from galvatron_lite.search.result import runs_of
from galvatron_lite.search.space import UNPINNED, Space

Fits = Callable[[Plan], bool]


@dataclass(frozen=True, slots=True)
class _Alike:
    """Runs that do the same.

    Attributes:
        stages: that hold them.
        runs: one of each stage.
        places: of all their layers.
    """

    stages: tuple[int, ...]
    runs: tuple[LayerRun, ...]
    places: tuple[int, ...]


def choices(priced: Priced, space: Space, fits: Fits) -> tuple[RunChoice, ...]:
    """Every run of layers, those of several stages that do the same together, in the order of the model.

    Args:
        priced: the plan.
        space: what layers may do.
        fits: whether a priced plan is within the budget.
    """
    return tuple(_choice(priced, alike, space, fits) for alike in _alike(priced))


def _alike(priced: Priced) -> list[_Alike]:
    graph = priced.pricer.profile.graph
    found: dict[object, list[tuple[int, LayerRun, range]]] = {}
    for number, stage in enumerate(priced.plan.stages):
        start = priced.ranges[number].start
        for run in stage.runs:
            places = range(start, start + run.count)
            key = (run.strategy, frozenset(graph.layers[place].kind for place in places))
            found.setdefault(key, []).append((number, run, places))
            start = places.stop
    return [
        _Alike(
            tuple(dict.fromkeys(number for number, _, _ in own)),
            tuple(run for _, run, _ in own),
            tuple(place for _, _, places in own for place in places),
        )
        for own in found.values()
    ]


def _choice(priced: Priced, alike: _Alike, space: Space, fits: Fits) -> RunChoice:
    layers, first, last = priced.pricer.profile.graph.layers, alike.runs[0], alike.runs[-1]
    kinds = tuple(dict.fromkeys(layers[place].kind for place in alike.places))
    return RunChoice(
        stages=alike.stages,
        first=first.first,
        last=last.last,
        layers=len(alike.places),
        kinds=kinds,
        strategy=str(first.strategy),
        step_seconds=_seconds(priced, alike),
        neighbours=tuple(_neighbours(priced, alike, _offered(space, kinds, priced.shape.stage_devices), fits)),
    )


def _seconds(priced: Priced, alike: _Alike) -> float:
    """Of a step, mean over the stages."""
    total, times = 0.0, priced.shape.microbatches
    for stage in alike.stages:
        for place, cost in zip(priced.ranges[stage], priced.stages[stage].layers, strict=True):
            if place in alike.places:
                total += times * (cost.forward_seconds + cost.backward_seconds) + cost.step_seconds
    return total / len(alike.stages)


def _offered(space: Space, kinds: Sequence[str], devices: int) -> list[Strategy]:
    """What all kinds may do."""
    every = [space.strategies(kind, devices, UNPINNED) for kind in kinds]
    others = [set(own) for own in every[1:]]
    return [one for one in every[0] if all(one in own for own in others)]


def _neighbours(priced: Priced, alike: _Alike, offered: Sequence[Strategy], fits: Fits) -> Iterator[Neighbour]:
    """The neighbours; of those of a dimension and degree the quickest that fits, or the leanest."""
    chosen = alike.runs[0].strategy
    places = _tied(priced, alike.places)
    by_axis = groupby(steps_from(chosen, offered), key=lambda step: step.axis.name)
    for _, steps in by_axis:
        told: dict[object, Neighbour] = {}
        for step in steps:
            other = _neighbour(priced, alike, places, step, fits)
            degree = None if step.axis.degree is None else step.axis.degree(step.strategy)
            key = (degree, step.strategy.zero_stage) if step.axis.name == "zero" else degree or step.strategy
            if other is not None and (key not in told or _rank(other) < _rank(told[key])):
                told[key] = other
        yield from sorted(told.values(), key=lambda other: (not other.off, other.added_step_seconds))


def _rank(other: Neighbour) -> tuple[bool, float]:
    return not other.fits, other.added_step_seconds if other.fits else other.added_bytes


def _tied(priced: Priced, places: Sequence[int]) -> frozenset[int]:
    """Layers and those that share their parameters, which have one strategy."""
    own = set(places)
    return frozenset(own.union(*(group for group in tied_groups(priced.pricer.profile.graph) if own & set(group))))


def _neighbour(priced: Priced, alike: _Alike, places: frozenset[int], step: Step, fits: Fits) -> Neighbour | None:
    """The plan with the step taken, priced; None where nothing could run or price it."""
    changed = [step.strategy if place in places else own for place, own in enumerate(priced.strategies)]
    graph = priced.pricer.profile.graph
    if keeps_rules(graph, priced.ranges, priced.strategies) and not keeps_rules(graph, priced.ranges, changed):
        return None
    try:
        other = price_staged(priced.pricer, with_strategies(priced, changed))
    except InputError:
        return None
    before, after = (max(plan.stages[stage].memory.total for stage in alike.stages) for plan in (priced.plan, other))
    assert other.prediction is not None
    added = other.prediction.step_seconds - priced.prediction.step_seconds
    return Neighbour(step.axis.name, str(step.strategy), step.off, added, after - before, fits(other))


def with_strategies(priced: Priced, strategies: Sequence[Strategy]) -> Plan:
    """The plan with other strategies of the model's layers, without its prediction."""
    layers = priced.pricer.profile.graph.layers
    stages: list[Stage] = []
    for inside, stage in zip(priced.ranges, priced.plan.stages, strict=True):
        own = slice(inside.start, inside.stop)
        stages.append(replace(stage, runs=runs_of(layers[own], strategies[own])))
    return replace(priced.plan, stages=tuple(stages), prediction=None)
