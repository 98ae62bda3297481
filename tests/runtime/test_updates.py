"""ZeRO-1 and states on the host in a loop of one's own; loss scaling as torch's own scaler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from galvatron_lite.errors import InputError, NonFiniteLossError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.guard import guard_values
from galvatron_lite.runtime.scaling import SMALLEST, LossScaler
from tests.equivalence.plans import write_plan
from tests.pool import WorkerPool
from tests.runtime.plans import split_model

SIZE, SAMPLES = 6, 8
STRATEGIES = {
    "rows": Strategy(zero=2, zero_stage=1),
    "host": Strategy(data=2, offload=Offload.STATES),
    "rows on the host": Strategy(zero=2, zero_stage=1, offload=Offload.STATES),
    "shards on the host": Strategy(zero=2, zero_stage=3, offload=Offload.STATES),
}
Loop = Callable[..., None]


class Chain(nn.Module):
    """Layers of 6, 5 and one row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(SIZE, 5), nn.Linear(5, SIZE)])
        self.head = nn.Linear(SIZE, 1)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = rows
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        loss: Tensor = self.head(hidden).square().mean()
        return loss


def make_model(transposed: bool = False) -> nn.Module:
    torch.manual_seed(1)
    model = Chain()
    if transposed:
        block = model.blocks[1]
        block.weight = nn.Parameter(block.weight.detach().t().contiguous().t())
    return model


def batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [{"rows": torch.randn(SAMPLES, SIZE, generator=draw)} for _ in range(4)]


def parallel_of(strategy: Strategy) -> ParallelModel:
    # FSDP takes no such weights
    model, (batch, *_) = make_model(transposed=strategy.zero_stage < 3), batches()
    return split_model(model, batch, strategy)


