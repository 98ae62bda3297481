"""A step's timeline as data: packed for the page's script, and as Trace Event JSON for Perfetto.

Packed, each pass is a kind, a step of the micro-batch from the last pass of that kind, the gap before it, and the
places of two levels of memory; how long it takes is stored once for each stage. These numbers repeat with the rounds of
a pipeline, so that deflate (RFC 1951; browsers have it) makes hundreds of thousands of them small.

Trace: "Trace Event Format" (Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). Groups of
devices are processes; each has a thread of compute and one of communication, and a counter of its memory. Timestamps
are microseconds. Events are written one by one, as a step may have millions.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import numpy as np

from galvatron_lite.cost.timeline import GroupTimeline, TimedPass, Timeline
from galvatron_lite.files import write_text
from galvatron_lite.parallelism.pipeline.schedule import Pass
from galvatron_lite.plans.schema import MemoryBreakdown

TICKS = 1 << 30  # parts of a step that gaps and passes are counted in
KINDS = (Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHT)


def packed(step: Timeline, budgets: Sequence[int], devices: Sequence[str]) -> dict[str, Any]:
    """A timeline for the page's script."""
    tick = step.span / TICKS
    levels: dict[MemoryBreakdown, int] = {}
    planes = b"".join(_planes(group, tick, levels) for group in step.groups)

    def about(group: GroupTimeline, budget: int, words: str) -> dict[str, Any]:
        return _about(group, budget, words, tick)

    return {
        "tick": tick,
        "span": step.span,
        "seconds": step.seconds,
        "host": step.host,
        "groups": list(map(about, step.groups, budgets, devices)),
        "levels": [astuple(level) for level in levels],
        "data": b64encode(zlib.compress(planes, 9)).decode("ascii"),
    }  # fmt: skip


def _about(group: GroupTimeline, budget: int, devices: str, tick: float) -> dict[str, Any]:
    """What is said once of a group; seconds of the passes of a stage in ticks: compute and what a send occupies."""
    times = {stage: [[0, 0] for _ in KINDS] for stage in group.stages}
    for one in group.passes:
        times[one.stage][KINDS.index(one.what)] = [
            round((one.end - one.start) / tick),
            round((one.free - one.end) / tick),
        ]
    return {
        "stages": list(group.stages),
        "times": [times[stage] for stage in group.stages],
        "devices": devices,
        "budget": budget,
        "count": len(group.passes),
        "resting": astuple(group.resting),
        "closing": [[one.name, one.start, one.end, astuple(one.memory)] for one in group.closing],
    }


def _planes(group: GroupTimeline, tick: float, levels: dict[MemoryBreakdown, int]) -> bytes:
    """A group's planes, one after another: kind + 3 x chunk, step of the micro-batch, gap in ticks, memory levels."""
    chunks = {stage: chunk for chunk, stage in enumerate(group.stages)}
    kinds = [KINDS.index(one.what) + len(KINDS) * chunks[one.stage] for one in group.passes]
    steps = list(_steps(group.passes, kinds))
    gaps = [round((one.start - before) / tick) for one, before in zip(group.passes, _frees(group), strict=True)]
    during, after = (
        [levels.setdefault(memory, len(levels)) for memory in memories] for memories in (group.during, group.after)
    )
    planes = ((kinds, "<u1"), (steps, "<i2"), (gaps, "<i4"), (during, "<u2"), (after, "<u2"))
    return b"".join(np.array(values, dtype=kind).tobytes() for values, kind in planes)


def _frees(group: GroupTimeline) -> Iterator[float]:
    yield 0.0
    yield from (one.free for one in group.passes[:-1])


def _steps(passes: Sequence[TimedPass], kinds: Sequence[int]) -> Iterator[int]:
    """The micro-batch of each pass less that of the last pass of its kind and chunk; of the first, as it is."""
    last: dict[int, int] = {}
    for one, kind in zip(passes, kinds, strict=True):
        yield one.microbatch - last.get(kind, 0)
        last[kind] = one.microbatch


COMPUTE, COMMUNICATION = 1, 2  # thread numbers
_MICRO = 1e6

Event = dict[str, Any]


def write_trace(path: Path, steps: Sequence[tuple[str, Timeline]]) -> None:
    """Write the timelines of some plans, whole or not at all."""
    write_text(path, _lines(steps))


def _lines(steps: Sequence[tuple[str, Timeline]]) -> Iterator[str]:
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    for number, event in enumerate(trace_events(steps)):
        yield (",\n" if number else "") + json.dumps(event, separators=(",", ":"))
    yield "\n]}\n"


def trace_events(steps: Sequence[tuple[str, Timeline]]) -> Iterator[Event]:
    """The events of some plans; processes are numbered through all of them, from 1."""
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
    stages = f"stage{'s' * (len(group.stages) > 1)} {', '.join(map(str, group.stages))}"
    named = {"process_name": f"{label}{stages}: ranks {group.ranks.start}-{group.ranks.stop - 1}"}
    for what, name in named.items():
        yield {"ph": "M", "pid": process, "tid": 0, "name": what, "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
    for thread, name in ((COMPUTE, "compute"), (COMMUNICATION, "communication")):
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}


def _passes(process: int, group: GroupTimeline) -> Iterator[Event]:
    for one in group.passes:
        name = f"{one.what.value} {one.microbatch}"
        args = {"stage": one.stage, "microbatch": one.microbatch}
        yield _complete(process, COMPUTE, name, one.what.value, one.start, one.end, args)
    for closing in group.closing:
        thread = COMMUNICATION if closing.name == "communication" else COMPUTE
        name = "gradients" if closing.name == "communication" else closing.name
        yield _complete(process, thread, name, "step", closing.start, closing.end, {})


def _sends(first: int, step: Timeline) -> Iterator[Event]:
    """What is sent, on the sender's thread of communication, and an arrow to the pass that needs it."""
    for number, one in enumerate(step.sends(), start=1):
        args = {"microbatch": one.microbatch, "from stage": one.stage, "to stage": one.target}
        process, target = first + one.source_group, first + one.target_group
        gradient = "" if one.what.value == "forward" else "gradient "
        name = f"send {gradient}{one.microbatch} to stage {one.target}"
        yield _complete(process, COMMUNICATION, name, "send", one.start, one.end, args)
        flow = {"cat": "send", "name": "send", "id": first * 10**7 + number}
        yield {"ph": "s", "pid": process, "tid": COMMUNICATION, "ts": one.start * _MICRO, **flow}
        yield {"ph": "f", "bp": "e", "pid": target, "tid": COMPUTE, "ts": one.end * _MICRO, **flow}


def _memory(process: int, group: GroupTimeline) -> Iterator[Event]:
    """A counter of bytes on one device: where each pass is at its worst, and what is left behind it."""
    yield _counter(process, 0.0, group.resting)
    for one, during, after in zip(group.passes, group.during, group.after, strict=True):
        yield _counter(process, one.start, during)
        yield _counter(process, one.end, after)
    for closing in group.closing:
        yield _counter(process, closing.start, closing.memory)


def _counter(process: int, seconds: float, memory: MemoryBreakdown) -> Event:
    sizes = asdict(memory)
    return {"ph": "C", "pid": process, "name": "memory of a device (bytes)", "ts": seconds * _MICRO, "args": sizes}


def _complete(
    process: int, thread: int, name: str, category: str, start: float, end: float, args: Event
) -> Event:  # fmt: skip
    return {
        "ph": "X", "pid": process, "tid": thread, "name": name, "cat": category,
        "ts": start * _MICRO, "dur": (end - start) * _MICRO, "args": args,
    }  # fmt: skip
