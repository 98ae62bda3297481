"""What ranks give as batches; phases, in which batches grow and are split anew."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Layer
from galvatron_lite.model.zoo.gpt import GPT, GPTConfig
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.phases import PhasedPlan, PlannedPhase, in_order
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.phases import Phases
from tests.pool import WorkerPool
from tests.runtime.plans import losses_alone
from tests.runtime.training import ADAMW, SAMPLES, Case, Trained, assert_same, make_batch, make_model, make_parallel
from tests.together import Together, together

PLANS: dict[str, Case] = {
    "data": Case([Strategy(data=2)] * 4),
    "zero3": Case([Strategy(zero=2, zero_stage=3)] * 4, microbatches=2),
    "tensor": Case([Strategy(tensor=2)] * 4),
    "context": Case([Strategy(context=2)] * 4),
    "pipeline": Case([Strategy()] * 4, cuts=[2], microbatches=2),
    "pipeline of tensor": Case([Strategy(tensor=2)] * 4, cuts=[2], microbatches=2),
}


RATE = 0.5
"""Of plain SGD: Adam would hide a gradient that is a sum of shares and not their mean, and makes rounding noise of
gradients near its ``eps`` as large as the tolerance on some CPUs."""


def steps_of(count: int = 1) -> list[list[dict[str, Tensor]]]:
    """Two steps of so many batches each, all of other samples."""
    generator = torch.Generator().manual_seed(7)

    def batch() -> dict[str, Tensor]:
        tokens = torch.randint(0, 96, (SAMPLES, 16), generator=generator)
        return {"tokens": tokens, "labels": tokens.roll(-1, 1)}

    return [[batch() for _ in range(count)] for _ in range(2)]


@cache
def alone(count: int) -> Trained:
    """One process, on all batches of a step as one."""
    model = make_model("gpt-tiny", 2)
    joined = [{key: torch.cat([batch[key] for batch in step]) for key in step[0]} for step in steps_of(count)]
    losses = losses_alone(model, torch.optim.SGD(model.parameters(), lr=RATE), joined)
    return Trained(losses, {}, dict(model.state_dict()))


def share(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    size = SAMPLES // dist.get_world_size()
    return {key: value[dist.get_rank() * size :][:size] for key, value in batch.items()}


def trained(case: Case) -> list[Trained]:
    """Shares of every rank, by ``train_step`` and by hand; then lists of batches, whole and in shares."""
    found = []
    for way in ("local", "by hand", "list", "local list"):
        parallel = make_parallel(case, local_batch=way != "list")
        optimizer, losses = parallel.optimizer(torch.optim.SGD, lr=RATE), []
        for step in steps_of(2 if "list" in way else 1):
            given: Any = [share(batch) if way != "list" else batch for batch in step]
            if way == "by hand":
                loss = parallel(**given[0])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                loss = parallel.train_step(given if "list" in way else given[0], optimizer)
            losses.append(float(loss.detach()))
        found.append(Trained(losses, {}, parallel.full_state_dict()))
    return found


runs = together(trained, PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_shares_and_lists_train_as_one_process_does_on_all(runs: Together, name: str) -> None:
    wanted = [alone(count) for count in (1, 1, 2, 2)]
    for found in runs[name]:
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)


def unlike(case: Case, how: str) -> list[str]:
    """What every rank is told, and what trains on behind it."""
    parallel = make_parallel(case, local_batch=how == "uneven share")
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    batch, rank = make_batch(), dist.get_rank()
    if how == "late":
        for _ in range(2):
            parallel.train_step(batch, optimizer)
    if rank == 1:
        batch = {
            "values": lambda: {**batch, "labels": batch["labels"].flip(0)},
            "late": lambda: {key: value[:4] for key, value in batch.items()},
            "uneven share": lambda: {key: value[:4] for key, value in batch.items()},
            "entries": lambda: {"tokens": batch["tokens"]},
        }[how]()
    said = []
    for call in (lambda: parallel.train_step(batch, optimizer), lambda: parallel.outputs(**batch)):
        with pytest.raises(InputError) as raised:
            call()
        said.append(str(raised.value))
    with pytest.raises(InputError, match="of rank 1"):
        parallel(batch)
    parallel.train_step(make_batch(), optimizer)
    return said


UNLIKE = {
    "values": "Its values differ from rank 0's. Every rank gives the same global batch",
    "late": "Its tokens is torch.int64 (4, 16), not torch.int64 (8, 16) like rank 0's.",
    "entries": "It has the entries tokens, others than rank 0's.",
    "uneven share": "set drop_last=True",
}


@pytest.mark.parametrize("how", UNLIKE)
@pytest.mark.parametrize("plan", ["data", "pipeline"])
def test_unlike_batches_are_an_error_on_every_rank(pool: WorkerPool, plan: str, how: str) -> None:
    for said in pool.run(2, unlike, case=PLANS[plan], how=how):
        for one in said:
            assert one.startswith("batch: 'of rank 1' cannot be used.")
            assert UNLIKE[how] in one
            assert "local_batch=True" in one


CONFIG = GPTConfig(vocab=32, layers=2, hidden=16, heads=2, sequence=8)
STEPS, BATCHES, SEQUENCES = 2, (4, 8, 8, 4), (8, 8, 4, 8)


def phase_batch(step: int) -> dict[str, Tensor]:
    """The global batch of a step, of its phase's samples and tokens."""
    phase = step // STEPS
    shape = (BATCHES[phase], SEQUENCES[phase] + 1)
    rows = torch.randint(0, CONFIG.vocab, shape, generator=torch.Generator().manual_seed(step))
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def _plan(layers: list[Layer], batch: int, microbatches: int, strategy: Strategy, cuts: tuple[int, ...] = ()) -> Plan:
    ends = cuts or (0, len(layers))
    runs = [
        tuple(LayerRun(layer.name, layer.name, 1, strategy) for layer in layers[start:stop])
        for start, stop in pairwise(ends)
    ]
    stages = tuple(Stage(run) for run in runs)
    return Plan(PLAN_VERSION, "gpt", 2, batch, microbatches, Schedule.ONE_F_ONE_B, "fp32", stages)


