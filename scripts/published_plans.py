"""Our plans beside published ones, by one and the same cost model; run by ``scripts/published_plans``.

A case is a model, machine, software and global batch. The plan of every published run of it is priced as ``galvatron
validate`` prices it; ours is searched on a profile of the same software, within the memory of a device, or what the
quickest published plan is predicted to need where that is more.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Proof
from galvatron_lite.profiler.estimate import SAMPLES, estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.result import summary
from galvatron_lite.search.shapes import Session
from galvatron_lite.search.space import Fixed
from galvatron_lite.validate.checks import check_understood
from galvatron_lite.validate.predict import InterpretedRun, Predictor, wanted_points
from galvatron_lite.validate.results import SkipError
from galvatron_lite.validate.rows import PublishedRun, read_runs

RUNS = Path(__file__).parents[1] / "profiles" / "published" / "runs.jsonl"
FAMILIES = (
    "korthikanti2022", "megascale", "llama3-herd", "bigscience-a100", "vtrain-multi", "vtrain-single",
    "nemo-launcher-a100", "nemo-fp8-h100", "nemo-longseq-fp8", "megatron-core-h100", "megatron-moe-zoo", "dgxc",
    "mbridge-bf16-moe", "mbridge-lowprec-dense", "zero-bubble",
)  # fmt: skip
"""Megatron-LM and software made of it, Llama 3, BLOOM."""
OPTIONAL = ("context", "expert", "offload")
"""Dimensions left out of a search where no published plan of the case has them, unless all are asked for."""
EFFORT = 0
SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Published:
    """A published run with its predicted plan."""

    run: PublishedRun
    known: InterpretedRun

    @property
    def strategies(self) -> set[Strategy]:
        """Of all layers."""
        return {run.strategy for stage in self.known.plan.stages for run in stage.runs}


@dataclass(frozen=True, slots=True)
class Row:
    """One case."""

    case: str  # the run of the quickest published plan, by prediction
    family: str  # of it
    model: str
    gpu: str
    gpus: int  # GPUs, samples a step, published runs of the case
    batch: int
    runs: int
    published: float  # predicted seconds a step: of the quickest published plan, of ours
    ours: float
    ratio: float  # ours over published
    given: bool  # whether the search, by itself, ended with a slower one and was asked again with the published plan
    alone: float  # ratio of the search by itself
    proven: bool  # of our search
    gap: float
    budget: int  # bytes a device
    their_plan: str  # in a line
    our_plan: str
    cpu: float  # seconds of the search
    drift: float  # relative difference of the published plan's price on this profile and on ``validate``'s


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), help="of published runs")
    parser.add_argument("--most", type=int, default=30, help="cases of a family, spread evenly; default: 30")
    parser.add_argument("--effort", type=float, default=EFFORT, help="labels of exact searches; default: 0, quick ones")
    parser.add_argument("--whole", action="store_true", help="search dimensions that no published plan has, too")
    return parser.parse_args(arguments)


def cases_of(families: Iterable[str], calibration: Calibration) -> list[list[Published]]:
    """Published runs of language models by what they have in common, in the order of the file."""
    predictor, wanted = Predictor(calibration), set(families)
    found: dict[object, list[Published]] = {}
    for run in read_runs(RUNS):
        if run.family in wanted and run.quality in ("A", "B") and run.seq_len is not None:
            known = understood(run, predictor)
            if known is not None:
                software = (repr(known.stack), known.precision)
                key = (id(known.graph), id(known.cluster), software, known.plan.global_batch)
                found.setdefault(key, []).append(Published(run, known))
    return list(found.values())


def understood(run: PublishedRun, predictor: Predictor) -> InterpretedRun | None:
    """A run in our words; None where that cannot be."""
    try:
        check_understood(run)
        return predictor.interpret(run)
    except (InputError, SkipError):
        return None


def spread(cases: Sequence[list[Published]], most: int) -> Iterator[list[Published]]:
    """At most so many cases of a family, evenly spread over it."""
    families: dict[str, list[list[Published]]] = {}
    for case in cases:
        families.setdefault(case[0].run.family, []).append(case)
    for own in families.values():
        count = min(len(own), most)
        yield from (own[place * len(own) // count] for place in range(count))


def profile_of(case: Sequence[Published], calibration: Calibration) -> Profile:
    """The profile of a case: every choice that is legal, with the samples a device of the published plans."""
    known = case[0].known
    points = (point for one in case for point in wanted_points(one.known.graph, one.known.plan))
    return estimate_profile(
        known.graph,
        known.cluster,
        precision=known.precision,
        name=known.graph.name,
        samples=sorted({*SAMPLES, *(point[4] for point in points)}),
        optimizer=known.stack.optimizer,
        stack=known.stack,
        calibration=calibration,
        context=max(strategy.context for one in case for strategy in one.strategies),
    )


def left_out(case: Sequence[Published]) -> tuple[str, ...]:
    """Dimensions that no published plan of a case has."""
    used = {strategy for one in case for strategy in one.strategies}
    has = {"context": any(one.context > 1 for one in used), "expert": any(one.expert > 1 for one in used)}
    return tuple(name for name in OPTIONAL if not has.get(name, False))


def compare(case: Sequence[Published], calibration: Calibration, chosen: argparse.Namespace) -> Row:
    """The quickest published plan of a case, and ours."""
    best = min(case, key=lambda one: one.known.prediction.step_seconds)
    session = Session(profile_of(case, calibration))
    theirs = price_plan(session.pricer, best.known.plan)
    budget = max(best.known.cluster.device.memory, peak_of(theirs))
    fixed = Fixed() if chosen.whole else Fixed(forbidden=left_out(case))
    started = time.process_time()

    def search(candidates: Sequence[Plan]) -> Plan:
        return find_plan(
            session.profile, devices=theirs.devices, global_batch=theirs.global_batch, budget=budget, fixed=fixed,
            backend="any", session=session, candidates=candidates, effort=int(chosen.effort),
        )  # fmt: skip

    alone = search(())
    given = seconds_of(alone) > seconds_of(theirs) * (1 + SLACK)
    ours = search([theirs]) if given else alone
    assert ours.provenance is not None
    return Row(
        best.run.run_id, best.run.family, best.run.model or "", best.run.gpu or "", theirs.devices,
        theirs.global_batch, len(case), seconds_of(theirs), seconds_of(ours), seconds_of(ours) / seconds_of(theirs),
        given, seconds_of(alone) / seconds_of(theirs), ours.provenance.proof is Proof.PROVEN, ours.provenance.gap,
        budget, summary(theirs), summary(ours), time.process_time() - started,
        abs(seconds_of(theirs) / best.known.prediction.step_seconds - 1),
    )  # fmt: skip


def seconds_of(plan: Plan) -> float:
    """Predicted, a step."""
    assert plan.prediction is not None
    return plan.prediction.step_seconds


def peak_of(plan: Plan) -> int:
    """Predicted bytes of the fullest device."""
    assert plan.prediction is not None
    return plan.prediction.peak_memory


def show(rows: Sequence[Row]) -> Table:
    """A line a case."""
    table = Table(
        "case", "model", "GPUs", "batch", "runs", "published", "ours", "ours/published", "gap", "CPU s",
        "published plan", "our plan", box=None, pad_edge=False,
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.case, row.model, str(row.gpus), str(row.batch), str(row.runs), f"{row.published:.4g}",
            f"{row.ours:.4g}", f"{row.ratio:.4f}{' given' if row.given else ''}",
            "proven" if row.proven else f"{row.gap:.1%}", f"{row.cpu:.1f}", row.their_plan, row.our_plan,
        )  # fmt: skip
    return table


def said(rows: Sequence[Row]) -> Iterator[str]:
    """What the table comes to."""
    ratios = [row.ratio for row in rows]
    worst = max(rows, key=lambda row: row.ratio)
    yield f"{len(rows)} cases of {sum(row.runs for row in rows)} published runs."
    yield (
        f"Ours is no slower in {sum(ratio <= 1 + SLACK for ratio in ratios)}, quicker in "
        f"{sum(ratio < 1 - SLACK for ratio in ratios)}; ratio: median {median(ratios):.3f}, best {min(ratios):.3f}, "
        f"worst {worst.ratio:.4f} ({worst.case})."
    )
    yield f"{sum(row.given for row in rows)} needed the published plan to start from."
    gaps = [row.gap for row in rows if not row.proven]
    open_gaps = f"; the others' gaps: median {median(gaps):.1%}, worst {max(gaps):.1%}" if gaps else ""
    yield f"{len(rows) - len(gaps)} are proven{open_gaps}."
    seconds = [row.cpu for row in rows]
    yield f"CPU seconds of searches: median {median(seconds):.1f}, all {sum(seconds):.0f}."
    yield f"Prices of published plans differ from those of validate by {max(row.drift for row in rows):.1e} at most."


def main() -> None:
    """Compare all cases."""
    chosen, calibration = options(), load_calibration()
    cases = list(spread(cases_of(chosen.families, calibration), chosen.most))
    errors = Console(stderr=True, highlight=False)
    rows = []
    for number, case in enumerate(cases, 1):
        rows.append(compare(case, calibration, chosen))
        errors.print(f"{number}/{len(cases)} {rows[-1].case} {rows[-1].ratio:.4f} {rows[-1].cpu:.1f} s", soft_wrap=True)
    if not rows:
        raise SystemExit("published_plans: no such run. Give other --families.")
    if chosen.json:
        print(json.dumps({"cases": [asdict(row) for row in rows], "summary": list(said(rows))}, indent=1))
        return
    console = Console(highlight=False, width=240)
    console.print(show(rows))
    for line in said(rows):
        console.print(line)


if __name__ == "__main__":
    main()
