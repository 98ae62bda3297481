"""A resumed run continues bit for bit under the same plan, and from the same state under others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite import auto_parallelize
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.store import write_profile
from galvatron_lite.runtime.checkpoint.unsplit import load_into
from tests.factories import make_cluster
from tests.pool import WorkerPool
from tests.runtime.checkpoint.jobs import (
    ADAMW,
    Case,
    Position,
    go_on,
    groups_of,
    load,
    make_net,
    make_run,
    make_scheduler,
    moments,
    same,
    save,
)
from tests.runtime.plans import losses_alone, split_model

PAIR, ZERO = Strategy(data=2), Strategy(zero=2, zero_stage=3)
HYBRID, FOUR = Strategy(data=2, zero=2, zero_stage=2), Strategy(zero=4, zero_stage=3)
MIXED = Case([HYBRID, FOUR, HYBRID, Strategy(data=4), HYBRID])
STAGES = Case([PAIR, ZERO, PAIR, ZERO, PAIR], cuts=[2], microbatches=2)
VIRTUAL = Case([PAIR, ZERO, PAIR, ZERO, PAIR], cuts=[1, 2, 4], microbatches=4, virtual=2)
TWO, ALL = Case([ZERO, PAIR, ZERO, PAIR, ZERO]), Case([FOUR] * 5)


def resumed_exactly(folder: str) -> None:
    for number, (case, asynchronous) in enumerate([(MIXED, True), (VIRTUAL, False)]):
        run = make_run(case)
        go_on(run, 2)
        place = Path(folder, f"case-{number}", "two")
        save(run, place, asynchronous=asynchronous, extra={"best": 0.5})
        wanted = go_on(run, 2)
        run[0].finish_saving()
        other = make_run(case, seed=9)
        go_on(other, 1)
        resumed = load(other, place)
        assert (resumed.step, resumed.extra, resumed.exact) == (2, {"best": 0.5}, True)
        assert go_on(other, 2) == wanted
        assert other[0].step == 4
        same(other[0].full_state_dict(), run[0].full_state_dict())
        same(moments(other[1], other[0]), moments(run[1], run[0]))
        buffers = dict(run[0].module.named_buffers())
        same(dict(other[0].module.named_buffers()), buffers)


def test_a_resumed_run_equals_one_that_was_not_stopped(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(4, resumed_exactly, folder=str(tmp_path))


def first_leg(case: Case, folder: str) -> Any:
    run = make_run(case)
    go_on(run, 2)
    save(run, Path(folder, "one"), keep=1)
    return state_of(run)


def next_leg(case: Case, folder: str, name: str) -> Any:
    """Resume with another number of processes: the state after loading, and that of the next checkpoint."""
    run = make_run(case, seed=5)
    parallel, optimizer, scheduler, data = run
    resumed = parallel.load_latest(folder, optimizer, scheduler=scheduler, data=data)
    assert not resumed.exact
    loaded = state_of(run)
    go_on(run, 1)
    save(run, Path(folder, name), keep=1)
    return loaded, state_of(run)


def state_of(run: Any) -> Any:
    parallel, optimizer, scheduler, data = run
    rates = {
        name: {key: group[key] for key in ("lr", "initial_lr", "weight_decay")}
        for group in optimizer.param_groups
        for name, one in parallel.module.named_parameters()
        if any(one is mine for mine in group["params"])
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rates)
    rates = {name: rate for theirs in everyone for name, rate in theirs.items()}
    state, states = parallel.full_state_dict(), moments(optimizer, parallel)
    return state, states, rates, data.state_dict(), scheduler.last_epoch, parallel.step


def assert_alike(found: Any, wanted: Any) -> None:
    same(found[0], wanted[0])
    same(found[1], wanted[1])
    known = {name.replace("leave.", "enter."): rate for name, rate in wanted[2].items()}
    assert {name.replace("leave.", "enter."): rate for name, rate in found[2].items()} == known
    assert found[3:] == wanted[3:]


def test_a_run_goes_on_with_another_number_of_processes(pool: WorkerPool, tmp_path: Path) -> None:
    """Stages on four processes, then two processes, then ZeRO-3 on four; then plain torch in one."""
    wanted = pool.run(4, first_leg, case=STAGES, folder=str(tmp_path))[0]
    for world, case, name in ((2, TWO, "two"), (4, ALL, "all")):
        legs = pool.run(world, next_leg, case=case, folder=str(tmp_path), name=name)
        for loaded, _ in legs:
            assert_alike(loaded, wanted)
        wanted = legs[0][1]
        assert [one.name for one in tmp_path.iterdir()] == [name], "the ones before are deleted: keep=1"
    model = make_net(seed=3)
    optimizer = torch.optim.AdamW(groups_of(model), **ADAMW)  # type: ignore[arg-type]
    scheduler, data = make_scheduler(optimizer), Position()
    resumed = load_into(model, tmp_path / "all", optimizer, scheduler=scheduler, data=data)
    same(dict(model.state_dict()), wanted[0])
    states = {
        f"{name}/{key}": value for name, one in model.named_parameters() for key, value in optimizer.state[one].items()
    }
    same(states, wanted[1])
    assert (data.state_dict(), scheduler.last_epoch, resumed.step) == wanted[3:]


class Counting(torch.optim.SGD):
    """An optimizer with a number, and a tensor of another dtype than its parameter, among its states."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                state["seen"] = state.get("seen", 0) + 1
                state["sum"] = state.get("sum", torch.zeros_like(one, dtype=torch.float32)) + one.grad.float()
        return super().step(closure)


