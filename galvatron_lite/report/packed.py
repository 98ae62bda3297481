"""A timeline as a few bytes: what the page's script draws and lets the reader zoom into. No torch here.

Each pass is a kind, a step of the micro-batch from the last pass of that kind, the gap before it, and the places of two
levels of memory; how long it takes is said once for each stage. The planes of these numbers repeat with the rounds of a
pipeline, so that deflate (RFC 1951; browsers have it) makes hundreds of thousands of them small.
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from galvatron_lite.cost.timeline import GroupTimeline, TimedPass, Timeline
from galvatron_lite.parallelism.pipeline.schedule import Pass
from galvatron_lite.plans.schema import MemoryBreakdown

TICKS = 1 << 30
"""Parts of a step that gaps and passes are counted in."""
KINDS = (Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHT)


def packed(step: Timeline, budgets: Sequence[int], devices: Sequence[str]) -> dict[str, Any]:
    """A timeline for the page's script.

    Args:
        step: the timeline.
        budgets: bytes a device of each group may take; 0: not known.
        devices: of each group, in words.
    """
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
    """When the group was free before each pass."""
    yield 0.0
    yield from (one.free for one in group.passes[:-1])


def _steps(passes: Sequence[TimedPass], kinds: Sequence[int]) -> Iterator[int]:
    """The micro-batch of each pass less that of the last pass of its kind and chunk; of the first, as it is."""
    last: dict[int, int] = {}
    for one, kind in zip(passes, kinds, strict=True):
        yield one.microbatch - last.get(kind, 0)
        last[kind] = one.microbatch
