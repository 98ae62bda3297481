"""What branches on devices of their own gain, measured on two processes; run by ``scripts/branches``."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from branches_model import CHOICES, SIZES, Size, make
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch import distributed as dist

from galvatron_lite import auto_parallelize, plan
from galvatron_lite.api import evaluate
from galvatron_lite.files import write_text
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, BranchPlacement, LayerRun, Plan, Schedule, Stage
from galvatron_lite.profiler.measure import measure_profile
from galvatron_lite.profiler.timing import TimingRule
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.result import runs_of, summary
from galvatron_lite.world import join, leave, rank
from measured import spread_of, step_seconds

LEARNING_RATE = 1e-3
NAMES = ("first", "second")
RULE = TimingRule(most=20)  # how long one point of a profile is measured
MEMORY = 8 * 2**30  # bytes; more than any of the networks needs

Step = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """Median seconds of a step, and interquartile range / median."""

    seconds: float
    spread: float


def nothing() -> None:
    """What a rank does while the other works alone."""


def training_step(module: nn.Module, call: Callable[[], Tensor]) -> Step:
    """A step of plain torch."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        call().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def inferring(call: Callable[[], object]) -> Step:
    """A call without gradients."""

    def step() -> None:
        with torch.no_grad():
            call()

    return step


def alone(size: Size, name: str, training: bool) -> Step:
    """One network in one process; the other process waits."""
    if rank() != 0:
        return nothing
    model, batch = make(size)
    network = getattr(model, name)
    if not training:
        return inferring(lambda: network(batch["pictures"]))
    return training_step(network, lambda: (network(batch["pictures"]) - batch["targets"]).square().mean())


def together(size: Size, training: bool) -> Step:
    """Both networks in one process."""
    if rank() != 0:
        return nothing
    model, batch = make(size)
    if not training:
        return inferring(lambda: model(batch["pictures"]))
    return training_step(model, lambda: model(**batch))


def planned(size: Size, chosen: Plan, training: bool) -> Step:
    """Under a plan, on both processes."""
    model, batch = make(size)
    if not training:
        made: Any = auto_parallelize(model, batch, plan=chosen, mode="inference", device="cpu")
        return lambda: made(batch["pictures"])
    parallel: Any = auto_parallelize(model, batch, plan=chosen, device="cpu")
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=LEARNING_RATE)
    return lambda: parallel.train_step(batch, optimizer)


def exchange(size: Size, training: bool) -> Step:
    """What must travel, and no more: each rank's output to the other, and in training nothing back but a norm's size.

    Every rank has the whole input and works out the whole loss; a gradient of an output is known where it is needed.
    """
    mine = torch.zeros(size.samples, 1, size.side, size.side)
    other, peer = torch.empty_like(mine), 1 - rank()

    def step() -> None:
        works = [dist.isend(mine, peer), dist.irecv(other, peer)]
        for work in works:
            if work is not None:
                work.wait()
        if training:
            dist.all_reduce(torch.zeros(1))

    return step


def branch_plan(size: Size) -> Plan:
    """Each network on a process of its own; the rest on both."""
    model, batch = make(size)
    layers = discover_layers(model, batch)
    own = [[one for one in layers if f"{one.name}.".startswith(f"{name}.")] for name in NAMES]
    rest = [one for one in layers if all(one not in layers_of for layers_of in own)]
    placed = tuple(
        BranchPlacement(name, (name,), number, 1, runs_of(own[number], [Strategy()] * len(own[number])))
        for number, name in enumerate(NAMES)
    )
    stage = Stage(tuple(LayerRun(one.name, one.name, 1, Strategy()) for one in rest))
    return Plan(PLAN_VERSION, "pair", 2, size.samples, 1, Schedule.ONE_F_ONE_B, "fp32", (stage,), branches=placed)


