"""The trace of a step, held against the rules of the Trace Event Format, and against the timeline."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from galvatron_lite.analysis.report.timeline_data import COMMUNICATION, COMPUTE, trace_events, write_trace
from galvatron_lite.plans.schema import Schedule
from tests.analysis.report.plans import HOSTILE, small

NEEDED = {
    "X": {"ts", "dur", "tid"},
    "M": {"args"},
    "C": {"ts", "args"},
    "s": {"ts", "id", "tid"},
    "f": {"ts", "id", "tid"},
}
ROUNDING = 1e-6
"""Microseconds."""


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    steps = [(name, one.timeline) for name, one in ((HOSTILE, small()), ("b", small(Schedule.ZERO_BUBBLE_V, 8)))]
    write_trace(path, [(name, step) for name, step in steps if step is not None])
    told = json.loads(path.read_text(encoding="utf-8"))
    assert told.keys() == {"displayTimeUnit", "traceEvents"}
    found: list[dict[str, Any]] = told["traceEvents"]
    return found


def test_every_event_has_what_its_phase_needs(events: list[dict[str, Any]]) -> None:
    for event in events:
        assert {"ph", "pid", "name"} <= event.keys()
        assert NEEDED[event["ph"]] <= event.keys()
        assert event["pid"] >= 1
        if "ts" in event:
            assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0


def test_processes_and_threads_have_names(events: list[dict[str, Any]]) -> None:
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= named
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(processes) == list(range(1, 7))  # four groups, then two
    assert processes[1] == f"{HOSTILE}, stage 0: ranks 0-1"
    assert processes[5] == "b, stages 0, 3: ranks 0-3"


def test_what_a_thread_does_does_not_overlap(events: list[dict[str, Any]]) -> None:
    """Events of one thread nest or follow one another; those of compute follow."""
    by_thread = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for (_, thread), spans in by_thread.items():
        spans.sort()
        pairs = list(pairwise(spans))
        assert thread != COMPUTE or all(before[1] <= after[0] + ROUNDING for before, after in pairs)


def test_arrows_begin_in_a_send_and_end_before_the_pass_that_needs_them(events: list[dict[str, Any]]) -> None:
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == 2 * 3 * 4 + 2 * 2 * 8  # zb-v: stages 1 and 2 are on one group
    for number, begin in begins.items():
        assert begin["ts"] <= ends[number]["ts"]
        assert begin["pid"] != ends[number]["pid"]


def test_the_trace_holds_the_timeline() -> None:
    step = small().timeline
    assert step is not None
    events = list(trace_events([("a", step)]))
    passes = [
        event for event in events if event["ph"] == "X" and event["tid"] == COMPUTE and "microbatch" in event["args"]
    ]
    assert len(passes) == sum(len(group.passes) for group in step.groups)
    first = step.groups[0].passes[0]
    assert passes[0]["dur"] == pytest.approx((first.end - first.start) * 1e6)
    assert {event["tid"] for event in events if event["ph"] == "X"} == {COMPUTE, COMMUNICATION}
    memory = [sum(event["args"].values()) for event in events if event["ph"] == "C" and event["pid"] == 1]
    assert max(memory) == step.groups[0].peak.memory.total


def test_a_trace_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    with pytest.raises(AttributeError):
        write_trace(path, [("a", None)])  # type: ignore[list-item]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
