"""The timeline of a step as data: packed for the script of the report, as Trace Event JSON, and as curves of memory.

Packed: each pass is stored as its kind, the difference of its micro-batch to that of the last pass of this kind, the
gap before it, and the indices of two levels of memory; its duration is stored once a stage. These numbers repeat with
the rounds of a pipeline, so deflate (RFC 1951, which browsers read) compresses hundreds of thousands of them well.

Trace: "Trace Event Format" (Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), for
Perfetto. A group of devices is a process with a thread for compute, one for communication, and a counter of its memory.
Timestamps are microseconds. Events are written one at a time, as a step may have millions.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from galvatron_lite.cost.timeline import GroupTimeline, Timeline
from galvatron_lite.files import write_text
from galvatron_lite.parallelism.pipeline.schedule import Pass
from galvatron_lite.plans.schema import MemoryBreakdown
from galvatron_lite.svg import Frame, area, byte_marks, byte_words, element, figure, marks, second_words
from galvatron_lite.units import format_bytes

TICKS = 1 << 30  # of a step; the unit of gaps and passes
KINDS = (Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHT)


def packed(step: Timeline, budgets: Sequence[int], devices: Sequence[str]) -> dict[str, Any]:
    """Pack a timeline for the script of the report.

    Args:
        step: the timeline.
        budgets: of each group of devices, in bytes; 0 if not known.
        devices: of each group, in words.
    """
    tick = step.span / TICKS
    levels: dict[MemoryBreakdown, int] = {}
    planes = b"".join(_planes(group, tick, levels) for group in step.groups)
    return {
        "tick": tick,
        "span": step.span,
        "seconds": step.seconds,
        "host": step.host,
        "groups": [_group_data(*group, tick) for group in zip(step.groups, budgets, devices, strict=True)],
        "levels": [astuple(level) for level in levels],
        "data": b64encode(zlib.compress(planes, 9)).decode("ascii"),
    }  # fmt: skip


def _group_data(group: GroupTimeline, budget: int, devices: str, tick: float) -> dict[str, Any]:
    """What is stored once a group; ``times``: ticks of compute and of sending, by stage and kind of pass."""
    times = {stage: [[0, 0] for _ in KINDS] for stage in group.stages}
    for pass_ in group.passes:
        times[pass_.stage][KINDS.index(pass_.what)] = [
            round((pass_.end - pass_.start) / tick),
            round((pass_.free - pass_.end) / tick),
        ]
    return {
        "stages": list(group.stages),
        "times": [times[stage] for stage in group.stages],
        "devices": devices,
        "budget": budget,
        "count": len(group.passes),
        "resting": astuple(group.resting),
        "closing": [[item.name, item.start, item.end, astuple(item.memory)] for item in group.closing],
    }


def _planes(group: GroupTimeline, tick: float, levels: dict[MemoryBreakdown, int]) -> bytes:
    """One array after another: kind + 3 x chunk, difference of the micro-batch, gap in ticks, two memory levels."""
    chunks = {stage: chunk for chunk, stage in enumerate(group.stages)}
    kinds = [KINDS.index(pass_.what) + len(KINDS) * chunks[pass_.stage] for pass_ in group.passes]
    steps, gaps, last, free = list[int](), list[int](), dict[int, int](), 0.0
    for pass_, kind in zip(group.passes, kinds, strict=True):
        steps.append(pass_.microbatch - last.get(kind, 0))
        gaps.append(round((pass_.start - free) / tick))
        last[kind], free = pass_.microbatch, pass_.free
    during, after = (
        [levels.setdefault(memory, len(levels)) for memory in memories] for memories in (group.during, group.after)
    )
    planes = ((kinds, "<u1"), (steps, "<i2"), (gaps, "<i4"), (during, "<u2"), (after, "<u2"))
    return b"".join(np.array(values, dtype=kind).tobytes() for values, kind in planes)


COMPUTE, COMMUNICATION = 1, 2  # thread numbers
_MICRO = 1e6

Event = dict[str, Any]


def write_trace(path: Path, steps: Sequence[tuple[str, Timeline]]) -> None:
    """Write the timelines of named plans as Trace Event JSON, atomically."""

    def lines() -> Iterator[str]:
        yield '{"displayTimeUnit":"ms","traceEvents":[\n'
        for number, event in enumerate(trace_events(steps)):
            yield (",\n" if number else "") + json.dumps(event, separators=(",", ":"))
        yield "\n]}\n"

    write_text(path, lines())


def trace_events(steps: Sequence[tuple[str, Timeline]]) -> Iterator[Event]:
    """Yield the events of named plans; process numbers count on from plan to plan, from 1."""
    first = 1
    for name, step in steps:
        label = f"{name}, " if len(steps) > 1 else ""
        for group in step.groups:
            yield from _names(first + group.group, label, group)
            yield from _passes(first + group.group, group)
            yield from _memory(first + group.group, group)
        yield from _sends(first, step)
        first += len(step.groups)


def _names(process: int, label: str, group: GroupTimeline) -> Iterator[Event]:
    title = f"{label}{group_name(group)}: ranks {group.ranks.start}-{group.ranks.stop - 1}"
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": title}}
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
    for thread, name in ((COMPUTE, "compute"), (COMMUNICATION, "communication")):
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}


def _passes(process: int, group: GroupTimeline) -> Iterator[Event]:
    for pass_ in group.passes:
        name = f"{pass_.what.value} {pass_.microbatch}"
        args = {"stage": pass_.stage, "microbatch": pass_.microbatch}
        yield _complete(process, COMPUTE, name, pass_.what.value, pass_.start, pass_.end, args)
    for closing in group.closing:
        thread = COMMUNICATION if closing.name == "communication" else COMPUTE
        name = "gradients" if closing.name == "communication" else closing.name
        yield _complete(process, thread, name, "step", closing.start, closing.end, {})


def _sends(first: int, step: Timeline) -> Iterator[Event]:
    """Sends, on the sender's communication thread, and an arrow from each to the pass that needs it."""
    for number, send in enumerate(step.sends(), start=1):
        args = {"microbatch": send.microbatch, "from stage": send.stage, "to stage": send.target}
        process, target = first + send.source_group, first + send.target_group
        gradient = "" if send.what.value == "forward" else "gradient "
        name = f"send {gradient}{send.microbatch} to stage {send.target}"
        yield _complete(process, COMMUNICATION, name, "send", send.start, send.end, args)
        flow = {"cat": "send", "name": "send", "id": first * 10**7 + number}
        yield {"ph": "s", "pid": process, "tid": COMMUNICATION, "ts": send.start * _MICRO, **flow}
        yield {"ph": "f", "bp": "e", "pid": target, "tid": COMPUTE, "ts": send.end * _MICRO, **flow}


