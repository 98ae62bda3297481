"""The plan that needs least memory: what is reported where nothing fits.

Of every shape the least greatest peak of its stages, each found exactly (``frontier.least_room``), with the layers cut
by a bottleneck dynamic programme. Exact for few layers; for
others a plan is good enough when no other needs less than 97 % of its memory, and the error says so: many shapes of a
deep pipeline differ by less, and telling them apart takes minutes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import count, pairwise

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.cluster.budget import Budget, bytes_on
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.step import price_plan
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.search.frontier import least_room
from galvatron_lite.search.problem import Problem
from galvatron_lite.search.result import plan_of, summary
from galvatron_lite.search.shapes import Request, open_problem, settled, shapes_of, tables_by_stage
from galvatron_lite.units import format_budget

FloatArray = NDArray[np.float64]

_EXACT_LAYERS = 8
_SLACK = 0.03
"""Share of its memory that the leanest plan of a model with more layers may be above the least possible."""


@dataclass(frozen=True, slots=True)
class LeanStage:
    """A way to run one stage in least memory.

    Attributes:
        peak: bytes.
        strategies: of its layers.
    """

    peak: int
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Lean:
    """The plan that needs least memory.

    Attributes:
        peak: bytes on its fullest device.
        problem: its shape.
        cuts: (0, ..., L).
        strategies: of every layer.
    """

    peak: int
    problem: Problem
    cuts: tuple[int, ...]
    strategies: tuple[Strategy, ...]


def infeasible(request: Request, pricer: LayerPricer) -> InfeasibleError:
    """The error for a budget that is too small: the smallest that fits, and what would have to give."""
    slack = 0.0 if len(request.graph.layers) <= _EXACT_LAYERS else _SLACK
    lean = leanest(request, pricer, slack)
    if lean is None:
        return InfeasibleError(
            f"No plan of {request.graph.name} exists on {request.devices} devices with a batch of "
            f"{request.global_batch}: no way to split its layers divides the batch and has figures in the profile. "
            "Give another batch, other devices, or profile more tensor degrees."
        )
    shape = lean.problem.shape
    plan = plan_of(
        request.graph, devices=request.devices, global_batch=request.global_batch, microbatches=shape.microbatches,
        cuts=lean.cuts, strategies=lean.strategies, schedule=shape.schedule,
    )  # fmt: skip
    peak = price_plan(pricer, plan).prediction
    needed = lean.peak if peak is None else peak.peak_memory
    return InfeasibleError(
        f"No plan of {request.graph.name} fits {_told(request.budget)} a device on {request.devices} devices. "
        f"The smallest budget that fits is {format_budget(needed, up=True)} ({needed} bytes"
        f"{f', to {slack:.0%}' if slack else ''}), with {summary(plan)}. "
        "What would have to give: more memory a device, more devices, shorter samples, or a smaller model.",
        needed,
    )


def _told(budget: int | Budget) -> str:
    own = () if isinstance(budget, int) else budget.own
    shares = " and ".join(f"{format_budget(size)} ({name})" for name, size in own)
    return shares or format_budget(bytes_on(budget, ""))


def leanest(request: Request, pricer: LayerPricer, slack: float = 0.0) -> Lean | None:
    """The plan of the whole space that needs least memory; None where the space is empty.

    Args:
        request: what is asked for; its budget does not matter.
        pricer: prices layers.
        slack: no plan needs less than ``1 - slack`` of the memory of the one returned.
    """
    order, best = count(), None
    heap: list[tuple[float, int, Problem]] = []
    for shape in shapes_of(request):
        problem = open_problem(replace(request, budget=2**60), pricer, shape)
        bound = _bottleneck(_lightest(problem))[0]
        if np.isfinite(bound):
            heapq.heappush(heap, (bound, next(order), problem))
    while heap and (best is None or heap[0][0] < (1 - slack) * best.peak):
        _, _, problem = heapq.heappop(heap)
        for child in settled(problem):
            found = _lean_partition(child, None if best is None else int((1 - slack) * best.peak))
            best = found or best
    return best


def _lightest(problem: Problem) -> list[FloatArray]:
    """Per stage (L + 1, L + 1): bytes that layers i..j-1 need at the least; infinite for empty ranges."""
    bounds = []
    for stage, tables in enumerate(tables_by_stage(problem)):
        extra = problem.held(stage) - 1
        least = [
            float((t.figures.memory[:, :2].sum(axis=1) + extra * t.figures.kept).min()) if len(t) else np.inf
            for t in tables
        ]
        total = np.concatenate(([0.0], np.cumsum(least)))
        if not np.isfinite(total[-1]):
            return [np.full((len(tables) + 1, len(tables) + 1), np.inf)] * problem.shape.stages
        ranges = total[None, :] - total[:, None] + problem.tables[stage].pricer.profile.cluster.device.context
        bounds.append(np.where(np.tri(len(tables) + 1, dtype=bool), np.inf, ranges))
    return bounds


def _bottleneck(need: list[FloatArray]) -> tuple[float, list[int]]:
    """The partition with the least greatest need, and that need."""
    best = [need[0][0]]
    for stage in need[1:]:
        best.append(np.maximum(best[-1][:, None], stage).min(axis=0))
    stop = len(best[-1]) - 1
    cuts = [stop]
    for place in range(len(need) - 1, 0, -1):
        stop = int(np.argmin(np.maximum(best[place - 1], need[place][:, stop])))
        cuts.append(stop)
    return float(best[-1][-1]), [0, *reversed(cuts)]


def _lean_partition(problem: Problem, limit: int | None) -> Lean | None:
    """The partition of least peak below the limit: bounds are made exact where the best partition uses them."""
    need, known = _lightest(problem), {}
    while True:
        bound, cuts = _bottleneck(need)
        if not np.isfinite(bound) or (limit is not None and bound >= limit):
            return None
        stages = list(enumerate(pairwise(cuts)))
        unknown = [(stage, ends) for stage, ends in stages if (stage, ends) not in known]
        for stage, ends in unknown:
            known[stage, ends] = _lean_stage(problem, stage, range(*ends), limit)
            found = known[stage, ends]
            need[stage][ends] = np.inf if found is None else float(found.peak)
        if not unknown:
            used = [known[key] for key in stages]
            chosen = [stage for stage in used if stage is not None]
            strategies = tuple(strategy for stage in chosen for strategy in stage.strategies)
            return Lean(max(stage.peak for stage in chosen), problem, tuple(cuts), strategies)


def _lean_stage(problem: Problem, stage: int, inside: range, limit: int | None) -> LeanStage | None:
    """The way to run one stage in least memory below the limit; None where there is none."""
    built = problem.chain(stage, inside, scalar=True)
    if built is None:
        return None
    chain, tables = built
    always = problem.fixed_costs(stage, inside)[2]
    found = least_room(chain, None if limit is None else limit - always - 1)
    if found is None:
        return None
    peak, best = found
    strategies = tuple(table.strategies[choice] for table, choice in zip(tables, best, strict=True))
    return LeanStage(peak + always, strategies)
