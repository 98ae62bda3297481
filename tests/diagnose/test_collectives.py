"""Collectives of a run on two processes: their bytes, who comes last, and what is printed of them."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from galvatron_lite.capture.trace import trace
from galvatron_lite.cli import app
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.diagnose.diagnosis import collective_rows, diagnose, find_profile, open_source
from galvatron_lite.model import zoo
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runs.schema import CollectiveRecord
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.monitor.attach import ObserverOptions, observe
from tests.equivalence.plans import write_plan
from tests.pool import WorkerPool

SAMPLES, LATE = 4, 0.2
STRATEGIES = {"data": Strategy(data=2), "zero": Strategy(zero=2, zero_stage=3)}


def model_and_batch() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = zoo.build("gpt-tiny")
    return model, model.example_batch(SAMPLES)


@cache
def profile_of(devices: int = 2) -> Profile:
    graph = trace(*model_and_batch())
    return estimate_profile(graph, load_cluster("a100-80gb", devices), precision="fp32", name="gpt-tiny")


def run(folder: str, how: str, profile: Profile) -> None:
    """Four steps, two of them profiled; rank 1 is late in each."""
    model, batch = model_and_batch()
    names = [layer.name for layer in profile.graph.layers]
    plan = evaluate(profile, write_plan([names], dict.fromkeys(names, STRATEGIES[how]), devices=2, batch=SAMPLES))
    parallel = ParallelModel(model, plan, discover_layers(model, batch), batch, device="cpu")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.01)
    recorder = observe(parallel, ObserverOptions(Path(folder), False, range(1, 3)), profile)
    before = dist.all_reduce
    for _ in range(4):
        time.sleep(LATE * dist.get_rank())
        parallel.train_step(batch, optimizer)
    assert recorder is not None
    recorder.finish()
    assert dist.all_reduce is before


@pytest.mark.parametrize("how", STRATEGIES)
def test_bytes_and_the_last_rank_of_a_run(pool: WorkerPool, tmp_path: Path, how: str) -> None:
    pool.run(2, run, folder=str(tmp_path), how=how, profile=profile_of())
    source = open_source(tmp_path)
    rows = {row.collective: row for row in diagnose(source, find_profile(source)).collectives}
    parameters = 4 * profile_of().graph.parameters
    if how == "data":
        assert rows[Collective.ALL_REDUCE].bytes == pytest.approx(parameters, rel=0.01)
    else:  # the tied table is kept whole or padded; twice gathered, once scattered
        assert rows[Collective.ALL_GATHER].bytes == pytest.approx(2 * parameters, rel=0.1)
        assert rows[Collective.REDUCE_SCATTER].bytes == pytest.approx(parameters, rel=0.1)
    late = max(rows.values(), key=lambda row: row.waited)
    assert (late.slowest, late.ranks) == (1, (0, 1))
    assert late.waited > LATE / 3  # samples are compared in every second step
    printed = CliRunner().invoke(app, ["diagnose", str(tmp_path)]).output
    assert f"rank {late.slowest} comes last" in printed.replace("\n", " ")


def test_figures_of_a_row() -> None:
    taken = {0: 0.5, 1: 0.1, 2: 0.6}  # in two steps
    records = [CollectiveRecord(rank, 4, 2, "all_reduce", (0, 1, 2), 4, 3000, own) for rank, own in taken.items()]
    (row,) = collective_rows(records, profile_of(4))
    assert (row.slowest, row.calls, row.bytes) == (1, 2, 1500)
    assert row.seconds == pytest.approx(0.05)
    assert row.waited == pytest.approx(0.225)
    assert row.bandwidth == pytest.approx(2 * 2 / 3 * 1500 / 0.05)
    assert row.predicted > 0
