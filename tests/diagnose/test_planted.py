"""Planted causes on real processes: the cause is named, and its size is right to a fifth; from traces and from logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from galvatron_lite.capture.trace import trace
from galvatron_lite.cli import app
from galvatron_lite.cli.runs import print_diagnosis as _print
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.diagnose.diagnosis import (
    Diagnosis,
    DiagnosisInput,
    MemoryRow,
    _backend,
    _from_run,
    _untraced,
    collective_rows,
    correct_profile,
    diagnose,
    open_source,
    profile_beside,
)
from galvatron_lite.diagnose.expected import RankTimes, WaitPlace, expect
from galvatron_lite.diagnose.findings import GLOO, NCCL, Cause, Finding, _link_advice, findings
from galvatron_lite.model import zoo
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import OriginKind, Profile
from galvatron_lite.runs.schema import TRACES, CollectiveRecord, RecordedRun, RunHeader, StepRecord, read_run
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.monitor.attach import ObserverOptions, observe
from tests.equivalence.plans import write_plan
from tests.known_time import KnownClock, retimed
from tests.pool import WorkerPool
from tests.runtime.monitor import machines
from tests.runtime.monitor.machines import BLOCKS, Link, Workers, pair, profile_of, worked_batch
from tests.runtime.plans import make_plan

BATCH = 8
FORWARD, BACKWARD = 0.01, 0.02
"""Seconds of a block's pass of a micro-batch."""
BANDWIDTH, LATENCY = 2e8, 1e-3
MORE = 0.1
"""Seconds that are planted, in forward; twice that in backward."""
SLOWER = 0.5
"""Seconds that the gradients' messages take longer, all together."""


def _from_traces(folder: Path) -> Diagnosis:
    source = open_source(folder)
    return diagnose(source, profile_beside(source))


def _from_log(folder: Path) -> Diagnosis:
    source = _from_run(replace(read_run(folder), traces=()))
    return diagnose(source, profile_beside(source))


Diagnose = Callable[[Path], Diagnosis]


