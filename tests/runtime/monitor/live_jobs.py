"""Runs that are logged, on every rank."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from galvatron_lite import auto_parallelize
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.cyclic.model import CyclicModel
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.monitor.attach import ObserverOptions, observe
from galvatron_lite.runtime.monitor.notes import StepPhase
from galvatron_lite.runtime.monitor.sinks import RecordWriter
from tests.parallelism.cyclic.models import make_plan
from tests.processor_time import least
from tests.runtime.branches.jobs import perception, perception_plan
from tests.runtime.cyclic.jobs import ADAM, batches_of, case_of
from tests.runtime.deepspeed import jobs as deepspeed_jobs
from tests.runtime.training import Case, make_batch, make_parallel, plan_of

REPLICAS = Case([Strategy(data=2)] * 5, microbatches=2)
STAGES = Case([Strategy()] * 5, cuts=[2], microbatches=4)
LITTLE = 0.01 * 0.020
"""Processor seconds that seeing a step may take: of a short one, a hundredth."""
NUMB = Case([Strategy(data=2)] * 5)


def _loop(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> float:
    loss = parallel(make_batch())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _step(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> float:
    return float(parallel.train_step(make_batch(), optimizer))


def train_logged(folder: str) -> dict[str, list[float]]:
    """Steps of every kind, each in a folder of its own; the losses."""
    found = {}
    for name, case, step in (
        ("steps", REPLICAS, _step), ("stages", STAGES, _step), ("loop", NUMB, _loop), ("staged loop", STAGES, _loop),
    ):  # fmt: skip
        parallel = make_parallel(case)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        recorder = observe(parallel, ObserverOptions(Path(folder) / name))
        assert recorder is not None
        losses = [step(parallel, optimizer) for _ in range(3)]
        parallel.eval()
        parallel.outputs(make_batch())
        parallel.train()
        recorder.finish()
        found[name] = losses
        parallel.step = 3  # as a checkpoint sets it; loops of the user's own do not count steps
        recorder = observe(parallel, ObserverOptions(Path(folder) / name))  # it goes on in the same folder
        assert recorder is not None
        losses += [step(parallel, optimizer)]
        recorder.finish()
    return found


def alike(folder: str) -> bool:
    """Whether steps give the same bits, seen or not."""
    states = []
    for seen in (None, ObserverOptions(Path(folder), profile_steps=range(1, 2))):
        parallel = make_parallel(REPLICAS)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        recorder = observe(parallel, seen)
        for _ in range(2):
            _step(parallel, optimizer)
        if recorder is not None:
            recorder.finish()
        states.append(parallel.full_state_dict())
    return all(torch.equal(one, states[1][name]) for name, one in states[0].items())


def cost_of_seeing(folder: str) -> float:
    """Processor seconds that seeing a step of eight micro-batches costs the thread that trains."""
    parallel: Any = make_parallel(Case([Strategy()] * 5))
    recorder = observe(parallel, ObserverOptions(Path(folder), live=True))
    assert recorder is not None
    observer, loss, batch = parallel.observer, torch.zeros(()), make_batch()

    def seconds(steps: int) -> float:
        before = time.thread_time()
        for _ in range(steps):
            observer.begin(batch)
            for phase in (StepPhase.FORWARD, StepPhase.BACKWARD) * 8 + (
                StepPhase.GRADIENTS,
                StepPhase.CHECK,
                StepPhase.OPTIMIZER,
            ):
                parallel.watch.clock(phase)
            observer.end(loss)
        return (time.thread_time() - before) / steps

    seconds(50)
    found = least(lambda: seconds(200), LITTLE)
    recorder.finish()
    return found


def refuse(folder: str) -> str:
    """What is said where the folder is a file on rank 0."""
    if dist.get_rank() == 0:
        Path(folder, "taken").write_text("")
    dist.barrier()
    parallel = make_parallel(NUMB)
    try:
        observe(parallel, ObserverOptions(Path(folder) / "taken"))
    except InputError as error:
        return str(error)
    return ""


def other_models(folder: str) -> dict[str, list[float]]:
    """Models with branches, of delayed gradients, under DeepSpeed, and one that changes its plan; the losses."""
    place, found = Path(folder), dict[str, list[float]]()
    model, batch = perception()
    branched: Any = auto_parallelize(model, batch, plan=perception_plan(), device="cpu", log=place / "branches")
    found["branches"] = _losses(branched, branched.optimizer(torch.optim.SGD, lr=0.05), batch)
    (model, layers, stages), batches = case_of(2), batches_of(2)
    plan = make_plan(stages, "cdp-v2", "data", rows=4)
    cyclic = CyclicModel(model, plan, layers, batches[0], timeout=60)
    recorder = observe(cyclic, ObserverOptions(place / "cyclic"))
    found["cyclic"] = _losses(cyclic, cyclic.optimizer(ADAM), batches[0])
    cyclic.flush()
    deep = deepspeed_jobs.make(deepspeed_jobs.plan_of(Strategy(zero=2, zero_stage=1)))
    other = observe(deep, ObserverOptions(place / "deepspeed"))
    found["deepspeed"] = _losses(deep, deep.optimizer(torch.optim.SGD, lr=0.1), make_batch())
    parallel = make_parallel(NUMB)
    last = observe(parallel, ObserverOptions(place / "switch"))
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    found["switch"] = _losses(parallel, optimizer, make_batch())
    parallel.switch(replace(plan_of(STAGES), microbatches=2), optimizer)
    found["switch"] += _losses(parallel, optimizer, make_batch())
    for one in (_recorder(), recorder, other, last):
        assert one is not None
        one.finish()
    return found


def _recorder() -> RecordWriter:
    """The first that is running: that of ``auto_parallelize``."""
    return next(thread for thread in threading.enumerate() if isinstance(thread, RecordWriter))


def _losses(made: Any, optimizer: Any, batch: Any) -> list[float]:
    return [float(made.train_step(batch, optimizer)) for _ in range(2)]
