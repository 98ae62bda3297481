"""The sampled plans of ``test_plans.py``, as many as asked for; see ``scripts/check_equivalence``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from galvatron_lite.plans.schema import Plan
from tests.equivalence.families import APART, FAMILIES, PICTURES
from tests.equivalence.features import counts
from tests.equivalence.plans import describe
from tests.equivalence.random_cases import check_cases
from tests.equivalence.test_plans import case_of, reference_of, sampled
from tests.equivalence.training import train_each
from tests.pool import JobError, WorkerPool

SHARE = {1: 10, 2: 35, 4: 50, 8: 40}
"""Plans a family, by world size, where nothing else is asked for: 2,000 and more of all families."""
TOGETHER = 5
"""Plans that are trained one after another by the same processes."""

Key = tuple[str, int, int]
"""Family, world size and seed of a plan."""


@dataclass(frozen=True)
class Checks:
    """Plans to be checked, and what is known of them.

    Attributes:
        pool: trains them.
        seconds: a plan may take.
        record: verdicts, a line each; None: they are not kept.
        known: what is wrong with plans that are checked; empty: nothing.
    """

    pool: WorkerPool
    seconds: float
    record: Path | None
    known: dict[Key, str] = field(default_factory=dict)

    def check(self, family: str, world: int, plans: Mapping[int, Plan]) -> None:
        """Those that are not known, by seed: several together, or one by one where any of these fails or hangs."""
        left = [seed for seed in plans if (family, world, seed) not in self.known]
        for start in range(0, len(left), TOGETHER):
            seeds = left[start : start + TOGETHER]
            for seed, wrong in self._verdicts(family, seeds, plans):
                self._keep((family, world, seed), wrong, plans[seed])

    def _verdicts(self, family: str, seeds: Sequence[int], plans: Mapping[int, Plan]) -> Iterator[tuple[int, str]]:
        try:
            yield from zip(seeds, self._train(family, [plans[seed] for seed in seeds]), strict=True)
        except JobError as error:
            if len(seeds) == 1:
                yield seeds[0], str(error)
                return
            for seed in seeds:
                yield from self._verdicts(family, [seed], plans)

    def _train(self, family: str, plans: Sequence[Plan]) -> list[str]:
        """What is wrong with each plan, as the first rank with anything to say tells."""
        given = {"case": case_of(family), "plans": plans, "reference": reference_of(family), "states": True}
        timeout = self.seconds * (1 + (len(plans) - 1) / 4)
        results = self.pool.run(plans[0].devices, train_each, timeout=timeout, **given)
        return [next(filter(None, verdicts), "") for verdicts in zip(*results, strict=True)]

    def _keep(self, key: Key, wrong: str, plan: Plan) -> None:
        self.known[key] = wrong
        family, world, seed = key
        print(f"{family} on {world}, seed {seed}: {wrong or 'ok'}", flush=True)
        if wrong:
            print(f"    {describe(plan)}", flush=True)
        if self.record is not None:
            with self.record.open("a") as file:
                file.write(json.dumps([*key, wrong]) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the plans; 1 where any trains differently."""
    options, start = _parse(arguments), time.monotonic()
    if options.cases:
        results = check_cases(options.cases, options.first_seed, options.record, options.seconds)
        return int(any(result.verdict not in ("equal", "refused") for result in results))
    asked = {(family, world): _plans(family, world, options) for family in options.families for world in options.worlds}
    checks = Checks(WorkerPool(), options.seconds, options.record, _recorded(options.record))
    print(f"{sum(map(len, asked.values()))} plans", flush=True)
    for (family, world), plans in asked.items():
        checks.check(family, world, plans)
    checks.pool.close()
    print(f"{time.monotonic() - start:.0f} s")
    return _summarise(asked, checks.known)


def _plans(family: str, world: int, options: argparse.Namespace) -> dict[int, Plan]:
    count, first = options.plans or SHARE[world], options.first_seed
    return dict(zip(range(first, first + count), sampled(family, world, count, first=first), strict=True))


def _summarise(asked: Mapping[tuple[str, int], Mapping[int, Plan]], known: Mapping[Key, str]) -> int:
    wrong = [(*place, seed) for place, plans in asked.items() for seed in plans if known[(*place, seed)]]
    total = [plan for plans in asked.values() for plan in plans.values()]
    for place, plans in asked.items():
        print("{} on {}:".format(*place), f"{sum(not known[(*place, s)] for s in plans)} of {len(plans)}")
    for name, count in counts(total).items():
        print(f"{count:5} with {name}")
    for family, world, seed in wrong:
        print(f"wrong: --families {family} --worlds {world} --first-seed {seed} --plans 1")
    print(f"{len(total) - len(wrong)} of {len(total)} plans train like one process")
    return 1 if wrong else 0


def _recorded(record: Path | None) -> dict[Key, str]:
    """Verdicts of an earlier run; a last line that was torn is left out."""
    lines = record.read_text().splitlines(keepends=True) if record is not None and record.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return {(family, world, seed): wrong for family, world, seed, wrong in entries}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser, every = argparse.ArgumentParser(description=__doc__), (*FAMILIES, *PICTURES, "t5")
    several = ", ".join(f"{count} on {world}" for world, count in SHARE.items())
    parser.add_argument("--plans", type=int, help=f"for every family and world size (default {several})")
    parser.add_argument("--cases", type=int, help="draw so many models too, instead of the named families")
    parser.add_argument("--families", nargs="+", choices=(*FAMILIES, *PICTURES, *APART), default=every)
    parser.add_argument("--worlds", nargs="+", type=int, choices=tuple(SHARE), default=tuple(SHARE))
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0, help="after which a plan is taken to hang (default 60)")
    parser.add_argument("--record", type=Path, help="a file of verdicts: a run that is started again goes on from it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
