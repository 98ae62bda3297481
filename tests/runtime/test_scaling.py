"""Loss scaling under fp16: the same scales, skipped steps and weights as torch's own scaler in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError, NonFiniteLossError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.scaling import SMALLEST, LossScaler
from tests.equivalence.plans import write_plan
from tests.pool import WorkerPool

SIZE, SAMPLES, STEPS, LEARNING_RATE, LARGEST = 8, 8, 6, 0.05, 0.5
FIRST, INTERVAL = 2.0**14, 2


class Chain(nn.Module):
    """Three layers; one factor of the batch multiplies gradients, not the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, inputs: Tensor, times: Tensor) -> Tensor:
        hidden = inputs
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        loss = hidden.float().square().mean()
        return loss + (times.mean() - 1.0) * (loss - loss.detach())


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return Chain()


def make_batches() -> list[dict[str, Tensor]]:
    """Steps 2 and 3 have gradients that overflow fp16 when they are scaled."""
    draw = torch.Generator().manual_seed(2)
    rows = [torch.randn(SAMPLES, SIZE, generator=draw) for _ in range(STEPS)]
    times = [1e6 if number in (2, 3) else 1.0 for number in range(STEPS)]
    return [{"inputs": one, "times": torch.full((SAMPLES,), size)} for one, size in zip(rows, times, strict=True)]


def alone() -> tuple[list[float], dict[str, Tensor]]:
    model = make_model()
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
    names = [layer.name for layer in discover_layers(make_model(), make_batches()[0])]
    split: dict[str, tuple[int, Strategy]] = {
        "data": (1, Strategy(data=world)),
        "rows and host": (1, Strategy(zero=world, zero_stage=1, offload=Offload.STATES)),
        "shards": (1, Strategy(zero=world, zero_stage=3)),
        "stages": (2, Strategy(data=world // 2)),
    }
    found = {}
    for name, (stages, strategy) in split.items():
        cut = [names] if stages == 1 else [names[:1], names[1:]]
        found[name] = write_plan(cut, dict.fromkeys(names, strategy), devices=world, batch=SAMPLES, microbatches=stages)
    return found


def under_plan(plan: Plan, own_loop: bool) -> tuple[list[float], dict[str, Tensor]]:
    model, batches = make_model(), make_batches()
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
    scales, weights = alone()
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
