"""What the tests of branches run on every rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite import auto_parallelize
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Mode, Plan
from galvatron_lite.runtime.branches.engine import BranchedModel
from galvatron_lite.runtime.parameters.full_state import full_gradients
from tests.runtime.branches.networks import ONE, Case, layers_of, make_batch, make_model, make_plan
from tests.runtime.training import ADAMW, Trained, train_plainly

BRANCHES = ("segmentation", "reconstruction")


def perception() -> tuple[nn.Module, dict[str, Tensor]]:
    """The small perception network, and a batch of two."""
    torch.manual_seed(2)
    model = build("perception-mini")
    return model, model.example_batch(2)


def perception_plan(trunk: Strategy = ONE, mode: Mode = Mode.TRAINING, samples: int = 2) -> Plan:
    """Each network on a device of its own."""
    case = Case("", {name: ((name,), number, 1, ONE) for number, name in enumerate(BRANCHES)}, trunk, 2, samples)
    return replace(make_plan(case, discover_layers(*perception())), mode=mode)


def train_perception(steps: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    model, batch = perception()
    parallel: Any = auto_parallelize(model, batch, plan=perception_plan(), device="cpu")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.05)
    losses = [float(parallel.train_step(batch, optimizer)) for _ in range(steps)]
    return losses, parallel.full_state_dict()


def infer_perception(trunk: Strategy) -> Any:
    model, batch = perception()
    made: Any = auto_parallelize(model, batch, plan=perception_plan(trunk), mode="inference", device="cpu")
    pictures = batch["pictures"]
    return [made(pictures), made(pictures=pictures), made({"pictures": pictures}), made((pictures,))]


def used(case: Case) -> tuple[float, ...]:
    """A loss and the norm of its gradient, as in a usual loop; the loss of the model's call in evaluation mode without
    gradients, and from ``outputs``.
    """
    parallel, batch = make_branched(case), make_batch(case)
    loss = parallel(**batch)
    loss.backward()
    norm = parallel.clip_grad_norm(1.0)
    parallel.eval()
    with torch.no_grad():
        return float(loss), float(norm), float(parallel(**batch)), float(parallel.outputs(**batch))


def one_rank_is_late(case: Case, patience: float) -> str:
    """What the first rank says when the other, whose branch it waits for, does nothing."""
    parallel = make_branched(case, timeout=patience)
    if dist.get_rank() == 1:
        time.sleep(4 * patience)
        return ""
    try:
        parallel.backward_step(make_batch(case))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def wrong_model(case: Case) -> str:
    """The error of a model whose second branch reads what the first returned."""
    parallel = make_branched(case)
    try:
        parallel.backward_step(make_batch(case))
    except ValueError as error:
        return str(error)
    return "nothing happened"


class Dropping(nn.Module):
    """Branches of which one draws random numbers, and a trunk that draws some behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5))
        self.second = nn.Linear(6, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, values: Tensor) -> Tensor:
        joined = self.first(values) + self.second(values)
        return self.last(torch.nn.functional.dropout(joined, 0.5)).square().mean()


def train_dropping(steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and the trunk's parameters on this rank."""
    torch.manual_seed(dist.get_rank())
    case = Case("Dropping", {"a": (("first",), 0, 1, ONE), "b": (("second",), 1, 1, ONE)}, ONE, 2)
    model, batch = Dropping(), torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    layers = layers_of(case, model)
    parallel = BranchedModel(model, make_plan(case, layers), layers, batch, device="cpu")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    losses = [float(parallel.train_step(batch, optimizer)) for _ in range(steps)]
    return losses, {name: value.detach() for name, value in parallel.module.last.named_parameters()}


def initial_state(case: Case) -> dict[str, Tensor]:
    """Of a model that was built on the meta device."""
    with torch.device("meta"):
        model = make_model(case)
    layers = layers_of(case, model)
    return BranchedModel(
        model, make_plan(case, layers), layers, make_batch(case), device="cpu", init_fn=fill, seed=7
    ).full_state_dict()  # fmt: skip


def fill(module: nn.Module) -> None:
    """Initial values of what has no rule of its own."""
    for name, tensor in module.named_parameters(recurse=False):
        if name in ("weight", "scale") and tensor.dim() < 2 and not hasattr(module, "reset_parameters"):
            torch.nn.init.uniform_(tensor)


def in_bf16(case: Case) -> list[float]:
    """Losses of some steps."""
    parallel = make_branched(case)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.05)
    return [float(parallel.train_step(make_batch(case), optimizer)) for _ in range(3)]


def make_branched(case: Case, **options: Any) -> BranchedModel:
    model = make_model(case)
    layers = layers_of(case, model)
    return BranchedModel(model, make_plan(case, layers), layers, make_batch(case), device="cpu", **options)


def train(case: Case, steps: int = 2) -> Trained:
    """Gradients of the first step, losses of all, the state after the last."""
    parallel = make_branched(case, max_grad_norm=case.max_grad_norm)
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    batch = make_batch(case)
    state = parallel.full_state_dict()
    parallel.backward_step(batch)
    gradients = full_gradients(parallel)
    optimizer.zero_grad()
    parallel.load_full_state_dict(state)
    losses = [float(parallel.train_step(batch, optimizer)) for _ in range(steps)]
    return Trained(losses, gradients, parallel.full_state_dict())


def train_each(cases: Mapping[str, Case]) -> dict[str, Trained]:
    """The same of several cases, one after another in the same processes."""
    return {name: train(case) for name, case in cases.items()}


def train_alone(case: Case, steps: int = 2) -> Trained:
    """One process, plain torch."""
    return train_plainly(make_model(case), make_batch(case), case.max_grad_norm, steps)
