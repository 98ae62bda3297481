"""What cyclic data parallelism costs and saves, measured; run by ``scripts/cyclic_study``."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import torch
from cyclic_study_memory import measure_memory
from cyclic_study_messages import measure_messages
from cyclic_study_plot import figure
from cyclic_study_tables import Study, learned_table, memory_table, messages_table
from cyclic_study_tasks import Task, tasks
from cyclic_study_train import RULES, begin, train
from docs_scores import replaced
from rich.console import Console
from rich.markdown import Markdown

from galvatron_lite.files import read_value, write_text, write_value

ROOT = Path(__file__).resolve().parent.parent
PAGE, DATA, FIGURE = ROOT / "docs" / "cyclic.md", ROOT / "docs" / "data" / "cyclic.json", ROOT / "docs" / "cyclic.svg"
SEEDS, QUICK_STEPS = 3, 6


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="6 steps, one seed, one learning rate: does it run?")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"trainings of each kind; default: {SEEDS}")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--write", action="store_true", help="write docs/data/cyclic.json, the figure and the tables")
    parser.add_argument("--draw", action="store_true", help="draw and tabulate docs/data/cyclic.json; train nothing")
    return parser.parse_args(arguments)


def trainings(chosen: argparse.Namespace) -> Iterator[tuple[Task, str, float, int, int]]:
    """What is trained: task, rule, learning rate, seed, steps."""
    for task in tasks():
        for rate in task.rates[:1] if chosen.quick else task.rates:
            for seed in range(1 if chosen.quick else chosen.seeds):
                for rule in RULES:
                    yield task, rule, rate, seed, QUICK_STEPS if chosen.quick else task.steps


def study(chosen: argparse.Namespace, console: Console) -> Study:
    """Train and measure everything."""
    torch.set_num_threads(1)
    names = [task.name for task in tasks()]
    messages = measure_messages(names)
    begin()
    runs = []
    for task, rule, rate, seed, steps in trainings(chosen):
        runs.append(train(task, rule, rate, seed, steps))
        said = f"{task.figure} {runs[-1].figure:.3f}, {runs[-1].cpu:.1f} s"
        console.print(f"{task.name} {rule}, rate {rate:g}, seed {seed}: {said}", soft_wrap=True)
    memory = [measure_memory(task) for task in tasks()]
    command = " ".join(["scripts/cyclic_study", *sys.argv[1:]])
    return Study(date.today().isoformat(), machine(), command, runs, memory, messages)


def machine() -> dict[str, str]:
    """Where this runs."""
    cpu = next((line for line in _cpu_lines() if line.startswith("model name")), "").partition(":")[2].strip()
    return {
        "cpu": cpu or platform.machine(),
        "threads": "1",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


TABLES = {"learned": learned_table, "memory": memory_table, "messages": messages_table}
"""Tables by their markers in docs/cyclic.md."""


def draw(found: Study) -> None:
    """The figure and the tables of the page."""
    write_text(FIGURE, figure(found))
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        text = replaced(text, name, table(found))
    write_text(PAGE, text)


def main() -> None:
    """Measure, write, print."""
    chosen, errors = options(), Console(stderr=True, highlight=False)
    found = read_value(Study, DATA) if chosen.draw else study(chosen, errors)
    for path in (chosen.output, DATA if chosen.write else None):
        if path is not None:
            write_value(path, found)
    if chosen.write or chosen.draw:
        draw(found)
    console = Console(highlight=False, width=110)
    for table in TABLES.values():
        console.print(Markdown(table(found)))


if __name__ == "__main__":
    main()
