"""The tables of docs/cyclic.md, in Markdown, from what ``scripts/cyclic_study`` found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from cyclic_study_memory import Memory
from cyclic_study_messages import Messages
from cyclic_study_tasks import MICRO_BATCHES, Task, tasks
from cyclic_study_train import PLAIN, POINT, RULES, Run

from galvatron_lite.units import format_bytes

LAST = 3  # points of a curve whose mean is the loss at its end


@dataclass(frozen=True, slots=True)
class Study:
    """Everything that was measured."""

    date: str  # day
    machine: dict[str, str]  # where
    command: str  # that made it
    runs: list[Run]  # trainings
    memory: list[Memory]  # by task
    messages: list[Messages]  # by task


def learned_table(found: Study) -> str:
    """A row a task, learning rate and rule: loss and figure, mean over seeds with the least and the greatest."""
    lines = [
        "| model, optimizer | learning rate | rule | training loss at the end | result | result beside dp's, by seed |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for task in tasks():
        lines += [_learned_row(found, task, rate, rule) for rate in task.rates for rule in RULES]
    told = "; ".join(f"{task.name}: {task.figure}, {_steps(found.runs, task.name)} steps" for task in tasks())
    seeds = len({one.seed for one in found.runs})
    said = f"Means over {seeds} seeds, with the least and the greatest. Result: {told}. {where(found)}"
    return "\n".join([*[line for line in lines if line], "", said])


def _learned_row(found: Study, task: Task, rate: float, rule: str) -> str:
    """Nothing where there was no such training."""
    runs = runs_of(found.runs, task.name, rule, rate)
    if not runs:
        return ""
    digits, usual = 1 if "%" in task.figure else 2, runs_of(found.runs, task.name, PLAIN, rate)
    beside = [one.figure - other.figure for one in runs for other in usual if one.seed == other.seed]
    cells = [
        f"{task.name}, {task.words}", f"{rate:g}", rule, spread([end(one) for one in runs], 2),
        spread([one.figure for one in runs], digits), "" if rule == PLAIN else spread(beside, digits, "+"),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def runs_of(runs: Sequence[Run], task: str, rule: str, rate: float) -> list[Run]:
    """Trainings that differ in their seeds alone."""
    return [one for one in runs if (one.task, one.rule, one.rate) == (task, rule, rate)]


def end(run: Run) -> float:
    """Training loss of the last steps."""
    return fmean(run.curve[-LAST:])


def spread(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Mean, and the range where there are several; ``+``: with their signs."""
    mean, least, most = (f"{value:{sign}.{digits}f}" for value in (fmean(values), min(values), max(values)))
    return f"{mean} ({least} to {most})" if len(values) > 1 else mean


def where(found: Study) -> str:
    machine = found.machine
    cpu = sum(one.cpu for one in found.runs)
    beside = f" ({machine['beside']})" if "beside" in machine else ""
    return (
        f"Losses are means over the last {LAST * POINT} steps. Measured {found.date} with `{found.command}` on one "
        f"core of {machine['cpu']}, torch {machine['torch']}, the library of Python {machine['python']}; training took "
        f"{cpu:.0f} CPU seconds{beside}."
    )


def _steps(runs: Sequence[Run], task: str) -> str:
    return ", ".join(sorted({str(one.steps) for one in runs if one.task == task}))


def memory_table(found: Study) -> str:
    """A row a task: the most that autograd keeps, and the allocator's peak."""
    lines = [
        "| model | kept by autograd: all at once | in the cycle | backward first | allocator's peak: all at once "
        "| in the cycle | backward first |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found.memory:
        kept = [max(one.together), max(one.cyclic), max(one.early)]
        peaks = [one.peaks[name] for name in ("together", "cyclic", "early")]
        cells = (_beside(value, row[0]) for row in (kept, peaks) for value in row)
        lines.append(f"| {one.task}, {one.samples} samples | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _beside(value: int, whole: int) -> str:
    share = "" if value == whole else f" ({100 * value / whole:.0f} %)"
    return format_bytes(value) + share


def messages_table(found: Study) -> str:
    """A row a task: bursts and sums of what workers send."""
    lines = [
        "| model | gradient, all stages | of the largest stage | most that a worker sends in a time step, counted "
        "| by the programme | sent in a training step by a worker, counted: mean, most | ring all-reduce, calculated "
        "| collectives, counted |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found.messages:
        whole, sums = sum(one.stages), [sum(sent) for sent in one.counted]
        burst, told = (max(max(sent) for sent in every) for every in (one.counted, one.programme))
        ring = 2 * (MICRO_BATCHES - 1) * whole // MICRO_BATCHES
        cells = [
            format_bytes(whole), format_bytes(max(one.stages)), format_bytes(burst), format_bytes(told),
            f"{format_bytes(int(fmean(sums)))}, {format_bytes(max(sums))}", format_bytes(ring), str(one.collectives),
        ]  # fmt: skip
        lines.append(f"| {one.task} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