def _memory(process: int, group: GroupTimeline) -> Iterator[Event]:
    """A counter of bytes on one device: the peak of each pass, and what is left after it."""
    for seconds, memory in _levels(group):
        event = {"ph": "C", "pid": process, "name": "memory of a device (bytes)", "ts": seconds * _MICRO}
        yield event | {"args": asdict(memory)}


def _complete(process: int, thread: int, name: str, category: str, start: float, end: float, args: Event) -> Event:
    return {
        "ph": "X", "pid": process, "tid": thread, "name": name, "cat": category,
        "ts": start * _MICRO, "dur": (end - start) * _MICRO, "args": args,
    }  # fmt: skip


WIDTH, HEIGHT, MARGINS = 480.0, 190.0, (62.0, 12.0, 16.0, 22.0)
_COLUMNS = 200
_MOST_GROUPS = 8  # that are all drawn
ORDER = ("context", "parameters", "optimizer", "gradients", "activations", "communication", "temporary")
"""Parts of memory from the bottom up; what changes least is at the bottom."""


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """The picture of a group's memory over a step."""

    title: str
    picture: Markup


def drawn_groups(step: Timeline) -> list[GroupTimeline]:
    """The groups that are drawn: all, or of many the first, the fullest, the middle one and the last."""
    groups = step.groups
    if len(groups) <= _MOST_GROUPS:
        return list(groups)
    fullest = max(range(len(groups)), key=lambda number: groups[number].peak.memory.total)
    return [groups[number] for number in sorted({0, fullest, len(groups) // 2, len(groups) - 1})]


def memory_curve(group: GroupTimeline, step: Timeline, budget: int) -> MemoryCurve:
    """Draw the memory of one group over a step; ``budget``: bytes a device, 0 if not known."""
    frame = Frame(WIDTH, HEIGHT, MARGINS, step.span, 1.06 * max(group.peak.memory.total, budget))
    steps = _memory_steps(group, step.span)
    lines = [[frame.at(seconds, size) for seconds, size in line] for line in _stacked(steps)]
    below = [[frame.at(0.0, 0.0), frame.at(step.span, 0.0)], *lines[:-1]]
    drawn = [
        element("path", element("title", f"{name}"), d=area(line, under), class_=f"memory-{name}")
        for name, line, under in zip(ORDER, lines, below, strict=True)
        if any(getattr(memory, name) for _, memory in steps)
    ]
    peak = f"{format_bytes(group.peak.memory.total)} at the peak{f', of {format_bytes(budget)}' if budget else ''}"
    label = f"Memory of a device of {group_name(group)} over a step: {peak}."
    sizes, seconds = byte_marks(frame.y_end), marks(step.span, 4)
    axes = [*frame.horizontal(sizes, byte_words(sizes)), *frame.below(seconds, second_words(seconds))]
    limit = frame.limit(budget, "budget") if budget else []
    return MemoryCurve(group_name(group), figure(WIDTH, HEIGHT, label, *axes, *drawn, *limit))


def group_name(group: GroupTimeline) -> str:
    """A group of devices, named by the stages that it runs."""
    return f"stage{'s' * (len(group.stages) > 1)} {', '.join(map(str, group.stages))}"


Level = tuple[float, MemoryBreakdown]  # the second from which on so much memory is held


def _levels(group: GroupTimeline) -> list[Level]:
    levels = [(0.0, group.resting)]
    for pass_, during, after in zip(group.passes, group.during, group.after, strict=True):
        levels += [(pass_.start, during), (pass_.end, after)]
    levels += [(closing.start, closing.memory) for closing in group.closing]
    return levels


def _memory_steps(group: GroupTimeline, span: float) -> list[Level]:
    """The levels without repetitions, up to the end; of many only the highest in each column of the picture."""
    levels = _levels(group)
    if len(levels) > 2 * _COLUMNS:
        levels = _highest(levels, span)
    kept = [levels[0]]
    kept += [level for before, level in pairwise(levels) if level[1] != before[1]]
    return [*kept, (span, levels[-1][1])]


def _highest(levels: list[Level], span: float) -> list[Level]:
    width = span / _COLUMNS
    columns: dict[int, MemoryBreakdown] = {}
    for (start, memory), (end, _) in zip(levels, [*levels[1:], (span, levels[-1][1])], strict=True):
        last = max(int(start / width), int(end / width - 1e-9))
        for place in range(int(start / width), min(last, _COLUMNS - 1) + 1):
            highest = columns.get(place)
            columns[place] = memory if highest is None or memory.total > highest.total else highest
    return [(place * width, columns[place]) for place in sorted(columns)]


def _stacked(steps: list[Level]) -> list[list[tuple[float, int]]]:
    """The corners of the upper line of each part, from the bottom up."""
    lines = []
    for count in range(1, len(ORDER) + 1):
        line: list[tuple[float, int]] = []
        for seconds, memory in steps:
            size = sum(getattr(memory, name) for name in ORDER[:count])
            if line and line[-1][1] != size:
                line.append((seconds, line[-1][1]))
            if not line or line[-1][1] != size:
                line.append((seconds, size))
        lines.append([*line, (steps[-1][0], line[-1][1])])
    return lines
