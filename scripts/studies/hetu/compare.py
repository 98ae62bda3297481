"""A recorded search of Hetu-Galvatron beside ours: same profile, budget and batch, both plans by both cost models.

Told of each case:

- ``ours``: the best of our whole space by our cost model.
- ``chosen``: one plan of the space that both can say (``common``), within the budget by both memory models and no
  slower than theirs by either; ``choose`` says how it is found.
- ``by_theirs``: the best of their space by their formulas (``search``): what their engine would find if it were exact.

Budgets are theirs: a fifth is kept back above 20 GB, and 1 GiB is the context. Our memory model is given what theirs
counts: no buffers of ZeRO, and embedding and head as they were measured in one stage or in two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import product
from math import inf
from time import process_time
from typing import TYPE_CHECKING

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute, Tie
from galvatron_lite.parallelism.backends import ANY, Backend
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.peers.hetu.model import EdgeMemory, Engine, HetuHardware, HetuModel
from galvatron_lite.peers.hetu.plan import from_plan, to_plan
from galvatron_lite.peers.hetu.profile import to_profile
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.search.best_first import plain, search
from galvatron_lite.search.planner import find_plan, request_of
from galvatron_lite.search.shapes import Session
from galvatron_lite.search.space import Fixed
from studies.hetu.formulas import price
from studies.hetu.search import PeerSearch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from galvatron_lite.peers.hetu.plan import HetuPlan
    from galvatron_lite.profiler.schema import Profile
    from studies.hetu.recorded import RecordedSearch


MB = 2**20
SHARES = (1.0, 0.5, 0.0)  # of their formulas in what the searches of ``choose`` make small
PARTS = (1.0, 0.99)
"""Of the budget that these may fill: plans that fill it by their formulas may be too large by our memory model."""
STEPS = (8, 32, 128)
"""MB less, beyond what a plan is too large by their formulas, in searches with ever smaller budgets."""
MOST = 32
"""Of the plans that one search by their formulas meets, how many are priced by ours, the quickest by theirs first."""
SLACK = 1e-9  # relative difference that counts as equal


class How(StrEnum):
    """How a plan was found; each is tried where those before it give no plan that is wanted."""

    OURS = "our search"
    SMALLER = "our search, in less memory"
    DEGREE = "our search, another pipeline degree"
    FORMULAS = "exact search by their formulas"
    MIXED = "search by a mixture of both"
    THEIRS = "their own plan"


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan by both cost models."""

    plan: Plan  # ours
    seconds: float  # a step by our model
    memory: int  # MB of the fullest device by ours
    # the same by their formulas; None where they cannot say it: other than even splits, unlike embedding and head,
    # dimensions that they do not know
    their_seconds: float | None
    their_memory: int | None
    cpu: float = 0.0  # seconds of the search
    how: How = How.OURS  # it was found


@dataclass(frozen=True, slots=True)
class Comparison:
    """One recorded search; see the module."""

    search: RecordedSearch  # what was asked, and what they found
    theirs: Priced | None  # their plan; None where they found none
    ours: Priced | None  # ours; None where nothing fits
    chosen: Priced | None
    by_theirs: Priced | None


