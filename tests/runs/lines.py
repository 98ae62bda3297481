"""Runs made up for tests: plans, headers, and folders that hold their lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from galvatron_lite.files import to_data
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import LayerRun, MemoryBreakdown, Plan, Prediction, Schedule, Stage, TimeBreakdown
from galvatron_lite.runs.schema import RUN_VERSION, RankHeader, Record, RunDevice, RunHeader


def a_plan(seconds: float = 0.1, model: str = "tiny") -> Plan:
    """A plan of two ranks, with a prediction."""
    time = TimeBreakdown(0.3 * seconds, 0.5 * seconds, communication=0.1 * seconds, optimizer=0.1 * seconds)
    prediction = Prediction(seconds, time, 8 / seconds, 128 / seconds, 0.4, 3000)
    stage = Stage((LayerRun("0", "3", 4, Strategy(data=2)),), MemoryBreakdown(1000, 1000, 1000), 0.8 * seconds)
    return Plan(1, model, 2, 8, 1, Schedule.ONE_F_ONE_B, "fp32", (stage,), prediction)


def a_header(time: float = 1000.0, step: int = 0, plan: Plan | None = None) -> RunHeader:
    """What a run of two ranks begins with."""
    devices = tuple(RunDevice(rank, "host", "cpu") for rank in range(2))
    return RunHeader(RUN_VERSION, plan or a_plan(), "abc", time, devices, {"torch": "2.13"}, step, "ParallelModel")


def a_rank_header(rank: int, time: float = 1000.0, digest: str = "abc") -> RankHeader:
    """What a rank's file begins with."""
    return RankHeader(RUN_VERSION, rank, digest, time)


def text_of(records: Sequence[Record]) -> str:
    """Lines of a file."""
    return "".join(json.dumps({"kind": one.kind, **to_data(one)}) + "\n" for one in records)


def write(folder: Path, name: str, records: Sequence[Record], more: str = "") -> Path:
    """Write a file of a run; ``more`` goes behind its last line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text_of(records) + more)
    return path