def train_in_phases() -> tuple[list[float], list[str], str]:
    """The losses of all steps, how the first layer is split in each phase, and what a wrong batch is answered with."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    layers = list(discover_layers(model, phase_batch(0)))
    data, shards = Strategy(data=2), Strategy(zero=2, zero_stage=3)
    plans = [
        _plan(layers, BATCHES[0], 1, data), _plan(layers, BATCHES[1], 2, data), _plan(layers, BATCHES[2], 1, shards),
        _plan(layers, BATCHES[3], 2, Strategy(), (0, 2, len(layers))),
    ]  # fmt: skip
    phases = [PlannedPhase(str(place), 0, STEPS, SEQUENCES[place], plan) for place, plan in enumerate(plans)]
    parallel = ParallelModel(model, plans[0], layers, phase_batch(0), device="cpu")
    parallel.steering = Phases(parallel, PhasedPlan(1, in_order(phases)))
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2)
    refused = ""
    try:
        parallel.train_step(phase_batch(STEPS), optimizer)
    except InputError as error:
        refused = str(error)
    losses, splits = [], []
    for step in range(STEPS * len(plans)):
        assert parallel.phase.sequence == SEQUENCES[step // STEPS]
        losses.append(float(parallel.train_step(phase_batch(step), optimizer)))
        if step % STEPS == 0:
            splits.append(str(parallel.plan.stages[0].runs[0].strategy))
    return losses, splits, refused


def train_alone() -> list[float]:
    """The losses of plain PyTorch."""
    torch.manual_seed(0)
    model: Any = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return losses_alone(model, optimizer, map(phase_batch, range(STEPS * len(BATCHES))))


def test_phases_train_as_one_process_does(pool: WorkerPool) -> None:
    losses, splits, refused = pool.run(2, train_in_phases)[0]
    assert losses == pytest.approx(train_alone(), rel=1e-5)
    assert splits == ["data2", "data2", "zero3x2", "unsplit"]
    assert f"give {BATCHES[0]}" in refused
