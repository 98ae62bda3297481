"""CPU seconds and memory of searches; run by ``scripts/planning_time``.

Every search runs in a child of a warm process (all modules loaded, a first search done), with its profile ready and
nothing else remembered. Memory is what the child needed beyond what it began with.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from planning_time_plot import figure
from planning_time_questions import Question, growing, narrowing, profile_of, targets
from rich.console import Console
from rich.table import Table

from galvatron_lite.errors import InfeasibleError
from galvatron_lite.plans.schema import Proof
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.space import Fixed
from galvatron_lite.units import format_bytes

EFFORT = 60_000_000
SHARE = 0.95  # of a device's memory that is the budget
TOLERANCE, MARGIN = 0.01, 0.053  # of ``galvatron plan`` for estimated profiles


@dataclass(frozen=True, slots=True)
class Taken:
    """What a search took."""

    cpu: float  # seconds
    memory: int  # bytes beyond what the process began with
    step: float | None  # predicted seconds of the plan; None: nothing fits
    proven: bool  # of the plan
    gap: float


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    parser.add_argument("--only", default="", help="series whose name holds this text")
    parser.add_argument("--most", type=float, default=math.inf, help="largest size of a series")
    parser.add_argument("--effort", type=float, default=EFFORT, help="labels after which a search ends; default: 6e7")
    parser.add_argument("--plot", type=Path, help="where the figure goes, e.g. docs/planning-time.svg")
    return parser.parse_args(arguments)


def questions(chosen: argparse.Namespace) -> list[Question]:
    """All that is asked for."""
    every = [
        *(one for backend in ("galvatron", "any") for one in targets(backend)),
        *(one for backend in ("galvatron", "any") for one in growing(backend, chosen.most)),
        *narrowing(),
    ]
    return [one for one in every if chosen.only in one.series and one.size <= chosen.most]


def take(question: Question, effort: int) -> Taken:
    """One search in a child process, which inherits the profile."""
    profile_of(question.model, question.layers, question.cluster, question.gpus)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    gc.collect()
    child = context.Process(target=_search, args=(question, effort, sender))
    child.start()
    taken: Taken = receiver.recv()
    child.join()
    return taken


def _search(question: Question, effort: int, sender: Connection) -> None:
    gc.freeze()
    profile = profile_of(question.model, question.layers, question.cluster, question.gpus)
    budget = question.budget or int(profile.cluster.device.memory * SHARE)
    before, started = _peak(), time.process_time()
    try:
        plan = find_plan(
            profile, devices=question.gpus, global_batch=question.batch, budget=budget, backend=question.backend,
            fixed=Fixed(forbidden=question.forbidden), effort=effort, tolerance=TOLERANCE, margin=MARGIN,
        )  # fmt: skip
    except InfeasibleError:
        sender.send(Taken(time.process_time() - started, _peak() - before, None, proven=False, gap=1.0))
        return
    cpu = time.process_time() - started
    assert plan.provenance is not None
    assert plan.prediction is not None
    proven = plan.provenance.proof is Proof.PROVEN
    sender.send(Taken(cpu, _peak() - before, plan.prediction.step_seconds, proven, plan.provenance.gap))


def _peak() -> int:
    """Bytes that this process has held at most; the kernel counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The b of seconds = a x size^b that fits best in logarithms (least squares)."""
    logs = [(math.log(size), math.log(seconds)) for size, seconds in points]
    across, up = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    spread = sum((x - across) ** 2 for x, _ in logs)
    return sum((x - across) * (y - up) for x, y in logs) / spread if spread else 0.0


def warm() -> None:
    """Loads what a search loads; its children inherit it."""
    for backend in ("galvatron", "any"):
        profile = profile_of("llama2-7b", 8, "a100-80gb", 8)
        find_plan(profile, devices=8, global_batch=8, budget=profile.cluster.device.memory, backend=backend)


Rows = Sequence[tuple[Question, Taken]]


def show(rows: Rows) -> Table:
    """A line a search."""
    table = Table(
        "series", "model", "layers", "GPUs", "batch", "left out", "CPU s", "target", "memory", "step s", "proof",
        box=None, pad_edge=False,
    )  # fmt: skip
    for asked, taken in rows:
        proof = "nothing fits" if taken.step is None else "proven" if taken.proven else f"gap {taken.gap:.1%}"
        table.add_row(
            asked.series, asked.model, str(asked.layers or ""), str(asked.gpus), str(asked.batch),
            " ".join(asked.forbidden), f"{taken.cpu:.2f}", f"{asked.target or ''}", format_bytes(taken.memory),
            f"{taken.step or 0:.4g}", proof,
        )  # fmt: skip
    return table


def points_of(rows: Rows, growth: str) -> dict[str, list[tuple[float, float]]]:
    """Sizes and seconds of the series whose name holds a text, plans found."""
    found: dict[str, list[tuple[float, float]]] = {}
    for asked, taken in rows:
        if growth in asked.series and taken.step is not None:
            found.setdefault(asked.series, []).append((asked.size, taken.cpu))
    return found


def said(rows: Rows) -> Iterator[str]:
    """Targets kept, and how time grows."""
    set_times = [(asked, taken) for asked, taken in rows if asked.target is not None]
    for asked, taken in set_times:
        kept = "kept" if taken.cpu <= (asked.target or 0.0) and taken.proven else "MISSED"
        yield f"{kept}: {asked.model} on {asked.gpus} GPUs, {asked.backend}: {taken.cpu:.2f} s of {asked.target} s"
    for growth in ("layers", "GPUs"):
        for name, points in points_of(rows, growth).items():
            if len(points) > 1:
                yield f"{name}: seconds grow as size^{exponent(points):.2f} ({points[0][0]:g} to {points[-1][0]:g})"


def main() -> None:
    """Ask, print, draw."""
    chosen, errors = options(), Console(stderr=True, highlight=False)
    asked = questions(chosen)
    if not asked:
        raise SystemExit("planning_time: no such series. Give another --only or --most.")
    rows: list[tuple[Question, Taken]] = []
    warm()
    for number, one in enumerate(asked, 1):
        rows.append((one, take(one, int(chosen.effort))))
        errors.print(f"{number}/{len(asked)} {one.series} {one.size:g}: {rows[-1][1].cpu:.2f} s", soft_wrap=True)
    if chosen.plot is not None:
        chosen.plot.write_text(figure(points_of(rows, "layers"), points_of(rows, "GPUs")), encoding="utf-8")
    if chosen.json:
        data = [{**asdict(one), **asdict(taken)} for one, taken in rows]
        print(json.dumps({"searches": data, "summary": list(said(rows))}, indent=1))
        return
    console = Console(highlight=False, width=160)
    console.print(show(rows))
    for line in said(rows):
        console.print(line)


if __name__ == "__main__":
    main()
