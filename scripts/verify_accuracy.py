"""Predicted memory held against dry runs; run by ``scripts/verify_accuracy``.

Models, batches and what is pinned of a plan are drawn at random. Each plan is made from data sheets, and one rank of
each of its roles does a whole step at real size, without data. What the fullest rank of each stage holds at its worst
moment is set beside what the planner predicts for that stage, in whole and by category. What the device's driver takes
is left out on both sides.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from galvatron_lite import api
from galvatron_lite.cost.step import device_memory
from galvatron_lite.errors import GalvatronError
from galvatron_lite.files import from_data, to_data
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.plans.schema import MemoryBreakdown, Plan
from galvatron_lite.profiler.measure_tasks import Journal
from galvatron_lite.profiler.store import data_hash
from galvatron_lite.units import format_bytes
from galvatron_lite.verify.dry.roles import named_for, run_roles
from galvatron_lite.verify.dry.step import subject_of
from galvatron_lite.verify.source import example_of, named_source

WITHIN = 0.05  # share of the prediction by which a peak may differ
PLAIN: Mapping[str, Any] = {"highlight": False, "soft_wrap": True, "markup": False, "width": 250}
LEAST = 0.005  # share of a predicted peak from which on a category's difference is shown
CATEGORIES = tuple(one.name for one in fields(MemoryBreakdown) if one.name != "context")


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on a cluster, and what plans of it may be asked for."""

    cluster: str  # by name
    devices: int  # of it
    samples: tuple[int, ...]  # of a micro-batch on all devices of a stage, to choose from
    microbatches: tuple[int, ...]  # a step, to choose from
    sequence: int | None  # tokens a sample; None: the model's own
    pins: Mapping[str, tuple[str, ...]]  # what may be pinned; nothing is, where a choice is empty


RECOMPUTE = ("", "recompute=none", "recompute=full", "recompute=selective")
ZERO = ("", "zero=0", "zero=2", "zero=3")
SCHEDULES = ("schedule=1f1b", "schedule=gpipe", "schedule=zb1p", "schedule=interleaved")
SETTINGS = {
    "gpt2": Setting("a100-40gb", 8, (8, 16, 32), (1, 2, 4), None, {
        "pipeline": ("pp=1", "pp=2", "pp=4"), "tensor": ("", "tp=1", "tp=2", "tp=4"),
        "context": ("cp=1", "cp=1", "cp=2"),
        "zero": ZERO, "recompute": RECOMPUTE, "schedule": SCHEDULES,
    }),
    "vit-huge": Setting("a100-40gb", 8, (16, 32, 64), (1, 2, 4), None, {
        "pipeline": ("pp=1", "pp=2"), "tensor": ("", "tp=1", "tp=2", "tp=4"), "zero": ZERO, "recompute": RECOMPUTE,
        "schedule": SCHEDULES,
    }),
    "bert-large": Setting("v100", 8, (8, 16, 32), (1, 2, 4), None, {
        "pipeline": ("pp=1", "pp=2"), "tensor": ("", "tp=1", "tp=2", "tp=4"), "zero": ZERO, "recompute": RECOMPUTE,
        "schedule": SCHEDULES,
    }),
    "llama3-8b": Setting("a100-80gb", 16, (4, 8, 16), (1, 2, 4, 8), 8192, {
        "pipeline": ("pp=1", "pp=2", "pp=4"), "tensor": ("tp=2", "tp=4", "tp=8"), "zero": ("", "zero=2", "zero=3"),
        "recompute": RECOMPUTE, "schedule": SCHEDULES,
    }),
    "llama3-70b": Setting("h100", 64, (2, 4, 8), (8, 16, 32), 8192, {
        "pipeline": ("pp=2", "pp=4", "pp=8"), "tensor": ("tp=4", "tp=8"), "zero": ("zero=2", "zero=3"),
        "recompute": RECOMPUTE, "schedule": ("schedule=1f1b",),
    }),
    "mixtral-8x7b": Setting("h100", 32, (8, 16), (2, 4, 8), 4096, {
        "pipeline": ("pp=2", "pp=4"), "tensor": ("tp=1", "tp=2", "tp=4"), "zero": ZERO, "recompute": RECOMPUTE,
        "schedule": ("schedule=1f1b",),
    }),
    "t5-3b": Setting("a100-80gb", 8, (8, 16, 32), (1, 2, 4), None, {
        "pipeline": ("pp=1", "pp=2"), "tensor": ("", "tp=1", "tp=2"), "zero": ZERO, "recompute": RECOMPUTE,
        "schedule": ("schedule=1f1b", "schedule=gpipe"),
    }),
    "convnext-l": Setting("a100-40gb", 8, (32, 64, 128), (1, 2, 4), None, {
        "pipeline": ("pp=1", "pp=2"), "zero": ZERO, "recompute": RECOMPUTE, "schedule": ("schedule=1f1b",),
    }),
}  # fmt: skip
"""What is drawn from, by model."""
DEFAULT = ("gpt2", "vit-huge", "bert-large", "convnext-l", "llama3-8b")
"""Taken in turn; a plan of ``llama3-70b`` takes a minute of processor time."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a plan is asked for."""

    model: str  # by name
    batch: int  # samples a step, and of a micro-batch
    microbatch: int
    pins: tuple[str, ...]  # of the plan