def test_numbers_and_other_dtypes_among_states_come_back(tmp_path: Path) -> None:
    kept = []
    for steps in (2, 0):
        parallel = make_run(Case([Strategy()] * 5))[0]
        optimizer = parallel.optimizer(Counting, lr=0.1)
        for _ in range(steps):
            parallel.train_step(Position().next(), optimizer)
        if steps:
            parallel.save(tmp_path / "one", optimizer)
        else:
            parallel.load(tmp_path / "one", optimizer)
        kept.append(list(optimizer.state.values()))
    assert len(kept[0]) > 3
    for before, after in zip(*kept, strict=True):
        assert before["seen"] == after["seen"] == 2
        assert before["sum"].dtype is after["sum"].dtype is torch.float32
        assert torch.equal(before["sum"], after["sum"])


def test_frozen_parameters_need_no_states(tmp_path: Path) -> None:
    """The saved optimizer has only trained parameters, as DeepSpeed's; the loading one has all."""
    parallel, model = make_run(Case([Strategy()] * 5))[0], make_net(seed=1)
    for one in (parallel.module, model):
        one.enter.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in parallel.parameters() if one.requires_grad])
    parallel.train_step(Position().next(), optimizer)
    parallel.save(tmp_path / "one", optimizer)
    load_into(model, tmp_path / "one", again := torch.optim.AdamW(model.parameters()))
    same(model.state_dict(), parallel.full_state_dict())
    assert len(again.state) == len(optimizer.state) == len(list(model.parameters())) - 1


class Counted(nn.Linear):
    """Has a count as extra state, and a tensor in ``state_dict()`` that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0
        self.register_state_dict_post_hook(_add_version)
        self.register_load_state_dict_pre_hook(_drop_version)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += self.training
        return hidden + super().forward(hidden) / self.calls


def _add_version(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    state[f"{prefix}version"] = torch.tensor(2)


def _drop_version(_module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    state.pop(f"{prefix}version", None)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counted() for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs.square().mean()


def counting(folder: str) -> list[float]:
    """The losses of two steps with two stages, and of two steps with data parallelism after a checkpoint."""
    batch, losses = torch.ones(4, 4), []
    for strategy, cuts in ((Strategy(), [1]), (PAIR, [])):
        torch.manual_seed(0)
        parallel = split_model(Counts(), batch, strategy, cuts)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        if cuts:
            losses += [float(parallel.train_step(batch, optimizer)) for _ in range(2)]
            parallel.save(folder, optimizer)
        else:
            parallel.load(folder, optimizer)
            losses += [float(parallel.train_step(batch, optimizer)) for _ in range(2)]
    return losses


def test_state_that_is_no_tensor_comes_back(pool: WorkerPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Counts(), torch.ones(4, 4)
    wanted = losses_alone(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch] * 4)
    for losses in pool.run(2, counting, folder=str(tmp_path / "two")):
        assert losses == pytest.approx(wanted, rel=1e-5)
    model = Counts()
    load_into(model, tmp_path / "two", optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    assert losses_alone(model, optimizer, [batch] * 2) == pytest.approx(wanted[2:], rel=1e-5)


SAMPLES, TOKENS, VOCAB = 8, 8, 32
ROUNDED = {"lr": 1e-2, "eps": 1e-4}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return build("gpt-tiny", vocab=VOCAB, layers=2, hidden=32, sequence=TOKENS)


def batch_of(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def estimate(folder: str) -> None:
    """Write an estimated profile for each number of processes."""
    from galvatron_lite.capture.trace import trace

    graph = trace(make_model(), batch_of(0))
    for world in (1, 2, 4):
        profile = estimate_profile(graph, make_cluster(world), precision="fp32", name="tiny")
        write_profile(profile, Path(folder, f"{world}.yaml"))


def script(folder: str, steps: int) -> tuple[int, list[float], dict[str, Tensor], str]:
    """The script of a user: returns the first step, the losses, the weights, and the devices of the plan."""
    parallel: Any = auto_parallelize(make_model(), batch_of(0), profile=Path(folder, f"{dist.get_world_size()}.yaml"))
    optimizer = parallel.optimizer(torch.optim.AdamW, **ROUNDED)
    parallel.load_latest(Path(folder, "checkpoints"), optimizer)
    first, losses = parallel.step, []
    while parallel.step < steps:
        losses.append(float(parallel.train_step(batch_of(parallel.step), optimizer)))
        parallel.save(Path(folder, "checkpoints", f"step-{parallel.step}"), optimizer, asynchronous=True, keep=2)
    parallel.finish_saving()
    return first, losses, parallel.full_state_dict(), f"{parallel.plan.devices} devices"


def trained_alone(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), **ROUNDED)  # type: ignore[arg-type]
    losses = losses_alone(model, optimizer, map(batch_of, range(steps)))
    return losses, dict(model.state_dict())


def test_two_processes_then_one_then_four(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, estimate, folder=str(tmp_path))
    losses: list[float] = []
    for world, steps in ((2, 2), (1, 4), (4, 6)):
        first, found, state, plan = pool.run(world, script, folder=str(tmp_path), steps=steps)[0]
        assert (first, plan) == (steps - 2, f"{world} devices")
        losses += found
    wanted, whole = trained_alone(6)
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)
    for name, value in whole.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
    assert sorted(one.name for one in Path(tmp_path, "checkpoints").iterdir()) == ["step-5", "step-6"]
