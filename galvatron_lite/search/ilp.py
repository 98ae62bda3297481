"""The certificate: the winning shape with its boundaries as an integer programme, solved by another method.

Variables: x[l, s] in {0, 1}, layer l takes choice s; y[l, a, b] >= 0, layer l-1 lies in group a and layer l in group b
(layouts; the tight flow form of a chain); P >= 0 for the peak terms, C and U for the slowest stage.

    minimise   sum_s c_s + (m - 1) sum_parts C_part + U
    subject to sum_s x[l, s] = 1;   sum_b y[l, a, b] = sum of x[l-1, s] in group a;  sum_a y[l, a, b] likewise for l
               C_part >= c_s of every stage, U >= u_s
               constraints (2) and (3) of ``frontier`` for every layer, with a bound on each moment per choice:
               moment_l is linear but for max(w_l, v_l + d_{l+1}), which becomes two constraints
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.errors import GalvatronError
from galvatron_lite.search.chain import Chain, ChainLayer
from galvatron_lite.search.partition import Partition, step_time
from galvatron_lite.search.problem import Problem, StagePlan
from galvatron_lite.search.pulp_adapter import Programme, Verdict, solve
from galvatron_lite.search.tables import TICKS

IntArray = NDArray[np.int64]
_TOLERANCE = 1e-6
_SCALE = 1e4
"""Objective and memory are scaled to this, far above solvers' absolute tolerances (1e-6)."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the integer programme says.

    Attributes:
        verdict: how sure the solver is.
        seconds: of a step by its solution, recomputed from the tables; infinite without one.
        solver: which.
    """

    verdict: Verdict
    seconds: float
    solver: str


def certify(problem: Problem, partition: Partition, seconds: float = 60.0) -> Certificate:
    """Solve the shape of a plan, with its stage boundaries, as an integer programme.

    Raises:
        GalvatronError: the solver proved another optimum than the search.
    """
    certificate = solve_partition(problem, partition, seconds)
    found = partition.time / TICKS
    if certificate.verdict is Verdict.PROVEN and abs(certificate.seconds - found) > _TOLERANCE * found:
        raise GalvatronError(
            f"The search found {found} s, {certificate.solver} {certificate.seconds} s for the same shape of plan. "
            "Please report this with the profile."
        )
    return certificate


def solve_partition(problem: Problem, partition: Partition, seconds: float = 60.0) -> Certificate:
    """The best strategies for the stage boundaries of a plan, whose own strategies it does not look at."""
    programme = Programme()
    parts = len(problem.weights) - 1
    unit = partition.time / _SCALE
    tops = [programme.variable(binary=False) for _ in range(parts + 1)]
    programme.objective.update(dict.fromkeys(tops[:-1], float(problem.shape.microbatches - 1)) | {tops[-1]: 1.0})
    stages = []
    for stage, ends in enumerate(pairwise(partition.cuts)):
        built = problem.chain(stage, range(*ends), scalar=False)
        if built is None:
            return Certificate(Verdict.INFEASIBLE, float("inf"), "none needed")
        forward, backward, _ = problem.fixed_costs(stage, range(*ends))
        sends = [forward + backward, 0] if parts == 1 else [forward, backward, 0]
        stages.append(_Stage(built[0], sends, _add_stage(programme, built[0], tops, sends, unit)))
    answer = solve(programme, seconds)
    if not answer.values:
        return Certificate(answer.verdict, float("inf"), answer.solver)
    found = tuple(_read(stage, answer.values) for stage in stages)
    return Certificate(answer.verdict, step_time(found, problem.shape.microbatches) / TICKS, answer.solver)


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """A stage in the programme: its chain, what it sends in each criterion, its variables by layer and choice."""

    chain: Chain
    sends: list[int]
    choices: list[list[int]]


def _read(stage: _Stage, values: Sequence[float]) -> StagePlan:
    """The stage's exact time from the greatest variable of each layer (solvers return 0.9999999 for 1)."""
    path = [max(range(len(own)), key=lambda row: values[own[row]]) for own in stage.choices]
    layers = stage.chain.layers
    time = np.array(stage.sends) + sum(layer.time[choice] for layer, choice in zip(layers, path, strict=True))
    for (before, a), (layer, b) in pairwise(zip(layers, path, strict=True)):
        time = time + layer.move[before.group[a], layer.group[b]] * stage.chain.moves
    *bottleneck, step = (int(value) for value in time)
    return StagePlan(tuple(bottleneck), step, ())