@dataclass(frozen=True, slots=True)
class StageSeen:
    """One stage's fullest rank."""

    dry: MemoryBreakdown  # bytes by category
    predicted: MemoryBreakdown

    @property
    def off(self) -> float:
        """Share of the prediction by which the peak differs."""
        return tensors(self.dry) / max(tensors(self.predicted), 1) - 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """A plan that was run."""

    case: Case  # what was asked for
    plan: tuple[str, ...]  # strategies of its runs
    stages: tuple[StageSeen, ...]  # in the order of the groups of devices
    seconds: float  # of processor time
    reason: str = ""  # why it cannot be run without data; empty where it was

    @property
    def off(self) -> float:
        """Of the fullest device, predicted and seen."""
        dry, predicted = (max(tensors(getattr(one, name)) for one in self.stages) for name in ("dry", "predicted"))
        return dry / max(predicted, 1) - 1

    @property
    def worst(self) -> float:
        """Of the stage that differs most."""
        return max((one.off for one in self.stages), key=abs)


def tensors(memory: MemoryBreakdown) -> int:
    """Bytes without what the driver takes."""
    return memory.total - memory.context


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every plan's peak is as near as it should be."""
    asked = options(arguments)
    shown = Console(stderr=True)
    quiet = asked.json or not shown.is_terminal
    journal = Journal(asked.journal, data_hash([asked.seed, asked.plans, asked.models, api_version()]), asked.resume)
    found = []
    for number, (case, plan) in enumerate(
        track(cases(asked.seed, asked.plans, asked.models), "Plans", asked.plans, console=shown, disable=quiet)
    ):
        outcome = kept(journal, str(number), case, plan)
        found.append(outcome)
        if asked.each:
            show([outcome], Console(stderr=True, **PLAIN))
    if asked.json:
        print(json.dumps([to_data(one) | told(one) for one in found]))
    else:
        show(found, Console(**PLAIN))
        summary(found)
    journal.remove()
    run = [one for one in found if not one.reason]
    return 0 if run and all(abs(one.off) <= WITHIN for one in run) else 1


def api_version() -> str:
    """Of the package: a journal of another one is begun anew."""
    from galvatron_lite import __version__

    return __version__


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=20, help="how many")
    parser.add_argument("--models", nargs="+", default=list(DEFAULT), choices=sorted(SETTINGS), help="taken in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--each", action="store_true", help="print each plan on standard error as it is done")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--journal", type=Path, default=Path(".verify_accuracy"), help="keeps what is done")
    parser.add_argument("--anew", dest="resume", action="store_false", help="leave what an interrupted run has done")
    return parser.parse_args(arguments)


