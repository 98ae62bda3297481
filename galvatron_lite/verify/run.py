"""The checks of a plan, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.verify.asked import Checks
from galvatron_lite.verify.checks import check_dry
from galvatron_lite.verify.numbers.check import check_numbers
from galvatron_lite.verify.numbers.world import Nursery
from galvatron_lite.verify.schema import Check, RoleRun, Verification
from galvatron_lite.verify.source import ModelSource

Progress = Callable[[int, int, str], None]


def run_checks(
    source: ModelSource,
    plan: Plan,
    checks: Sequence[Checks],
    *,
    processes: int | None = None,
    progress: Progress = lambda *_: None,
    journal: Path | None = None,
    identity: str = "",
    profile: Profile | None = None,
) -> Verification:
    """The verdicts on a plan; see ``api_plans.verify_plan`` and ``checks.check_dry``."""
    found: list[Check] = []
    roles: list[RoleRun] = []
    with ExitStack() as stack:
        # before anything else: later this process may not be fit to fork any more
        nursery = stack.enter_context(Nursery(source)) if Checks.NUMBERS in checks else None
        if Checks.DRY in checks:
            found, roles = check_dry(source, plan, progress, journal, identity, profile)
        if nursery is not None:
            progress(len(roles), len(roles) + 1, "numbers")
            found = [*found, check_numbers(source, plan, nursery, processes)]
    return Verification(tuple(found), tuple(roles))