def _add_stage(programme: Programme, chain: Chain, tops: list[int], sends: list[int], unit: float) -> list[list[int]]:
    """One stage's choices (returned), memory, part of the objective, and place below the slowest stage."""
    choices = [[programme.variable(binary=True) for _ in layer.rest] for layer in chain.layers]
    for own in choices:
        programme.equal.append((dict.fromkeys(own, 1.0), 1.0))
    times = [_time_of(chain, choices, column, unit) for column in range(len(chain.weights))]
    for place in range(1, len(chain.layers)):
        _add_moves(programme, chain, choices, place, times, unit)
    for column, (time, top, sent) in enumerate(zip(times, tops, sends, strict=True)):
        programme.at_most.append((time | {top: -1.0}, -sent / unit))
        if column < len(times) - 1:
            for number, factor in time.items():
                programme.objective[number] = programme.objective.get(number, 0.0) + factor
    _add_memory(programme, chain, choices)
    return choices


def _time_of(chain: Chain, choices: list[list[int]], column: int, unit: float) -> dict[int, float]:
    return {
        number: float(value) / unit
        for layer, own in zip(chain.layers, choices, strict=True)
        for number, value in zip(own, layer.time[:, column], strict=True)
    }


def _add_moves(
    programme: Programme, chain: Chain, choices: list[list[int]], place: int, times: list[dict[int, float]], unit: float
) -> None:
    """The flow between the layouts of a layer and the one before it, and what it costs."""
    left, right = chain.layers[place - 1], chain.layers[place]
    flow = {
        (a, b): programme.variable(binary=False)
        for a in np.unique(left.group).tolist()
        for b in np.unique(right.group).tolist()
    }
    for side, (layer, own) in enumerate(((left, choices[place - 1]), (right, choices[place]))):
        for group in np.unique(layer.group).tolist():
            through = {number: 1.0 for ends, number in flow.items() if ends[side] == group}
            held = {number: -1.0 for number, of in zip(own, layer.group, strict=True) if of == group}
            programme.equal.append((through | held, 0.0))
    for (a, b), number in flow.items():
        for column, time in enumerate(times):
            time[number] = float(right.move[a, b] * chain.moves[column]) / unit


def _add_memory(programme: Programme, chain: Chain, choices: list[list[int]]) -> None:
    """Every moment within the room, in ten-thousandths of it: the solver's tolerance is then below a byte or so."""
    room = max(chain.room, 1) / _SCALE
    rest = _figures(choices, [layer.rest for layer in chain.layers])
    _at_most(programme, [_figures(choices, [layer.updated for layer in chain.layers])], room)
    for place, layer in enumerate(chain.layers):
        own = choices[place]
        start = _figures(choices[:place], [before.prefix for before in chain.layers[:place]])
        beside = _one(choices[place - 1], chain.layers[place - 1].prefetched) if place else {}
        _at_most(programme, [rest, start, beside, _one(own, np.maximum(layer.peak, layer.middle))], room)
        if place + 1 < len(chain.layers):
            after: ChainLayer = chain.layers[place + 1]
            pending = _one(choices[place + 1], after.pending)
            _at_most(programme, [rest, start, beside, _one(own, layer.middle), pending], room)


def _figures(choices: list[list[int]], values: list[IntArray]) -> dict[int, float]:
    return {
        n: float(v) for own, figures in zip(choices, values, strict=True) for n, v in zip(own, figures, strict=True)
    }


def _one(own: list[int], values: IntArray) -> dict[int, float]:
    return {number: float(value) for number, value in zip(own, values, strict=True)}


def _at_most(programme: Programme, terms: list[dict[int, float]], room: float) -> None:
    total: dict[int, float] = {}
    for term in terms:
        for number, value in term.items():
            total[number] = total.get(number, 0.0) + value / room
    programme.at_most.append((total, _SCALE))