def cases(seed: int, wanted: int, models: Sequence[str]) -> Iterator[tuple[Case, Plan]]:
    """Random questions that have an answer, models in turn, and the answer."""
    draw, done = random.Random(seed), 0
    while done < wanted:
        case = drawn(draw, models[done % len(models)])
        setting = SETTINGS[case.model]
        try:
            plan = api.plan(
                model=case.model, cluster=setting.cluster, gpus=setting.devices, sequence=setting.sequence,
                batch=case.batch, fix=case.pins, runners_up=0,
            )  # fmt: skip
        except GalvatronError:
            continue
        done += 1
        yield case, plan


def drawn(draw: random.Random, model: str) -> Case:
    """A question; schedules are asked for where there are stages."""
    setting = SETTINGS[model]
    microbatch, count = draw.choice(setting.samples), draw.choice(setting.microbatches)
    pins = [draw.choice(choices) for choices in setting.pins.values()]
    if "pp=1" in pins:
        pins = [pin for pin in pins if not pin.startswith("schedule")]
    return Case(model, microbatch * count, microbatch, (*filter(None, pins), f"microbatch={microbatch}"))


def kept(journal: Journal, key: str, case: Case, plan: Plan) -> Outcome:
    """What is seen of a plan, from the journal where that has it."""
    if key not in journal.finished:
        journal.add(key, to_data(outcome_of(case, plan)))
    return from_data(Outcome, journal.finished[key], "journal")


def outcome_of(case: Case, plan: Plan) -> Outcome:
    """One rank of each role of a plan is run."""
    began, source = time.process_time(), named_source(case.model, SETTINGS[case.model].sequence)
    runs = tuple(f"{run.count} x {run.strategy}" for stage in plan.stages for run in stage.runs)
    try:
        made = source.on_meta()
        batch = example_of(made, 1)
        named = named_for(plan, discover_layers(made[0], batch))
        seen = run_roles(subject_of(made[0], named, batch, loss_fn=made[2]), named)
    except GalvatronError as error:
        return Outcome(case, runs, (), time.process_time() - began, str(error))
    stages = []
    for group, predicted in enumerate(device_memory(named)):
        fullest = max((run.peak for run in seen if run.stage == group), key=tensors)
        stages.append(StageSeen(fullest, predicted))
    return Outcome(case, runs, tuple(stages), time.process_time() - began)


def told(one: Outcome) -> dict[str, object]:
    """Figures of a plan that JSON holds beside it."""
    return {} if one.reason else {"off": one.off, "worst": one.worst, "within": abs(one.off) <= WITHIN}


def show(found: Sequence[Outcome], console: Console) -> None:
    """Plans and their stages; shares are of the predicted peak."""
    for one in found:
        console.print(
            f"{one.case.model}, {' '.join(one.case.pins)}, batch {one.case.batch}: {one.seconds:.0f} s of CPU"
        )
        console.print(f"  {'; '.join(dict.fromkeys(one.plan))}")
        if one.reason:
            console.print(f"  not run: {one.reason}")
        for place, stage in enumerate(one.stages):
            dry, whole = tensors(stage.dry), tensors(stage.predicted)
            parts = {name: (getattr(stage.dry, name) - getattr(stage.predicted, name)) / whole for name in CATEGORIES}
            off = ", ".join(f"{name} {share:+.1%}" for name, share in parts.items() if abs(share) >= LEAST)
            console.print(
                f"  stage {place}: dry run {format_bytes(dry)}, predicted {format_bytes(whole)}, {stage.off:+.1%}"
                f"{off and f' ({off})'}"
            )


def summary(found: Sequence[Outcome]) -> None:
    """How many are near."""
    console = Console(**PLAIN)
    run = [one for one in found if not one.reason]
    stages = [stage for one in run for stage in one.stages]
    near = sum(abs(one.off) <= WITHIN for one in run)
    staged = sum(abs(one.off) <= WITHIN for one in stages)
    console.print(f"{near} of {len(run)} plans: the fullest device's peak is within {WITHIN:.0%} of the prediction;")
    console.print(f"{staged} of {len(stages)} stages: their own peak is.")
    if len(run) < len(found):
        console.print(f"{len(found) - len(run)} cannot be run without data.")


if __name__ == "__main__":
    sys.exit(main())
