"""Sampled plans of ``tests.equivalence`` under the dry run's checks, as many as asked for; see
``scripts/verify_sampled``.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.model.batch import map_tensors
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.verify.checks import dry_run_checks
from galvatron_lite.verify.dry.mode import DryRunError
from galvatron_lite.verify.dry.roles import run_roles
from galvatron_lite.verify.dry.step import subject_of
from galvatron_lite.verify.schema import Check, Verdict
from tests.equivalence.families import FAMILIES, PICTURES, build_family
from tests.equivalence.features import counts
from tests.equivalence.plans import describe
from tests.equivalence.test_plans import SAMPLES, sampled

SHARE = {1: 1, 2: 20, 4: 20, 8: 10}
"""Plans a family, by world size, where nothing else is asked for."""
UNTOLD = "memory is as predicted", "memory fits the budget"
"""Checks that sampled plans, which have no prediction, are never held to."""

Key = tuple[str, int, int]
"""Family, world size and seed of a plan."""
Row = dict[str, Any]
"""Of a plan: ``seconds`` of processor time, and ``checks``: verdict, words and details by name."""


def verify(family: str, plan: Plan) -> list[Check]:
    """Every check of the dry run; what the model or torch raises is a check that failed."""
    model, batch, graph = subject(family)
    try:
        runs = run_roles(subject_of(model, plan, batch), plan, chained=not graph.tensors)
        return dry_run_checks(runs, plan, graph, profile_of(family, plan.devices))
    except DryRunError as error:
        return [Check("dry run", Verdict.SKIPPED, str(error))]
    except Exception as error:  # a fault of the checks, to be found
        lines = tuple(traceback.format_exc().splitlines()[-10:])
        return [Check("dry run", Verdict.FAILED, f"{type(error).__name__}: {error}"[:400], lines)]


@cache
def subject(family: str) -> tuple[nn.Module, Any, ModelGraph]:
    """A model, a batch and the graph, all in fp32, which plans and prices are of: without data nothing is rounded."""
    model, batch, _ = build_family(family, SAMPLES)
    batch = map_tensors(batch, lambda one: one.float() if one.is_floating_point() else one)
    return model.float(), batch, trace(model, batch, name=family)


@cache
def profile_of(family: str, devices: int) -> Profile:
    """Of a family, from data sheets."""
    return estimate_profile(subject(family)[2], load_cluster("a100-80gb", devices), precision="fp32", name=family)


def verdict_of(row: Row) -> str:
    """Of a plan: the worst of its checks."""
    found = [verdict for name, (verdict, *_) in row["checks"].items() if name not in UNTOLD]
    return next((one.value for one in _WORST if one.value in found), Verdict.PASSED.value)


_WORST = (Verdict.FAILED, Verdict.DIFFERS, Verdict.SKIPPED)


def sweep(wanted: Mapping[Key, Plan], record: Path | None, quiet: bool) -> dict[Key, Row]:
    """Rows of plans, those of an earlier run taken over."""
    known = _recorded(record)
    for key, plan in wanted.items():
        if key in known:
            continue
        begun = time.process_time()
        checks = {one.name: [one.verdict.value, one.said, list(one.details[:8])] for one in verify(key[0], plan)}
        known[key] = {"seconds": round(time.process_time() - begun, 2), "checks": checks}
        if record is not None:
            with record.open("a") as file:
                file.write(json.dumps([*key, known[key]]) + "\n")
        if not quiet:
            _tell(key, plan, known[key])
    return {key: known[key] for key in wanted}


def _tell(key: Key, plan: Plan, row: Row) -> None:
    family, world, seed = key
    print(f"{family} on {world}, seed {seed}: {verdict_of(row)} ({row['seconds']:.1f} s)", flush=True)
    bad = [(name, *rest) for name, rest in row["checks"].items() if name not in UNTOLD and rest[0] != "passed"]
    for name, verdict, said, details in bad:
        print(f"    {name} {verdict}: {said}")
        print(*(f"        {line}" for line in details if verdict != "skipped"), sep="\n")
    if any(verdict != "skipped" for _, verdict, *_ in bad):
        print(f"    {describe(plan)}", flush=True)


def _recorded(record: Path | None) -> dict[Key, Row]:
    """Rows of an earlier run; a last line that was torn is left out."""
    lines = record.read_text().splitlines(keepends=True) if record is not None and record.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return {(family, world, seed): row for family, world, seed, row in entries}


def summary(rows: Mapping[Key, Row], wanted: Mapping[Key, Plan]) -> Iterator[str]:
    """Plans by family and verdict, checks that did not pass, why some were skipped, and what the plans use."""
    for family in dict.fromkeys(family for family, *_ in rows):
        own = {key: row for key, row in rows.items() if key[0] == family}
        yield f"{family}: {len(own)} plans, {_told(Counter(map(verdict_of, own.values())))}"
    bad = Counter(
        (name, verdict) for row in rows.values() for name, (verdict, *_) in row["checks"].items()
        if name not in UNTOLD and verdict != Verdict.PASSED.value
    )  # fmt: skip
    yield from (f"{count:5} {verdict}: {name}" for (name, verdict), count in bad.most_common())
    yield from (f"{count:5} with {name}" for name, count in counts(wanted.values()).items())


def _told(found: Counter[str]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in found.most_common())


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify the plans; 1 where any is said to be wrong."""
    options = _parse(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    wanted = {
        (family, world, seed): plan
        for family in options.families
        for world in options.worlds
        for seed, plan in _plans(family, world, options).items()
    }
    rows = sweep(wanted, options.record, options.json)
    if options.json:
        print(json.dumps([[*key, row] for key, row in rows.items()]))
    else:
        print(*summary(rows, wanted), sep="\n")
    return int(any(verdict_of(row) == Verdict.FAILED.value for row in rows.values()))


def _plans(family: str, world: int, options: argparse.Namespace) -> dict[int, Plan]:
    count, first = options.plans or SHARE[world], options.first_seed
    return dict(zip(range(first, first + count), sampled(family, world, count, first=first), strict=True))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser, every = argparse.ArgumentParser(description=__doc__), (*FAMILIES, *PICTURES, "t5")
    several = ", ".join(f"{count} on {world}" for world, count in SHARE.items())
    parser.add_argument("--plans", type=int, help=f"for every family and world size (default {several})")
    parser.add_argument("--families", nargs="+", choices=every, default=every)
    parser.add_argument("--worlds", nargs="+", type=int, choices=tuple(SHARE), default=tuple(SHARE))
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--record", type=Path, help="a file of verdicts: a run that is started again goes on from it")
    parser.add_argument("--json", action="store_true", help="print every plan's checks as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