@pytest.fixture(scope="module")
def runs(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("planted")
    return folder, pool.run(2, plant_all, timeout=600.0, folder=str(folder))[0]


HOW = pytest.mark.parametrize("read", [_from_traces, _from_log])
Runs = tuple[Path, dict[str, float]]


def _worst(found: Diagnosis) -> Finding:
    """The cause that costs most of what is within steps."""
    return next(one for one in found.findings if one.cause is not Cause.BETWEEN)


@HOW
def test_a_run_as_predicted_has_no_large_finding(runs: Runs, read: Diagnose) -> None:
    found = read(runs[0] / "nothing")
    assert all(abs(one.seconds) < MORE for one in found.findings)
    assert found.seconds == pytest.approx(found.predicted, abs=MORE)


def test_a_log_shows_slow_layers_by_their_forward_passes(runs: Runs) -> None:
    found = _from_log(runs[0] / "layers").findings
    layers = [one for one in found if one.cause is Cause.LAYERS]
    ahead = next(one for one in layers if one.where.startswith("forward of blocks.1 "))
    back = next(one for one in layers if one.where.startswith("backward of all"))
    assert ahead.seconds == pytest.approx(MORE, rel=0.2)
    assert back.seconds == pytest.approx(2 * MORE, rel=0.2)


CAUSES = [
    ("rank", Cause.RANK, (1,), "rank 1", BLOCKS * 1.5 * MORE),
    ("layers of a rank", Cause.LAYERS, (1,), "blocks.2", 3 * MORE),
    ("optimizer", Cause.OPTIMIZER, (), "the update", 3 * MORE),
]


@pytest.mark.parametrize(
    ("read", "name", "cause", "ranks", "where", "seconds"),
    [
        *((read, *case) for case in CAUSES for read in (_from_traces, _from_log)),
        (_from_traces, "layers", Cause.LAYERS, (), "blocks.1 ", 3 * MORE),
    ],
)
def test_a_cause_is_named_and_so_is_its_size(
    runs: Runs, read: Diagnose, name: str, cause: Cause, ranks: tuple[int, ...], where: str, seconds: float
) -> None:
    worst = _worst(read(runs[0] / name))
    assert (worst.cause, worst.ranks) == (cause, ranks)
    assert worst.where.startswith(where)
    assert worst.seconds == pytest.approx(seconds, rel=0.2)


@HOW
def test_slow_messages_are_named(runs: Runs, read: Diagnose) -> None:
    folder, seconds = runs
    worst = _worst(read(folder / "collective"))
    assert worst.cause is Cause.COLLECTIVE
    assert "sums of gradients" in worst.where
    assert "groups of 2" in worst.where
    assert worst.seconds == pytest.approx(seconds["collective"] - seconds["nothing"], rel=0.2)


def test_the_profile_is_corrected_by_what_was_seen(runs: Runs) -> None:
    for name in ("layers", "collective"):
        source = open_source(runs[0] / name)
        known = profile_beside(source)
        made, said = correct_profile(known, source)
        found = diagnose(source, made)
        assert said
        assert made.origin.kind is OriginKind.MEASURED
        assert name in made.origin.source
        assert found.predicted == pytest.approx(found.seconds, rel=0.2)


def test_slow_layers_of_a_stage_are_named_and_waiting_for_them_is_not(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, plant_in_a_stage, timeout=600.0, folder=str(tmp_path))
    worst = _worst(_from_traces(tmp_path / "stage"))
    assert (worst.cause, worst.stage) == (Cause.LAYERS, 1)
    assert worst.where.startswith("blocks.3 ")
    assert worst.seconds == pytest.approx(4 * 3 * MORE, rel=0.2)
    logged = [one for one in _from_log(tmp_path / "stage").findings if one.cause is Cause.LAYERS and one.stage == 1]
    assert {one.where.split(" (")[0] for one in logged[:2]} == {"backward of all layers", "forward of blocks.3"}
    assert sum(one.seconds for one in logged[:2]) == pytest.approx(4 * 3 * MORE, rel=0.2)


def test_quicker_parts_have_no_advice() -> None:
    profile = known_profile()
    expected = expect(profile, plan_of(profile))
    times = [
        RankTimes(rank, expected.seconds, 3, optimizer=group.optimizer + change, other=group.other)
        for group in expected.groups
        for rank, change in zip(group.ranks, [-0.9 * expected.seconds] * len(group.ranks), strict=True)
    ]
    found = [one for one in findings(times, expected) if one.cause is Cause.OPTIMIZER]
    assert found
    assert all(one.seconds < 0 and one.advice == "" for one in found)
    slower = [replace(one, optimizer=2 * expected.seconds) for one in times]
    assert all(one.advice for one in findings(slower, expected) if one.cause is Cause.OPTIMIZER)


def test_costs_come_with_each_advice_once_and_gains_apart(capsys: pytest.CaptureFixture[str]) -> None:
    found = (
        Finding(Cause.HOST, "in no layer", 0.04, 0.05, 0.01, "Look here.", stage=0),
        Finding(Cause.HOST, "in no layer", 0.03, 0.04, 0.01, "Look here.", stage=1),
        Finding(Cause.RANK, "rank 1", 0.02, 0.03, 0.01, "Look there.", (1,)),
        Finding(Cause.OPTIMIZER, "the update", -0.02, 0.01, 0.03, ""),
    )
    told = Diagnosis("run", 3, 0.233, 0.1, True, found, 0.0, (MemoryRow((1, 1), 10, 10),), (), 0.145)
    _print(told)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "145 ms a step, predicted 100 ms (+45%); without the profiler."
    assert "they took 233 ms" in lines[1]
    assert [sum(words in line for line in lines) for words in ("Look here.", "As for 1.", "Look there.")] == [1, 1, 1]
    assert sum("rank 1: 30 ms" in line and "rank: rank" not in line for line in lines) == 1
    apart = next(number for number, line in enumerate(lines) if line.startswith("Quicker than predicted"))
    assert lines[apart + 1].startswith("    -20 ms  optimizer: the update")
    assert any(line.startswith("Memory on rank 1:") for line in lines)


def test_advice_is_of_what_carries_the_messages() -> None:
    profile = known_profile()
    expected = expect(profile, plan_of(profile))
    times = [RankTimes(rank, expected.seconds, 3) for group in expected.groups for rank in group.ranks]
    source = DiagnosisInput("run", None, expected.plan, tuple(times))
    assert _backend(source, profile) == (GLOO if profile.cluster.device.name.startswith("CPU ") else NCCL)
    assert "NCCL" in _link_advice(WaitPlace.GRADIENTS, NCCL)
    assert "NCCL" not in _link_advice(WaitPlace.GRADIENTS, GLOO)


def test_steps_without_the_profiler_advise_a_traced_run() -> None:
    plan = plan_of(known_profile())
    steps = [StepRecord(number, 1.0, own, profiled=number == 3) for number, own in enumerate((9.0, 0.1, 0.2, 5.0, 0.3))]
    run = RecordedRun(Path("run"), (RunHeader(1, plan, "abc", 1.0),), tuple(steps))
    assert _untraced(run) == 0.2
    assert _untraced(None) is None
    assert _untraced(replace(run, steps=())) is None


SAMPLES, LATE = 4, 0.2
STRATEGIES = {"data": Strategy(data=2), "zero": Strategy(zero=2, zero_stage=3)}


def model_and_batch() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = zoo.build("gpt-tiny")
    return model, model.example_batch(SAMPLES)


@cache
def small_profile(devices: int = 2) -> Profile:
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
    recorder.finish()
    assert dist.all_reduce is before


@pytest.mark.parametrize("how", STRATEGIES)
def test_bytes_and_the_last_rank_of_a_run(pool: WorkerPool, tmp_path: Path, how: str) -> None:
    pool.run(2, run, folder=str(tmp_path), how=how, profile=small_profile())
    source = open_source(tmp_path)
    rows = {row.collective: row for row in diagnose(source, profile_beside(source)).collectives}
    parameters = 4 * small_profile().graph.parameters
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


def test_a_row_of_the_printed_table() -> None:
    taken = {0: 0.5, 1: 0.1, 2: 0.6}  # in two steps
    records = [CollectiveRecord(rank, 4, 2, "all_reduce", (0, 1, 2), 4, 3000, own) for rank, own in taken.items()]
    (row,) = collective_rows(records, small_profile(4))
    assert (row.slowest, row.calls, row.bytes) == (1, 2, 1500)
    assert row.seconds == pytest.approx(0.05)
    assert row.waited == pytest.approx(0.225)
    assert row.bandwidth == pytest.approx(2 * 2 / 3 * 1500 / 0.05)
    assert row.predicted > 0


class Plants:
    """What is planted now."""

    blocks: dict[int, float] = {}  # noqa: RUF012 - changed by the jobs of one process
    optimizer = 0.0


def pace(number: int, _samples: int) -> tuple[float, float]:
    more = Plants.blocks.get(number, 0.0)
    return FORWARD + more, BACKWARD + 2 * more


def known_profile() -> Profile:
    return profile_of(pace, BATCH, pair(BANDWIDTH, LATENCY))


def plan_of(profile: Profile, stages: int = 1, microbatches: int = 1) -> Plan:
    """Two replicas; or two stages."""
    names = [layer.name for layer in profile.graph.layers]
    halves = [names] if stages == 1 else [names[: len(names) // 2], names[len(names) // 2 :]]
    strategies = [[Strategy(data=2 // stages)] * len(half) for half in halves]
    return evaluate(profile, make_plan(halves, strategies, BATCH, microbatches))


class Trained:
    """A model that trains on this rank, and what is planted into it.

    Args:
        folder: of the test.
        stages, microbatches: of the plan.
    """

    def __init__(self, folder: Path, stages: int = 1, microbatches: int = 1) -> None:
        self.folder, self.profile = folder, known_profile()
        self.plan = plan_of(self.profile, stages, microbatches)
        model, batch = Workers(pace), worked_batch(BATCH, 1)
        self.parallel = ParallelModel(model, self.plan, discover_layers(model, batch), batch, device="cpu")
        self.optimizer = self.parallel.optimizer(torch.optim.SGD, lr=0.01)
        self.optimizer.register_step_pre_hook(lambda *_: Link.clock.work(Plants.optimizer))

    def run(self, name: str) -> float:
        """Train some steps into a folder of their own, the last two of them traced; seconds of the second."""
        first = self.parallel.step
        traced = range(first + 2, first + 4)
        recorder = observe(self.parallel, ObserverOptions(self.folder / name, False, traced), self.profile)
        seconds = []
        for _ in range(4):
            dist.barrier()
            before = Link.clock.now()
            self.parallel.train_step(worked_batch(BATCH, 1), self.optimizer)
            seconds.append(Link.clock.now() - before)
        recorder.finish()
        (trace,) = (self.folder / name / TRACES).glob(f"rank-{dist.get_rank():05d}-*")
        retimed(trace)
        return seconds[1]


@contextmanager
def planted(blocks: dict[int, float], optimizer: float = 0.0) -> Iterator[None]:
    Plants.blocks, Plants.optimizer = blocks, optimizer
    yield
    Plants.blocks, Plants.optimizer = {}, 0.0


def plant_all(folder: str) -> dict[str, float]:
    """Every cause in a run of its own; seconds of a step of each, on this rank."""
    clock = KnownClock()
    machines.join(Path(folder), BANDWIDTH, clock)
    with clock.told():
        return _plant_all(folder)


def _plant_all(folder: str) -> dict[str, float]:
    trained = Trained(Path(folder))
    every, own = dict.fromkeys(range(BLOCKS), MORE / 2), dist.get_rank() == 1
    runs: dict[str, Callable[[], Any]] = {
        "nothing": lambda: planted({}),
        "layers": lambda: planted({1: MORE}),
        "rank": lambda: planted(every if own else {}),
        "layers of a rank": lambda: planted({2: MORE} if own else {}),
        "optimizer": lambda: planted({}, 3 * MORE),
    }
    found = {}
    for name, plant in runs.items():
        with plant():
            found[name] = trained.run(name)
    size = sum(parameter.nbytes for parameter in Workers(pace).parameters())
    Link.per_byte += SLOWER / size
    found["collective"] = trained.run("collective")
    return found


def plant_in_a_stage(folder: str) -> float:
    """A block of the second of two stages takes longer."""
    clock = KnownClock()
    machines.join(Path(folder), BANDWIDTH, clock)
    with clock.told():
        trained = Trained(Path(folder), stages=2, microbatches=4)
        with planted({3: MORE}):
            return trained.run("stage")