def accumulates(model: Any, optimizer: torch.optim.Optimizer, publish: bool) -> None:
    """Two backward passes a step; then gradients zeroed in place, changed by hand, clipped."""
    first, second, third, fourth = batches()
    for batch in (first, second):
        model(**batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model(**third).backward()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
    model(**fourth).backward()
    clip = model.clip_grad_norm if publish else lambda size: nn.utils.clip_grad_norm_(model.parameters(), size)
    clip(0.1)
    optimizer.step()
    optimizer.zero_grad()
    if publish:
        model.publish()


def synchronises_once(model: Any, optimizer: torch.optim.Optimizer, publish: bool) -> None:
    first, *others, last = batches()
    if publish:
        with model.no_sync():
            for batch in (first, *others):
                model(**batch).backward()
    else:
        for batch in (first, *others):
            model(**batch).backward()
    model(**last).backward()
    optimizer.step()
    optimizer.zero_grad()


def alone(loop: Loop) -> dict[str, Tensor]:
    model = make_model()
    loop(model, torch.optim.AdamW(model.parameters(), lr=0.05), publish=False)
    return {name: one.detach() for name, one in model.named_parameters()}


def run_loops(loops: Mapping[str, Loop]) -> dict[tuple[str, str, bool], dict[str, Tensor]]:
    found = {}
    for strategy in STRATEGIES:
        for name, loop in loops.items():
            for own in (False, True):
                parallel = parallel_of(STRATEGIES[strategy])
                make = torch.optim.AdamW
                optimizer = make(parallel.param_groups(), lr=0.05) if own else parallel.optimizer(make, lr=0.05)
                loop(parallel, optimizer, publish=True)
                found[strategy, name, own] = parallel.full_state_dict()
                _check_held(parallel, optimizer, STRATEGIES[strategy])
    return found


def _check_held(parallel: ParallelModel, optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    guard_values(parallel.runtime.owned, guarded=False)  # this reads parts
    items, storages = 0, {id(one.parameter): one for one in parallel.runtime.owned}
    for one in storages.values():
        assert isinstance(one.reduced, DTensor) == (strategy.zero_stage > 0)
        assert (one.host is not None) == strategy.offloads_states
        local = one.reduced.to_local() if isinstance(one.reduced, DTensor) else one.reduced
        for value in optimizer.state[one.updated].values():
            held = value.to_local() if isinstance(value, DTensor) else value
            assert held.shape in ((), local.shape)
            items += held.numel() if held.dim() else 0
        if one.host is not None:
            assert one.updated is one.host.copy
            assert one.updated.untyped_storage().data_ptr() != local.untyped_storage().data_ptr()
            assert torch.equal(one.updated, local)
        elif one.share is not None:
            assert local.untyped_storage().data_ptr() == one.parameter.untyped_storage().data_ptr()
    total = torch.tensor(items)
    dist.all_reduce(total)
    copies = 2 // strategy.zero
    assert int(total) == 2 * copies * sum(one.numel() for one in make_model().parameters())


def test_loops_of_one_s_own_train_like_one_process(pool: WorkerPool) -> None:
    loops = {"accumulates": accumulates, "synchronises once": synchronises_once}
    expected = {name: alone(loop) for name, loop in loops.items()}
    for rank in pool.run(2, run_loops, loops=loops):
        for (strategy, loop, own), state in rank.items():
            for name, value in expected[loop].items():
                assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-6), f"{strategy}, {loop}, {own}: {name}"


def loads() -> None:
    parallel, (batch, *_) = parallel_of(STRATEGIES["rows on the host"]), batches()
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    start = parallel.full_state_dict()
    before = float(parallel.train_step(batch, optimizer))
    assert float(parallel(**batch)) < before
    parallel.load_full_state_dict(start)
    assert float(parallel.train_step(batch, optimizer)) == before
    assert parallel.state_dict() is not None


def test_loaded_values_reach_the_host(pool: WorkerPool) -> None:
    pool.run(2, loads)


FEATURES, ROWS, STEPS, LEARNING_RATE, LARGEST = 8, 8, 6, 0.05, 0.5
FIRST, INTERVAL = 2.0**14, 2


class Overflowing(nn.Module):
    """Three layers; one factor of the batch multiplies gradients, not the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))

    def forward(self, inputs: Tensor, times: Tensor) -> Tensor:
        hidden = inputs
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        loss = hidden.float().square().mean()
        return loss + (times.mean() - 1.0) * (loss - loss.detach())


def make_overflowing() -> nn.Module:
    torch.manual_seed(1)
    return Overflowing()


def make_batches() -> list[dict[str, Tensor]]:
    """Steps 2 and 3 have gradients that overflow fp16 when they are scaled."""
    draw = torch.Generator().manual_seed(2)
    rows = [torch.randn(ROWS, FEATURES, generator=draw) for _ in range(STEPS)]
    times = [1e6 if number in (2, 3) else 1.0 for number in range(STEPS)]
    return [{"inputs": one, "times": torch.full((ROWS,), size)} for one, size in zip(rows, times, strict=True)]


def scaled_alone() -> tuple[list[float], dict[str, Tensor]]:
    model = make_overflowing()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST, growth_interval=INTERVAL)
    scales = []
    for batch in make_batches():
        with torch.autocast("cpu", torch.float16):
            loss = model(**batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, {name: one.detach() for name, one in model.named_parameters()}


def plans(world: int) -> dict[str, Plan]:
    names = [layer.name for layer in discover_layers(make_overflowing(), make_batches()[0])]
    split: dict[str, tuple[int, Strategy]] = {
        "data": (1, Strategy(data=world)),
        "rows and host": (1, Strategy(zero=world, zero_stage=1, offload=Offload.STATES)),
        "shards": (1, Strategy(zero=world, zero_stage=3)),
        "stages": (2, Strategy(data=world // 2)),
    }
    found = {}
    for name, (stages, strategy) in split.items():
        cut = [names] if stages == 1 else [names[:1], names[1:]]
        found[name] = write_plan(cut, dict.fromkeys(names, strategy), devices=world, batch=ROWS, microbatches=stages)
    return found


def under_plan(plan: Plan, own_loop: bool) -> tuple[list[float], dict[str, Tensor]]:
    model, batches = make_overflowing(), make_batches()
    layers = discover_layers(model, batches[0])
    parallel = ParallelModel(model, plan, layers, batches[0], device="cpu", precision="fp16", max_grad_norm=LARGEST)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9)
    scaler = parallel.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": FIRST, "growth_interval": INTERVAL})
    scales = []
    for batch in batches:
        if own_loop:
            scaler.scale(parallel(batch)).backward()
            scaler.unscale_(optimizer)
            parallel.clip_grad_norm(LARGEST)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        else:
            assert bool(parallel.train_step(batch, optimizer).isfinite())
        scales.append(scaler.get_scale())
    return scales, parallel.full_state_dict()


def all_plans(found: dict[str, Plan]) -> list[Any]:
    kinds = [(plan, own) for plan in found.values() for own in (False, True) if len(plan.stages) == 1 or not own]
    result = [under_plan(plan, own) for plan, own in kinds]
    dist.barrier()
    return result


def test_scales_and_weights_are_those_of_torch_s_scaler(pool: WorkerPool) -> None:
    scales, weights = scaled_alone()
    assert min(scales) < FIRST < max(scales)
    for rank in pool.run(2, all_plans, found=plans(2)):
        for found, state in rank:
            assert found == scales
            for name, value in weights.items():
                torch.testing.assert_close(state[name], value, rtol=2e-3, atol=2e-3)


def scaler_of(norms: list[float]) -> tuple[LossScaler, list[float]]:
    multiplied: list[float] = []
    left = iter(norms)
    return LossScaler(lambda: torch.tensor(next(left)), lambda factor: multiplied.append(float(factor))), multiplied


def test_a_gradient_that_is_never_finite_is_an_error() -> None:
    scaler, _ = scaler_of([float("nan")] * 40)
    with pytest.raises(NonFiniteLossError, match="fp16 is not why"):  # noqa: PT012
        for _ in range(40):
            scaler.unscale_()
            scaler.update()
    assert scaler.get_scale() < SMALLEST


def test_unscaled_once_a_step_and_saved() -> None:
    scaler, multiplied = scaler_of([1.0, 1.0])
    scaler.unscale_()
    scaler.unscale_()
    assert multiplied == [2.0**-16]
    scaler.update()
    torch_s = torch.amp.GradScaler("cpu")
    torch_s.scale(torch.ones(1))
    assert set(scaler.state_dict()) == set(torch_s.state_dict())
    scaler.load_state_dict({**torch_s.state_dict(), "scale": 8.0})
    assert float(scaler.scale(torch.ones((), dtype=torch.float16))) == 8.0
    with pytest.raises(InputError, match=r"scaler\.step"):
        scaler.update()
    with pytest.raises(InputError, match="growth_interval"):
        scaler.load_state_dict({"scale": 1.0})
