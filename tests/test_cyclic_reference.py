"""The reference of delayed gradient descent, against closed forms and against plain torch."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from .cyclic_reference import is_fresh, train_reference

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


class Blocks(nn.Module):
    """Input of 3 numbers, as many hidden layers as stages, mean squared error."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(count))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.mse_loss(x, y)


def batches_of(steps: int, count: int, width: int = 3, target: int | None = 3) -> list[list[tuple[Tensor, Tensor]]]:
    ys = (4, target) if target else (4,)
    return [[(torch.randn(4, width), torch.randn(ys)) for _ in range(count)] for _ in range(steps)]


@pytest.fixture(autouse=True)
def doubles() -> None:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def plain(model: nn.Module, batches: list, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[float]:
    optimizer = make(list(model.parameters()))
    losses = []
    for micro_batches in batches:
        optimizer.zero_grad()
        loss = sum(model(*one) for one in micro_batches) / len(micro_batches)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("rule", "count"), [("dp", 3), ("dp", 1), ("cdp-v2", 1)])
def test_fresh_gradients_are_those_of_plain_torch(name: str, rule: str, count: int) -> None:
    model, batches = Blocks(count), batches_of(6, count)
    before = copy.deepcopy(model.state_dict())
    stages = [[f"blocks.{stage}"] for stage in range(count)]
    steps = train_reference(model, stages, batches, optimizer_factory=OPTIMIZERS[name], rule=rule)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    losses = plain(model, batches, OPTIMIZERS[name])
    assert [step.loss for step in steps] == pytest.approx(losses, abs=1e-13)
    for key, value in model.named_parameters():
        torch.testing.assert_close(steps[-1].parameters[key], value.detach(), rtol=0, atol=1e-13)


def test_one_worker_of_the_first_rule_is_one_step_late() -> None:
    """Against a loop over a list of all versions: gradients at theta_{t-1} move theta_t, with momentum."""
    model, batches = Blocks(1), batches_of(5, 1)
    steps = train_reference(
        model, [["blocks"]], batches, optimizer_factory=partial(torch.optim.SGD, lr=0.1, momentum=0.5), rule="cdp-v1"
    )
    vector = nn.utils.parameters_to_vector
    versions, speed = [vector(model.parameters()).detach()] * 2, torch.zeros(12)
    for (micro_batch,) in batches:
        nn.utils.vector_to_parameters(versions[-2], model.parameters())
        gradient = torch.cat([one.flatten() for one in torch.autograd.grad(model(*micro_batch), model.parameters())])
        speed = 0.5 * speed + gradient
        versions.append(versions[-1] - 0.1 * speed)
    torch.testing.assert_close(vector(steps[-1].parameters.values()), versions[-1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("count", range(1, 9))
def test_second_rule_uses_whatever_is_there(count: int) -> None:
    """Fresh where the last worker's backward pass of the step before has ended when the forward pass begins."""
    for worker in range(1, count + 1):
        for stage in range(1, count + 1):
            made = 2 * (count - 1) + 2 * count - stage
            needed = 2 * count + 2 * (worker - 1) + stage - 1
            assert is_fresh("cdp-v2", worker, stage, count) == (made < needed)


def test_batch_norm_sees_the_micro_batches_in_order() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.mse_loss(self.last(self.norm(self.first(x))), y)

    model, batches = Normed(), batches_of(3, 2)
    frozen = partial(torch.optim.SGD, lr=0.0)
    steps = train_reference(model, [["first"], ["norm", "last"]], batches, optimizer_factory=frozen)
    for micro_batches in batches:
        for one in micro_batches:
            model(*one)
    for name, value in model.named_buffers():
        torch.testing.assert_close(steps[-1].buffers[name], value)
