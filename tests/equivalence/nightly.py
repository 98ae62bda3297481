"""The sampled plans of ``test_plans.py``, as many as asked for; see ``scripts/check_equivalence``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from galvatron_lite.plans.schema import Plan
from tests.equivalence.families import FAMILIES, PICTURES
from tests.equivalence.plans import describe
from tests.equivalence.test_plans import case_of, reference_of, sampled
from tests.equivalence.training import train_under_plans
from tests.pool import JobError, WorkerPool

SECONDS_A_PLAN = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the plans; 1 where any trains differently."""
    options = _parse(arguments)
    pool, wrong, checked, start = WorkerPool(), list[str](), 0, time.monotonic()
    for family in options.families:
        for world in options.worlds:
            plans = sampled(family, world, options.plans, first=options.first_seed)
            for plan in plans:
                wrong += [f"{family}: {message}" for message in _check(pool, family, plan)]
            checked += len(plans)
            print(f"{family} on {world}: {len(plans)} plans checked", flush=True)
    pool.close()
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{checked - len(wrong)} of {checked} plans train like one process ({time.monotonic() - start:.0f} s)")
    return 1 if wrong else 0


def _check(pool: WorkerPool, family: str, plan: Plan) -> list[str]:
    given = {"case": case_of(family), "plans": [plan], "reference": reference_of(family)}
    try:
        results = pool.run(plan.devices, train_under_plans, timeout=SECONDS_A_PLAN, **given)
    except JobError as error:
        return [f"{describe(plan)}: {error}"]
    return [message for rank in results for message in rank][:1]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser, every = argparse.ArgumentParser(description=__doc__), (*FAMILIES, *PICTURES)
    parser.add_argument("--plans", type=int, default=25, help="for every family and world size (default 25)")
    parser.add_argument("--families", nargs="+", choices=every, default=every)
    parser.add_argument("--worlds", nargs="+", type=int, choices=(1, 2, 4, 8), default=(2, 4, 8))
    parser.add_argument("--first-seed", type=int, default=1000)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