@dataclass(slots=True)
class Bench:
    """What both are given."""

    peer: PeerSearch  # their space, with their profiles
    single: Profile  # our profile of the same, for plans of one stage and of several
    several: Profile
    _sessions: dict[bool, Session] = field(default_factory=dict)

    def session(self, *, single: bool) -> Session:
        """Searches of one of the profiles, whose embedding and head have one strategy."""
        if single not in self._sessions:
            self._sessions[single] = Session(with_edges_alike(self.single if single else self.several))
        return self._sessions[single]

    def pricer(self, plan: Plan) -> LayerPricer:
        """What prices a plan of ours."""
        return self.session(single=plan.pipeline == 1).pricer

    def priced(self, plan: Plan, cpu: float = 0.0, how: How = How.OURS) -> Priced:
        """A plan of ours by both models."""
        known = price_plan(self.pricer(plan), plan)
        assert known.prediction is not None
        try:
            theirs = price(self.peer.model, self.peer.hardware, _even(from_plan(known)), self.peer.asked.rules)
            said: tuple[float | None, int | None] = (theirs.seconds, max(theirs.memory))
        except InputError:
            said = (None, None)
        return Priced(known, known.prediction.step_seconds, (-(-known.prediction.peak_memory // MB)), *said, cpu, how)

    def of(self, plan: HetuPlan, cpu: float = 0.0, how: How = How.THEIRS) -> Priced:
        """A plan of theirs by both models."""
        asked, profile = self.peer.asked, self.single if plan.pipeline == 1 else self.several
        theirs = price(self.peer.model, self.peer.hardware, plan, asked.rules)
        ours = to_plan(plan, profile, async_reduce=asked.async_reduce, engine=asked.rules.engine)
        return replace(self.priced(ours, cpu, how), their_seconds=theirs.seconds, their_memory=max(theirs.memory))

    def found(self, degree: int, budget: int, below: float = inf) -> tuple[Plan, int] | None:
        """A plan of the common space and a pipeline degree, and its picoseconds by the closed form.

        The best by our model without a pipeline; with one, the best that a quick search meets.
        """
        asked, session = self.peer.asked, self.session(single=degree == 1)
        fixed = replace(pins_of(asked), pipeline=degree)
        try:
            request = request_of(
                session, asked.devices, asked.batch, budget * MB, fixed, (Schedule.ONE_F_ONE_B,), backend_of(asked)
            )
            found = search(request, session.pricer, below=below)
        except InputError:
            return None
        return None if found is None else (plain(request, found), found.partition.time)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Pipeline degrees to try."""
        asked = self.peer.asked
        most = 1 if pins_of(asked).pipeline == 1 else min(asked.devices, 8)
        return tuple(degree for degree in (1, 2, 4, 8) if degree <= most)


def bench_for(search: RecordedSearch, folder: Path) -> Bench:
    """The profiles of a recorded search, read from the folder that holds them."""
    model, hardware = search.profiles(folder)
    single, several = (profile_of(search, model, hardware, alone) for alone in (True, False))
    return Bench(PeerSearch(search, model, hardware, LayerPricer(several)), single, several)


def profile_of(search: RecordedSearch, model: HetuModel, hardware: HetuHardware, single: bool) -> Profile:
    """Our profile of what a search was given, as its formulas have it: no buffers of ZeRO and of sends.

    Args:
        single: whether embedding and head take what was measured of them in one stage, in the proportion that they have
            in stages apart.
    """
    if single:
        first, last = model.first, model.last
        model = replace(model, first=_share(model.together, first, last), last=_share(model.together, last, first))
    profile = to_profile(model, hardware, search.rules.engine)
    return replace(profile, accumulates=search.async_reduce, unbuffered=True)


def _share(memory: EdgeMemory, part: EdgeMemory, other: EdgeMemory) -> EdgeMemory:
    states, activation = (
        {
            degree: figure * mine[degree] / (mine[degree] + rest[degree])
            for degree, figure in total.items()
            if degree in mine and degree in rest
        }
        for total, mine, rest in (
            (memory.states, part.states, other.states),
            (memory.activation, part.activation, other.activation),
        )
    )
    return EdgeMemory(states, activation)


def compare(search: RecordedSearch, folder: Path) -> Comparison:
    """A recorded search beside ours."""
    bench = bench_for(search, folder)
    warm(bench.single)
    theirs = bench.of(search.hetu_plan()) if search.status == "ok" else None
    chosen = None if theirs is None else choose(bench, theirs)
    started = process_time()
    found = bench.peer.best(search.usable)
    by_theirs = bench.of(found[0], process_time() - started, How.FORMULAS) if found else None
    return Comparison(search, theirs, _whole_space(bench), chosen, by_theirs)


def _whole_space(bench: Bench) -> Priced | None:
    """The best plan of our whole space, or of what the recorded search left of it.

    Of one node; of several, where that takes minutes, the best that a quick search meets.
    """
    asked, started = bench.peer.asked, process_time()
    words = {"tp": ("tensor",), "sp": ("context", "ulysses"), "pp": ("pipeline",), "ckpt": ("recompute",)}
    forbidden = tuple(name for one in asked.off for name in words.get(one, ()))
    fixed = Fixed(pipeline=1 if "pp" in asked.off else None, microbatches=asked.chunks or None, forbidden=forbidden)
    session = Session(bench.several)
    request = request_of(
        session, asked.devices, asked.batch, asked.usable * MB, fixed, (Schedule.ONE_F_ONE_B,), ANY
    )  # fmt: skip
    found = search(request, session.pricer)
    return None if found is None else bench.priced(plain(request, found), process_time() - started)


def warm(profile: Profile) -> None:
    """One search that costs next to nothing, so that no import is timed."""
    find_plan(profile, devices=1, global_batch=1, budget=10**15, runners_up=0)


def choose(bench: Bench, theirs: Priced) -> Priced:
    """``chosen``; see the module. Its ``cpu`` is that of all that was tried for it.

    Tried in the order of ``How``, until one gives a plan that is no slower than theirs by either model and fits by
    both; of several from one of them the quickest by ours. Where their plan is too large by our memory model, ours may
    take as much by it as theirs.
    """
    started, best = process_time(), theirs
    for group in _candidates(bench, theirs.their_seconds or 0.0):
        wanted = [plan for plan in group if _wanted(plan, theirs, bench.peer.asked.usable)]
        if wanted:
            best = min(wanted, key=lambda plan: plan.seconds)
            break
    return replace(best, cpu=process_time() - started)


def _wanted(plan: Priced, theirs: Priced, usable: int) -> bool:
    if plan.their_seconds is None or plan.their_memory is None or theirs.their_seconds is None:
        return False
    fits = plan.their_memory <= usable and plan.memory <= max(usable, theirs.memory)
    slower = plan.seconds > theirs.seconds * (1 + SLACK)
    return fits and not slower and plan.their_seconds <= theirs.their_seconds * (1 + SLACK)


def _candidates(bench: Bench, limit: float) -> Iterator[list[Priced]]:
    """Plans of each way, none of which looks at their plan.

    Ways are left out that cannot give a plan of at most ``limit`` seconds by their formulas: with less memory the plan
    of our search is slower yet.
    """
    usable = bench.peer.asked.usable
    first = _best(bench, usable)
    yield [] if first is None else [first]
    slow = first is None or (first.their_seconds or limit) > limit * (1 + SLACK)
    yield [] if first is None or slow else list(_smaller(bench, first))
    others = [bench.found(degree, usable - STEPS[1]) for degree in bench.degrees]
    yield [bench.priced(found[0], how=How.DEGREE) for found in others if found is not None]
    seen: set[HetuPlan] = set()
    for share, part in product(SHARES, PARTS):
        how = How.FORMULAS if share == 1.0 else How.MIXED
        new = [plan for plan in bench.peer.plans(int(usable * part), share) if plan not in seen]
        seen.update(new)
        yield [bench.of(plan, how=how) for plan in sorted(new, key=bench.peer.seconds)[:MOST]]


def _best(bench: Bench, budget: int) -> Priced | None:
    """The best plan that our searches of the common space meet within so many MB, of any pipeline degree."""
    best: tuple[Plan, int] | None = None
    for degree in bench.degrees:
        best = bench.found(degree, budget, inf if best is None else best[1]) or best
    return None if best is None else bench.priced(best[0])


def _smaller(bench: Bench, plan: Priced) -> Iterator[Priced]:
    """Plans in ever less memory that have the pipeline degree of one, which their formulas find too large."""
    usable, room = bench.peer.asked.usable, bench.peer.asked.usable
    for step in STEPS:
        over = (plan.their_memory or 0) - usable
        if over <= 0:
            return
        room -= over + step
        found = bench.found(plan.plan.pipeline, room)
        if found is None:
            return
        plan = bench.priced(found[0], how=How.SMALLER)
        yield plan


def _even(plan: HetuPlan) -> HetuPlan:
    """The plan itself, if its stages have equally many layers: their formulas leave middle stages out."""
    if len(set(plan.division)) > 1:
        raise InputError("pp_division", plan.division, "Its formulas hold for even splits only.")
    return plan


DEGREES = (1, 2, 4, 8)  # of its tensor and Ulysses groups


def backend_of(search: RecordedSearch) -> Backend:
    """What its engine chooses from, as a backend of ours."""
    off = search.off
    zero2 = 1 if search.async_reduce else 2
    values: dict[str, tuple[object, ...]] = {
        "data": (1,),
        "zero_stage": (0, zero2) if "fsdp" in off else (0, zero2, 3),
        "tensor": (1,) if "tp" in off else tuple(degree for degree in DEGREES if degree <= search.most_tensor),
        "context": (1,) if "sp" in off or not search.tables else DEGREES,
        "sequence_parallel": (False, True),
        "expert": (1,),
        "recompute": (Recompute.NONE,) if "ckpt" in off else (Recompute.NONE, Recompute.FULL),
        "offload": (Offload.NONE,),
    }
    lone = search.engine == Engine.V240.value
    return Backend(
        "hetu-galvatron",
        lambda schedule: schedule is Schedule.ONE_F_ONE_B,
        values,
        rule=_whole_groups if lone else _replicas,
    )


def _replicas(strategy: Strategy) -> bool:
    """Whether only replicas shard states, and a layer's groups are of one kind."""
    return _whole_groups(strategy) and (strategy.zero_stage > 0) == (strategy.zero > 1)


def _whole_groups(strategy: Strategy) -> bool:
    """Whether a layer has tensor or Ulysses groups, not both, and shards states wherever there are ranks for that."""
    several = strategy.zero * strategy.context > 1
    alike = strategy.ulysses == (strategy.context > 1) and min(strategy.tensor, strategy.context) == 1
    return alike and (strategy.zero_stage == 0 or several) and (strategy.zero == 1 or strategy.zero_stage > 0)


def pins_of(search: RecordedSearch) -> Fixed:
    """What else its engine was told, and that stages are even."""
    stages = 1 if "pp" in search.off or len(search.layers) > 1 else None
    return Fixed(pipeline=stages, microbatches=search.chunks or None, even=True)


def with_edges_alike(profile: Profile) -> Profile:
    """The profile of the same model, whose embedding and head have one strategy."""
    return replace(profile, graph=replace(profile.graph, ties=(Tie("embed", "head", 0),)))
