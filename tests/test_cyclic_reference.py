"""The reference of delayed gradient descent, against closed forms and against plain torch."""

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from .cyclic_reference import RULES, is_fresh, train_reference

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


class Sum(nn.Module):
    """A linear model whose stages each take one column of the input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(1) for _ in range(count))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * ((x @ torch.cat(list(self.weights)) - y) ** 2).sum()


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


def closed_form(model: Sum, micro_batches: list[tuple[Tensor, Tensor]], rule: str, steps: int, lr: float) -> np.ndarray:
    """theta_T of the same batch at every step: the affine recurrence of (theta_t, theta_{t-1}) as a matrix power.

    theta_{t+1} = theta_t - lr/N sum_i A_i (D_i theta_t + (1 - D_i) theta_{t-1}) - b_i, with D_i 1 where i + j > N.
    """
    count = len(micro_batches)
    start = torch.cat(list(model.weights)).detach().numpy()
    matrix = np.zeros((2 * count + 1, 2 * count + 1))
    matrix[:count, :count] = matrix[count : 2 * count, :count] = np.eye(count)
    matrix[-1, -1] = 1.0
    for worker, (x, y) in enumerate(micro_batches, 1):
        square, offset = (x.T @ x).numpy(), (x.T @ y).numpy()
        fresh = np.array(
            [{"cdp-v1": 0.0, "cdp-v2": float(worker + stage > count)}[rule] for stage in range(1, count + 1)]
        )
        matrix[:count, :count] -= lr / count * square * fresh
        matrix[:count, count : 2 * count] -= lr / count * square * (1 - fresh)
        matrix[:count, -1] += lr / count * offset
    return (np.linalg.matrix_power(matrix, steps) @ np.concatenate([start, start, [1.0]]))[:count]


@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_linear_model_follows_the_closed_form(rule: str, count: int) -> None:
    model, micro_batches = Sum(count), batches_of(1, count, count, None)[0]
    stages = [[f"weights.{stage}"] for stage in range(count)]
    steps = train_reference(
        model, stages, [micro_batches] * 20, optimizer_factory=partial(torch.optim.SGD, lr=0.02), rule=rule
    )
    expected = closed_form(model, micro_batches, rule, 20, 0.02)
    np.testing.assert_allclose(torch.cat(list(steps[-1].parameters.values())).numpy(), expected, rtol=0, atol=1e-12)


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


def test_the_rules_differ_from_the_second_step_on() -> None:
    model, batches = Blocks(3), batches_of(3, 3)
    stages = [[f"blocks.{stage}"] for stage in range(3)]
    curves = [[step.loss for step in train_reference(model, stages, batches, rule=rule)] for rule in RULES]
    assert len({curve[0] for curve in curves}) == 1
    assert len({curve[1] for curve in curves}) == 3


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


def test_a_scheduler_steps_once_a_step() -> None:
    model, batches = Blocks(2), batches_of(4, 2)
    stages = [["blocks.0"], ["blocks.1"]]
    off = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[2], gamma=0.0)
    steps = train_reference(model, stages, batches, scheduler_factory=off)
    third, last = steps[1].parameters, steps[3].parameters
    assert all(torch.equal(third[name], last[name]) for name in last)


def test_stages_must_share_out_all_parameters() -> None:
    for stages in ([["blocks.0"], ["blocks"]], [["blocks.0"], []]):
        with pytest.raises(AssertionError, match="belongs to stages"):
            train_reference(Blocks(2), stages, batches_of(1, 2))


@pytest.mark.parametrize(("rule", "limit"), [("dp", 3.8), ("cdp-v1", 0.1)])
@pytest.mark.parametrize("side", [0.97, 1.03])
def test_delay_lowers_the_rate_at_which_momentum_is_stable(rule: str, limit: float, side: float) -> None:
    """On a parabola of curvature 1: 2 (1 + m), and 1 - m with every gradient a step late, where |roots| = 1 of
    z^2 - (1 + m - a) z + m, and of z^2 - (1 + m) z + m + a.
    """
    model, batch = Sum(1), [(torch.ones(1, 1), torch.zeros(1))]
    optimizer = partial(torch.optim.SGD, lr=side * limit, momentum=0.9)
    steps = train_reference(model, [["weights"]], [batch] * 600, optimizer_factory=optimizer, rule=rule)
    start, late = steps[0].loss, max(step.loss for step in steps[-20:])
    assert late < start if side < 1 else late > start
