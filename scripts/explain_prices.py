"""Prices of memory held against planning anew; run by ``scripts/explain_prices``.

Models, clusters, devices, batches and budgets are drawn at random. In each case a plan is made and written to a file;
the price is what is told of the file. Then the planner is asked, with nothing remembered, for the budget and for the
budget with that memory added: what the step time changes by is what the price must have said. The price that is told
without planning over all shapes (``--no-what-if``) is held against the same change.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from galvatron_lite import api
from galvatron_lite.analysis.what_ifs import TimeLimit, price_of_memory
from galvatron_lite.api_plans import question_of
from galvatron_lite.cluster.budget import Budget
from galvatron_lite.errors import GalvatronError, InfeasibleError
from galvatron_lite.plans.io import write_plan
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.units import format_budget, format_seconds

CLUSTERS = {"a100-40gb": (4, 8), "h100": (8, 16), "v100": (4, 8), "rtx-titan": (4, 8), "rtx3090": (4, 8)}
MODELS = (
    "bert-large",
    "gpt2",
    "llama2-7b",
    "llama3-8b",
    "mixtral-8x7b",
    "vit-huge",
    "t5-3b",
    "resnet152",
    "convnext-l",
)
SAMPLES = (4, 8, 16, 32)  # A device
WITHIN = 0.2  # share of the change by which a price may be off
NOTHING = 1e-6  # share of a step below which a change is none


@dataclass(frozen=True, slots=True)
class Case:
    """A question."""

    model: str  # by name
    cluster: str
    devices: int  # of it
    batch: int
    budget: int  # bytes a device


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was said and what was found."""

    case: Case  # the question
    added_bytes: int  # memory added on every device
    step_seconds: float  # of the fastest plan
    said_seconds: float  # that the memory added saves a step, as told of the plan's file
    shape_seconds: float  # the same as told without planning over all shapes
    found_seconds: float  # what it saves, by planning anew with nothing remembered
    cpu_seconds: float  # that the price took

    def right(self, said: float) -> bool:
        """Whether a price is within a fifth of the change, or both are nothing."""
        return abs(said - self.found_seconds) <= max(WITHIN * abs(self.found_seconds), NOTHING * self.step_seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every price is right."""
    asked = options(arguments)
    made, found = cases(asked.seed, asked.cases), []
    shown = Console(stderr=True)
    for case, plan in track(
        made, "Prices", total=asked.cases, console=shown, disable=asked.json or not shown.is_terminal
    ):
        outcome = outcome_of(case, plan)
        if outcome is not None:
            found.append(outcome)
            if asked.each:
                print(json.dumps(asdict(outcome)), file=sys.stderr, flush=True)
    if asked.json:
        print(json.dumps([asdict(one) | {"right": one.right(one.said_seconds)} for one in found]))
    else:
        show(found)
    return 0 if found and all(one.right(one.said_seconds) for one in found) else 1


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--each", action="store_true", help="print each case on standard error as it is done")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser.parse_args(arguments)


def cases(seed: int, wanted: int) -> Iterator[tuple[Case, Plan]]:
    """Random questions whose answer memory decides, and the answer.

    A budget lies between the least that any plan fits in and what the fastest plan of all would take.
    """
    draw, done = random.Random(seed), 0
    while done < wanted:
        model, cluster = draw.choice(MODELS), draw.choice(sorted(CLUSTERS))
        devices = draw.choice(CLUSTERS[cluster])
        batch, share = devices * draw.choice(SAMPLES), draw.random()
        try:
            known = api.find_profile(model=model, cluster=cluster, gpus=devices)
            least, most = least_budget(known, batch), peak_of(api.plan(known, batch=batch, runners_up=0))
            if least >= most:
                continue
            budget = int(least + share * (most - least))
            plan = api.plan(known, mem=budget, batch=batch)
        except GalvatronError:
            continue
        done += 1
        yield Case(model, cluster, devices, batch, budget), plan


def least_budget(known: Profile, batch: int) -> int:
    """Bytes a device that the leanest plan needs, as the planner's refusal of next to nothing says."""
    try:
        api.plan(known, mem=1, batch=batch, runners_up=0)
    except InfeasibleError as refusal:
        return refusal.smallest_budget or 0
    return 0


def peak_of(plan: Plan) -> int:
    """Predicted bytes of the fullest device."""
    return 0 if plan.prediction is None else plan.prediction.peak_memory


def outcome_of(case: Case, made: Plan) -> Outcome | None:
    """A price and what planning anew says; None where the plan with more memory could not be made."""
    known = api.find_profile(model=case.model, cluster=case.cluster, gpus=case.devices)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        write_plan(made, path)
        began = time.process_time()
        setting, plan, _ = question_of(path, known, {})
        price = price_of_memory(setting, TimeLimit(), plan, Budget(case.budget))
        taken = time.process_time() - began
        own = price_of_memory(setting, TimeLimit(), plan, Budget(case.budget), same_shape=True)
    now = seconds_of(made)
    try:
        then = seconds_of(planned(case, case.budget + price.added_bytes))
    except GalvatronError:
        return None
    said, shape = (one.step_seconds - one.then_step_seconds for one in (price, own))
    return Outcome(case, price.added_bytes, now, said, shape, now - then, taken)


def planned(case: Case, budget: int) -> Plan:
    """The fastest plan within a budget, which may be more than a device has."""
    from galvatron_lite.analysis.setting import PlanSetting, ask

    known = api.find_profile(model=case.model, cluster=case.cluster, gpus=case.devices)
    return ask(PlanSetting(known, budget), case.devices, case.batch, runners_up=api.RUNNERS_UP)


def seconds_of(plan: Plan) -> float:
    """Predicted, of a step."""
    return float("inf") if plan.prediction is None else plan.prediction.step_seconds


def show(found: Sequence[Outcome]) -> None:
    """A table of all cases, and how many prices are right."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    table = Table("case", "step", "more", "said", "found", "right", "own shape", "CPU", box=None, pad_edge=False)
    for one in found:
        case = one.case
        table.add_row(
            f"{case.model}, {case.devices} of {case.cluster}, batch {case.batch}, {format_budget(case.budget)}",
            format_seconds(one.step_seconds), format_budget(one.added_bytes), told(one.said_seconds),
            told(one.found_seconds), "yes" if one.right(one.said_seconds) else "NO",
            f"{told(one.shape_seconds)}{'' if one.right(one.shape_seconds) else ' (off)'}", f"{one.cpu_seconds:.1f} s",
        )  # fmt: skip
    console.print(table)
    right, shaped = (sum(one.right(getattr(one, name)) for one in found) for name in ("said_seconds", "shape_seconds"))
    moved = sum(one.found_seconds > NOTHING * one.step_seconds for one in found)
    console.print(f"{right} of {len(found)} prices are right within {WITHIN:.0%}; memory saves time in {moved}.")
    console.print(f"Among plans of the plan's own shape alone: {shaped} of {len(found)}.")


def told(seconds: float) -> str:
    """Seconds saved; 0 where none are."""
    return format_seconds(seconds) if seconds > 0 else "0" if seconds == 0 else f"-{format_seconds(-seconds)}"


if __name__ == "__main__":
    sys.exit(main())
