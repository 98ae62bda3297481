"""A recorded search of Hetu-Galvatron beside ours: same profile, budget and batch, both plans by both cost models.

Three plans of ours are told:

- ``ours``: what ``find_plan`` gives, the best of our whole space by our cost model.
- ``by_theirs``: the best of their space by their formulas (``search``): what their engine would find if it were exact.
- ``both``: of the plans of their space (even splits, one strategy for embedding and head) that an exact search by
  their formulas or by ours meets, and of their own plan, the one of least step time by ours among those
  that take no longer than theirs by their formulas.

Budgets are theirs: a fifth is kept back above 20 GB, and 1 GiB is the context. Where their plan needs more by our
memory model than that, ours may take as much as it (``room``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from time import process_time

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.step import price_plan
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.peers.hetu.formulas import price
from galvatron_lite.peers.hetu.plan import from_plan, to_plan
from galvatron_lite.peers.hetu.profile import to_profile
from galvatron_lite.peers.hetu.recorded import RecordedSearch
from galvatron_lite.peers.hetu.search import PeerSearch
from galvatron_lite.peers.hetu.strategy import HetuPlan
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.space import Fixed

MB = 2**20
SHARES = (1.0, 0.0)
"""Of their formulas in what a search for ``both`` makes small."""
PARTS = (1.0, 0.97)
"""Of the budget that those searches fill: plans that fill theirs may be too large by our memory model."""
SLACK = 1e-9
"""Relative difference that counts as equal."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan by both cost models.

    Attributes:
        plan: ours.
        seconds: a step by our model.
        memory: MB of the fullest device by ours.
        their_seconds, their_memory: the same by their formulas, the worse of two where embedding and head are unlike;
            None where they cannot say it: other than even splits, dimensions that they do not know.
        cpu: seconds of the search.
    """

    plan: Plan
    seconds: float
    memory: int
    their_seconds: float | None
    their_memory: int | None
    cpu: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One recorded search; see the module.

    Attributes:
        search: what was asked, and what they found.
        theirs: their plan; None where they found none.
        ours, by_theirs, both: ours; None where nothing fits.
        room: MB that ours may take by our model.
    """

    search: RecordedSearch
    theirs: Priced | None
    ours: Priced | None
    by_theirs: Priced | None
    both: Priced | None
    room: int


@dataclass(frozen=True, slots=True)
class Bench:
    """What both are given.

    Attributes:
        peer: their space, with their profiles and our pricer.
        profile: ours of the same.
    """

    peer: PeerSearch
    profile: Profile

    def priced(self, plan: Plan, cpu: float = 0.0) -> Priced:
        """A plan of ours by both models."""
        known = price_plan(self.peer.pricer, plan)
        assert known.prediction is not None
        try:
            both = [
                price(self.peer.model, self.peer.hardware, _even(from_plan(known, edge)), self.peer.asked.rules)
                for edge in ("first", "last")
            ]
            said: tuple[float | None, int | None] = (
                max(one.seconds for one in both),
                max(max(one.memory) for one in both),
            )
        except InputError:
            said = (None, None)
        return Priced(known, known.prediction.step_seconds, _mb(known.prediction.peak_memory), *said, cpu)

    def of(self, plan: HetuPlan, cpu: float = 0.0) -> Priced:
        """A plan of theirs by both models."""
        theirs = price(self.peer.model, self.peer.hardware, plan, self.peer.asked.rules)
        known = price_plan(self.peer.pricer, to_plan(plan, self.profile, async_reduce=self.peer.asked.async_reduce))
        assert known.prediction is not None
        memory = _mb(known.prediction.peak_memory)
        return Priced(known, known.prediction.step_seconds, memory, theirs.seconds, max(theirs.memory), cpu)


def bench_for(search: RecordedSearch, folder: Path) -> Bench:
    """The profiles of a recorded search, read from the folder that holds them."""
    model, hardware = search.profiles(folder)
    profile = to_profile(model, hardware, search.rules.engine)
    return Bench(PeerSearch(search, model, hardware, LayerPricer(profile)), profile)


def compare(search: RecordedSearch, folder: Path) -> Comparison:
    """A recorded search beside ours.

    Raises:
        InputError: a profile that cannot be read.
    """
    bench = bench_for(search, folder)
    theirs = bench.of(search.hetu_plan()) if search.status == "ok" else None
    room = max(search.usable, theirs.memory if theirs else 0)
    ours = _ours(bench, room)
    started = process_time()
    found = bench.peer.best(search.usable)
    by_theirs = bench.of(found[0], process_time() - started) if found else None
    both = None if theirs is None else best_of_both(bench, theirs, room, ours)
    return Comparison(search, theirs, ours, by_theirs, both, room)


def _ours(bench: Bench, room: int) -> Priced | None:
    search = bench.peer.asked
    find_plan_warm(bench.profile)
    started = process_time()
    try:
        plan = find_plan(
            bench.profile, devices=search.devices, global_batch=search.batch, budget=room * MB, fixed=_fixed(search),
            schedules=(Schedule.ONE_F_ONE_B,), backend="any", runners_up=0,
        )  # fmt: skip
    except GalvatronError:
        return None
    return bench.priced(replace(plan, alternatives=()), process_time() - started)


def find_plan_warm(profile: Profile) -> None:
    """One search that costs next to nothing, so that no import is timed."""
    find_plan(profile, devices=1, global_batch=1, budget=10**15, runners_up=0)


def _fixed(search: RecordedSearch) -> Fixed:
    """What the recorded search left out, in our words."""
    words = {"tp": ("tensor",), "sp": ("context", "ulysses"), "pp": ("pipeline",), "ckpt": ("recompute",)}
    forbidden = tuple(name for one in search.off for name in words.get(one, ()))
    return Fixed(pipeline=1 if "pp" in search.off else None, microbatches=search.chunks or None, forbidden=forbidden)


def best_of_both(bench: Bench, theirs: Priced, room: int, ours: Priced | None) -> Priced:
    """``both``; see the module."""
    assert theirs.their_seconds is not None
    limit, usable = theirs.their_seconds * (1 + SLACK), bench.peer.asked.usable
    started, best = process_time(), theirs
    for plan in _candidates(bench.peer, usable):
        if price(bench.peer.model, bench.peer.hardware, plan, bench.peer.asked.rules).seconds > limit:
            continue
        found = bench.of(plan)
        if found.memory <= room and found.seconds < best.seconds:
            best = found
    if ours is not None and ours.seconds < best.seconds and within(ours, limit, usable):
        best = ours
    return replace(best, cpu=process_time() - started)


def within(plan: Priced, seconds: float, memory: int) -> bool:
    """Whether their formulas can say a plan, and give it no more than these seconds and MB."""
    said = plan.their_seconds is not None and plan.their_memory is not None
    return said and (plan.their_seconds or 0.0) <= seconds and (plan.their_memory or 0) <= memory


def _candidates(peer: PeerSearch, usable: int) -> Iterator[HetuPlan]:
    seen: set[HetuPlan] = set()
    for share, part in product(SHARES, PARTS):
        for plan in peer.plans(int(usable * part), share):
            if plan not in seen:
                seen.add(plan)
                yield plan


def _even(plan: HetuPlan) -> HetuPlan:
    """The plan itself, if its stages have equally many layers: their formulas leave middle stages out."""
    if len(set(plan.division)) > 1:
        raise InputError("pp_division", plan.division, "Its formulas hold for even splits only.")
    return plan


def _mb(size: int) -> int:
    return -(-size // MB)