def timed(steps: dict[str, Step], rounds: int) -> dict[str, Timed]:
    """Every step's time, taken in turns so that drift of the machine meets all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step_seconds(step, 2)
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name] += step_seconds(step, 1)
    return {name: Timed(statistics.median(found), spread_of(found)) for name, found in seconds.items()}


def compare(size: Size, training: bool, rounds: int) -> dict[str, Any]:
    """Branches of a pair: measured, and predicted from what each takes alone and what its output takes to travel."""
    found = timed(
        {
            "first": alone(size, "first", training),
            "second": alone(size, "second", training),
            "both": together(size, training),
            "branches": planned(size, branch_plan(size), training),
            "transfers": exchange(size, training),
        },
        rounds,
    )
    first, second = found["first"].seconds, found["second"].seconds
    predicted = max(first, second) + found["transfers"].seconds
    return {
        "size": size.name,
        "mode": "training" if training else "inference",
        "measured": {name: asdict(one) for name, one in found.items()},
        "predicted": predicted,
        "measured_over_predicted": found["branches"].seconds / predicted,
        "speed_up": (first + second) / found["branches"].seconds,
        "bound": (first + second) / max(first, second),
    }


def choose(size: Size, rounds: int, folder: Path) -> dict[str, Any]:
    """What the planner picks from a measured profile, and all ways measured.

    The ways: one process, the best plan of both without branches, branches. The pick is the one of the least predicted
    time; it is right where that takes the least.
    """
    model, batch = make(size)
    profile = measure_profile(
        model, batch, max_samples=size.samples, name="pair", folder=folder / size.name, rule=RULE
    )  # fmt: skip
    ordinary = plan(profile, gpus=2, batch=size.samples, fix=("schedule=1f1b", "pp=1"))
    apart = evaluate(replace(branch_plan(size), model=profile.graph.name), profile)
    plans = {
        "one process": find_plan(profile, devices=1, global_batch=size.samples, budget=MEMORY),
        "ordinary": ordinary,
        "branches": apart,
    }
    predicted = {name: one.prediction.step_seconds for name, one in plans.items() if one.prediction is not None}
    found = timed(
        {
            "one process": together(size, True),
            "ordinary": planned(size, ordinary, True),
            "branches": planned(size, apart, True),
        },
        rounds,
    )
    quickest, choice = min(found, key=lambda name: found[name].seconds), min(predicted, key=predicted.__getitem__)
    return {
        "size": size.name,
        "measured": {name: asdict(one) for name, one in found.items()},
        "predicted": predicted,
        "ordinary": summary(ordinary),
        "found": summary(plan(profile, gpus=2, batch=size.samples)),
        "choice": choice,
        "quickest": quickest,
        "right": choice == quickest,
    }


def told(one: dict[str, Any], name: str) -> str:
    """A measured figure with its spread."""
    figure = one["measured"][name]
    return f"{figure['seconds'] * 1e3:.2f} ms ±{figure['spread']:.0%}"


def compared_table(rows: list[dict[str, Any]]) -> Table:
    """What ``compare`` found."""
    columns = ("costs", "mode", "first", "second", "both", "branches", "predicted", "measured/predicted", "speed-up")
    table = Table(*columns, "of at most", "share", title="Two networks, each on a process of its own (median, IQR)")
    for one in rows:
        share = one["speed_up"] / one["bound"]
        figures = [told(one, name) for name in ("first", "second", "both", "branches")]
        table.add_row(
            one["size"], one["mode"], *figures, f"{one['predicted'] * 1e3:.2f} ms",
            f"{one['measured_over_predicted']:.3f}", f"{one['speed_up']:.2f}", f"{one['bound']:.2f}", f"{share:.2f}",
        )  # fmt: skip
    return table


def chosen_table(rows: list[dict[str, Any]]) -> Table:
    """What ``choose`` found."""
    columns = ("size", "one process", "best without branches", "its step", "branches", "planner", "quickest", "right")
    table = Table(*columns, title="Worth devices of their own? Training: measured (predicted)")
    for one in rows:
        ways = [f"{told(one, name)} ({one['predicted'][name] * 1e3:.2f})" for name in one["measured"]]
        right = "yes" if one["right"] else "NO"
        table.add_row(one["size"], ways[0], one["ordinary"], *ways[1:], one["choice"], one["quickest"], right)
    return table


def main() -> None:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="repetitions of each step")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--sizes", nargs="*", default=[], help="names of rows; all if not given")
    parser.add_argument("--only", choices=("ratios", "choices"), help="one of the two tables")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    join(torch.device("cpu"))
    modes = (True, False) if arguments.only != "choices" else ()
    wanted = [size for size in (*SIZES, *CHOICES) if size.name in arguments.sizes or not arguments.sizes]
    compared = [compare(size, training, arguments.rounds) for training in modes for size in SIZES if size in wanted]
    chosen = []
    if arguments.only != "ratios":
        box = [tempfile.mkdtemp(prefix="galvatron-branches-") if rank() == 0 else ""]
        dist.broadcast_object_list(box)
        chosen = [choose(size, arguments.rounds, Path(box[0])) for size in CHOICES if size in wanted]
    if rank() == 0:
        console = Console(highlight=False, width=200)
        for table in ([compared_table(compared)] if compared else []) + ([chosen_table(chosen)] if chosen else []):
            console.print(table)
        if arguments.json is not None:
            figures = {"rounds": arguments.rounds, "compared": compared, "chosen": chosen}
            write_text(arguments.json, json.dumps(figures, indent=1) + "\n")
    leave()


if __name__ == "__main__":
    main()
