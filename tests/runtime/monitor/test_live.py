"""Logs and the live display of training: records are correct, and observing changes neither results nor speed."""

from __future__ import annotations

import io
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from galvatron_lite import auto_parallelize
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runs.schema import PlanRecord, StepPart, StepRecord, measured, predicted, read_run
from galvatron_lite.runtime.cyclic.model import CyclicModel
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.monitor import sinks as board
from galvatron_lite.runtime.monitor.attach import ObserverOptions, observe, observer_options
from galvatron_lite.runtime.monitor.notes import StepPhase
from galvatron_lite.runtime.monitor.sinks import Display, LineFiles, RecordWriter
from tests.parallelism.cyclic.models import make_plan
from tests.pool import WorkerPool
from tests.processor_time import least
from tests.runs.lines import a_header, a_plan
from tests.runtime.branches.jobs import perception, perception_plan
from tests.runtime.cyclic.test_processes import ADAM, batches_of, case_of
from tests.runtime.deepspeed import jobs as deepspeed_jobs
from tests.runtime.training import Case, make_batch, make_parallel, plan_of

REPLICAS = Case([Strategy(data=2)] * 5, microbatches=2)
STAGES = Case([Strategy()] * 5, cuts=[2], microbatches=4)
LITTLE = 0.01 * 0.020
"""Processor seconds that observing a step may take: a hundredth of a short step."""
SINGLE = Case([Strategy(data=2)] * 5)


