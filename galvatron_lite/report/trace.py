"""A step's timeline as Trace Event JSON, which ui.perfetto.dev and chrome://tracing open. No torch here.

The format: "Trace Event Format" (Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
Groups of devices are processes; each has a thread of compute and one of communication, and a counter of its memory.
Timestamps are microseconds. Events are written one by one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import mkstemp
from typing import Any

from galvatron_lite.cost.timeline import GroupTimeline, Timeline
from galvatron_lite.plans.schema import MemoryBreakdown

COMPUTE, COMMUNICATION = 1, 2
"""Thread numbers."""
_MICRO = 1e6

Event = dict[str, Any]


def write_trace(path: Path, steps: Sequence[tuple[str, Timeline]]) -> None:
    """Write the timelines of some plans, whole or not at all.

    Args:
        path: of the file.
        steps: each plan's name and timeline.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.writelines(_lines(steps))
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


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
    """Metadata: what processes and threads are called, and in which order they are shown."""
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
    """An event with a beginning and an end."""
    return {
        "ph": "X", "pid": process, "tid": thread, "name": name, "cat": category,
        "ts": start * _MICRO, "dur": (end - start) * _MICRO, "args": args,
    }  # fmt: skip