def _loop(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> float:
    loss = parallel(make_batch())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _stepped(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> float:
    return float(parallel.train_step(make_batch(), optimizer))


def train_logged(folder: str) -> dict[str, list[float]]:
    """Train by ``train_step`` and by loops, with a log in a separate folder for each; return the losses."""
    losses_by_name = {}
    for name, case, step in (
        ("steps", REPLICAS, _stepped), ("stages", STAGES, _stepped),
        ("loop", SINGLE, _loop), ("staged loop", STAGES, _loop),
    ):  # fmt: skip
        parallel = make_parallel(case)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        recorder = observe(parallel, ObserverOptions(Path(folder) / name))
        losses = [step(parallel, optimizer) for _ in range(3)]
        parallel.eval()
        parallel.outputs(make_batch())
        parallel.train()
        recorder.finish()
        losses_by_name[name] = losses
        parallel.step = 3  # as a checkpoint sets it
        recorder = observe(parallel, ObserverOptions(Path(folder) / name))  # continues in the same folder
        losses += [step(parallel, optimizer)]
        recorder.finish()
    return losses_by_name


def observing_changes_no_bit(folder: str) -> bool:
    """Whether the state after two steps is equal with and without an observer."""
    states = []
    for options in (None, ObserverOptions(Path(folder), profile_steps=range(1, 2))):
        parallel = make_parallel(REPLICAS)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        recorder = observe(parallel, options)
        for _ in range(2):
            _stepped(parallel, optimizer)
        if recorder is not None:
            recorder.finish()
        states.append(parallel.full_state_dict())
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def observing_seconds(folder: str) -> float:
    """Processor seconds that observing a step of eight micro-batches costs the training thread."""
    parallel: Any = make_parallel(Case([Strategy()] * 5))
    recorder = observe(parallel, ObserverOptions(Path(folder), live=True))
    phases = [StepPhase.FORWARD, StepPhase.BACKWARD] * 8 + [StepPhase.GRADIENTS, StepPhase.CHECK, StepPhase.OPTIMIZER]
    loss, batch = torch.zeros(()), make_batch()

    def step() -> Tensor:
        for phase in phases:
            parallel.watch.clock(phase)
        return loss

    def seconds(steps: int) -> float:
        before = time.thread_time()
        for _ in range(steps):
            parallel.observer.train(batch, step)
        return (time.thread_time() - before) / steps

    seconds(50)
    shortest = least(lambda: seconds(200), LITTLE)
    recorder.finish()
    return shortest


def refuse(folder: str) -> str:
    """The error if the folder is a file on rank 0."""
    if dist.get_rank() == 0:
        Path(folder, "taken").write_text("")
    dist.barrier()
    parallel = make_parallel(SINGLE)
    try:
        observe(parallel, ObserverOptions(Path(folder) / "taken"))
    except InputError as error:
        return str(error)
    return ""


def other_models(folder: str) -> dict[str, list[float]]:
    """The losses of a model with branches, a cyclic one, one under DeepSpeed, and one that changes its plan."""
    place, losses = Path(folder), dict[str, list[float]]()
    model, batch = perception()
    branched: Any = auto_parallelize(model, batch, plan=perception_plan(), device="cpu", log=place / "branches")
    losses["branches"] = _losses(branched, branched.optimizer(torch.optim.SGD, lr=0.05), batch)
    (model, layers, stages), batches = case_of(2), batches_of(2)
    plan = make_plan(stages, "cdp-v2", "data", rows=4)
    cyclic = CyclicModel(model, plan, layers, batches[0], timeout=60)
    recorder = observe(cyclic, ObserverOptions(place / "cyclic"))
    losses["cyclic"] = _losses(cyclic, cyclic.optimizer(ADAM), batches[0])
    cyclic.flush()
    deep = deepspeed_jobs.make(deepspeed_jobs.plan_of(Strategy(zero=2, zero_stage=1)))
    other = observe(deep, ObserverOptions(place / "deepspeed"))
    losses["deepspeed"] = _losses(deep, deep.optimizer(torch.optim.SGD, lr=0.1), make_batch())
    parallel = make_parallel(SINGLE)
    last = observe(parallel, ObserverOptions(place / "switch"))
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    losses["switch"] = _losses(parallel, optimizer, make_batch())
    parallel.switch(replace(plan_of(STAGES), microbatches=2), optimizer)
    losses["switch"] += _losses(parallel, optimizer, make_batch())
    # the first that is running is that of ``auto_parallelize``
    first = next(thread for thread in threading.enumerate() if isinstance(thread, RecordWriter))
    for writer in (first, recorder, other, last):
        writer.finish()
    return losses


def _losses(parallel: Any, optimizer: Any, batch: Any) -> list[float]:
    return [float(parallel.train_step(batch, optimizer)) for _ in range(2)]


def _step(number: int, seconds: float = 0.1, memory: int = 0) -> StepRecord:
    return StepRecord(number, 1000.0 + number, seconds, 0.0, 8, 128, 2.5, memory)


def test_steps_of_every_kind_of_loop_are_logged(pool: WorkerPool, tmp_path: Path) -> None:
    losses = pool.run(2, train_logged, folder=str(tmp_path))[0]
    for name, wanted in losses.items():
        run = read_run(tmp_path / name)
        assert [step.loss for step in run.steps] == pytest.approx(wanted), name
        assert [step.step for step in run.steps] == [0, 1, 2, 3], name
        assert len(run.starts) == 2
        assert {step.samples for step in run.steps} == {8}
        assert len(run.ranks) == 2
        for record in (record for records in run.ranks for record in records):
            assert sum(record.parts.values()) == pytest.approx(record.seconds, rel=1e-3), name
            assert record.parts[StepPart.FORWARD] > 0.0
            assert record.parts[StepPart.BACKWARD] > 0.0
            assert record.resident > 2**20
            assert (StepPart.WAITING in record.parts) == ("stage" in name)
        assert not run.torn
        assert [end.reason for end in run.ends] == ["", ""]


@pytest.mark.filterwarnings("ignore")
def test_other_models_and_changes_of_plan_are_logged(pool: WorkerPool, tmp_path: Path) -> None:
    losses = pool.run(2, other_models, folder=str(tmp_path), timeout=300.0)[0]
    for name, wanted in losses.items():
        run = read_run(tmp_path / name)
        assert [step.loss for step in run.steps] == pytest.approx(wanted), name
        assert len(run.ranks) == 2, name
    changed = read_run(tmp_path / "switch")
    assert (changed.since, len(changed.plan.stages), len(changed.header.plan.stages)) == (2, 2, 1)
    assert all(StepPart.WAITING in record.parts for records in changed.ranks for record in records)


def test_observing_changes_no_bit(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, observing_changes_no_bit, folder=str(tmp_path)) == [True, True]
    assert len(read_run(tmp_path).traces) == 2


def test_observing_costs_little(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(1, observing_seconds, folder=str(tmp_path))[0] < LITTLE


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    for error in pool.run(2, refuse, folder=str(tmp_path)):
        assert "cannot be written" in error


def test_invalid_options_are_refused() -> None:
    assert observer_options(None, False, None) is None
    for log, steps in ((None, range(3, 5)), ("runs", range(0, 9, 2)), ("runs", [3])):
        with pytest.raises(InputError, match="profile_steps"):
            observer_options(log, False, steps)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="for training alone"):
        observe(None, observer_options("runs", False, None))


def test_files_stay_within_bounds_and_go_on(tmp_path: Path) -> None:
    changed = PlanRecord(5, a_plan(0.05), "def")
    kinds = (StepRecord, PlanRecord)
    files = LineFiles(tmp_path, "steps", a_header(), kinds, largest=1500, kept=4)
    for number in range(100):
        if number == 5:
            files.take([changed])
        files.take([_step(number)])
    files.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 4
    assert names[0] == "steps-00001.jsonl"
    run = read_run(tmp_path)
    assert run.steps[0].step == 0
    assert run.steps[-1].step == 99
    assert run.plan == a_plan(0.05)
    LineFiles(tmp_path, "steps", a_header(2000.0, 100), kinds).close()
    assert [one.step for one in read_run(tmp_path).starts] == [0, 100]


def test_without_a_terminal_lines_are_printed_with_predictions_beside() -> None:
    out = io.StringIO()
    shown = Display(a_plan(0.1), Console(file=out, width=300))
    shown.take([_step(0), _step(1, 0.12, 2000)])
    shown.close()
    (said,) = out.getvalue().splitlines()
    assert said.startswith("step 1, loss 2.5, 110 ms a step (predicted 100 ms)")
    assert "72.7 samples/s (predicted 80" in said
    assert "memory 2.0 KiB (predicted 2.9 KiB)" in said


def test_on_a_terminal_a_table_stays_below_what_is_printed() -> None:
    out = io.StringIO()
    shown = Display(a_plan(0.1), Console(file=out, width=120, force_terminal=True, force_jupyter=False))
    shown.take([_step(0)])
    shown.take([PlanRecord(1, a_plan(0.2), "x"), _step(1, 0.2)])
    shown.close()
    said = out.getvalue()
    assert "predicted" in said
    assert "200 ms" in said


def test_figures_are_medians_of_what_was_not_profiled() -> None:
    plan = a_plan(0.1)
    steps = [_step(number, 0.1) for number in range(9)] + [_step(9, 5.0), replace(_step(10, 9.0), profiled=True)]
    now, wanted = measured(steps, plan), predicted(plan)
    assert now.seconds == pytest.approx(0.1)
    assert now.mfu == pytest.approx(wanted.mfu)
    assert now.tokens == pytest.approx(1280)


def test_tensorboard_gets_scalars_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert board.scalar_writer(tmp_path) is None
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub := Mock())
    scalars = board.Scalars(board.scalar_writer(tmp_path), a_plan(0.1))
    scalars.take([_step(7, 0.2)])
    scalars.close()
    stub.SummaryWriter.assert_called_once_with(log_dir=str(tmp_path))
    calls = stub.SummaryWriter.return_value.add_scalar.call_args_list
    assert all(call.kwargs["walltime"] > 0 for call in calls)
    found = {call.args[0]: (call.args[1], call.kwargs["global_step"]) for call in calls}
    assert found["loss"] == (2.5, 7)
    assert found["seconds/measured"] == (0.2, 7)
    assert found["seconds/predicted"] == (0.1, 7)
    assert found["mfu/measured"][0] == pytest.approx(0.2)


@pytest.mark.filterwarnings("ignore:.*takes no more")
def test_a_full_disk_ends_the_log_and_not_the_training() -> None:
    full, kept = Mock(), Mock()
    full.take.side_effect = OSError(28, "No space left on device")
    recorder = RecordWriter([full, kept])
    for number in range(5):
        recorder.put(_step(number))
    recorder.finish()
    assert sum(len(call.args[0]) for call in kept.take.call_args_list) == 5
    assert full.take.call_count == 1
    assert not recorder.is_alive()
