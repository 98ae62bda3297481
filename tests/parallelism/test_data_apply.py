"""Gradient reduction on two ranks against one process that sees all samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.parallelism.data.apply import GradientReducer, Reduced
from tests.pool import WorkerPool

TINY_BUCKET = 64


class Branches(nn.Module):
    """``dead`` is never used; ``sometimes`` is used where the first sample is positive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.sometimes, self.dead = nn.Linear(8, 2), nn.Linear(3, 3)

    def forward(self, samples: Tensor) -> Tensor:
        hidden = torch.relu(self.first(samples))
        chosen = self.second(hidden) + (self.sometimes(hidden) if samples[0, 0] > 0 else 0.0)
        return chosen.square().mean()


def samples() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(4, 4, generator=generator).abs()
    values[2:, 0] *= -1
    return values


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def expected(passes: int = 1) -> dict[str, Tensor | None]:
    """One process: the mean of the two halves' losses, ``passes`` times."""
    model, values = Branches(), samples()
    for _ in range(passes):
        (model(values[:2]) / 2 + model(values[2:]) / 2).backward()
    return gradients(model)


def own_loss(model: Branches) -> Tensor:
    start = 2 * dist.get_rank()
    loss: Tensor = model(samples()[start : start + 2]) / 2
    return loss


def make() -> tuple[Branches, GradientReducer]:
    model = Branches()
    reduced = [Reduced(parameter, dist.group.WORLD) for parameter in model.parameters()]
    return model, GradientReducer(reduced, TINY_BUCKET)


def once() -> dict[str, Tensor | None]:
    model, reducer = make()
    loss = own_loss(model)
    reducer.watch(loss)
    loss.backward()
    return gradients(model)


def explicitly() -> dict[str, Tensor | None]:
    model, reducer = make()
    loss = own_loss(model)
    reducer.begin()
    loss.backward()
    reducer.finish()
    return gradients(model)


def after_zeroing(to_none: bool) -> dict[str, Tensor | None]:
    model, reducer = make()
    for _ in range(3):
        model.zero_grad(set_to_none=to_none)
        loss = own_loss(model)
        reducer.watch(loss)
        loss.backward()
    return gradients(model)


def twice_reduced() -> dict[str, Tensor | None]:
    model, reducer = make()
    for _ in range(2):
        loss = own_loss(model)
        reducer.watch(loss)
        loss.backward()
    return gradients(model)


def twice_reduced_at_the_end() -> dict[str, Tensor | None]:
    model, reducer = make()
    with reducer.no_sync():
        loss = own_loss(model)
        reducer.watch(loss)
        loss.backward()
    loss = own_loss(model)
    reducer.watch(loss)
    loss.backward()
    return gradients(model)


def two_passes_a_step(to_none: bool) -> dict[str, Tensor | None]:
    model, reducer = make()
    for _ in range(2):
        model.zero_grad(set_to_none=to_none)
        for synchronise in (False, True):
            reducer.synchronise = synchronise
            reducer.begin()
            own_loss(model).backward()
        reducer.finish()
    return gradients(model)


@pytest.mark.parametrize("to_none", [True, False])
def test_passes_without_reduction_after_a_step(pool: WorkerPool, to_none: bool) -> None:
    for found in pool.run(2, two_passes_a_step, to_none=to_none):
        torch.testing.assert_close(found, expected(2), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("job", "passes"), [(once, 1), (explicitly, 1), (twice_reduced, 2), (twice_reduced_at_the_end, 2)]
)
def test_gradients_equal_one_process(pool: WorkerPool, job: Callable[..., object], passes: int) -> None:
    for found in pool.run(2, job):
        torch.testing.assert_close(found, expected(passes), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("to_none", [True, False])
def test_zeroing_starts_afresh(pool: WorkerPool, to_none: bool) -> None:
    wanted = expected()
    for found in pool.run(2, after_zeroing, to_none=to_none):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    assert wanted["dead.weight"] is None
    assert wanted["sometimes.weight"] is not None


def no_gradient_at_all() -> Tensor:
    """Rank 1's loss reaches no parameter; its peers must not wait for it."""
    model, reducer = make()
    loss = own_loss(model) if dist.get_rank() == 0 else torch.zeros((), requires_grad=True) * 1.0
    reducer.watch(loss)
    loss.backward()
    assert model.second.weight.grad is not None
    return model.second.weight.grad


def test_rank_without_gradients_takes_part(pool: WorkerPool) -> None:
    first, second = pool.run(2, no_gradient_at_all)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def order_of_reductions() -> list[int]:
    """Sizes of the buffers in the order of their all-reduces; -1 where backward has reached the first layer."""
    model = Branches().requires_grad_(False)
    used = [*model.first.requires_grad_().parameters(), *model.second.requires_grad_().parameters()]
    reducer = GradientReducer([Reduced(parameter, dist.group.WORLD) for parameter in used], TINY_BUCKET)
    seen: list[int] = []
    original = dist.all_reduce

    def spy(tensor: Tensor, *args: object, **kwargs: object) -> object:
        seen.append(tensor.numel())
        return original(tensor, *args, **kwargs)  # type: ignore[arg-type]

    dist.all_reduce = spy
    model.first.weight.register_hook(lambda _: seen.append(-1))
    try:
        loss = own_loss(model)
        reducer.watch(loss)
        loss.backward()
    finally:
        dist.all_reduce = original
    return seen


def test_reductions_start_during_backward_in_the_same_order(pool: WorkerPool) -> None:
    first, second = pool.run(2, order_of_reductions)
    assert first == second == [8 * 2 + 2 + 2, -1, 4 * 8 + 8 + 2]


def test_alone_gradients_are_views_of_one_buffer() -> None:
    model = Branches()
    reducer = GradientReducer([Reduced(parameter, None) for parameter in model.parameters()])
    loss = model(samples())
    reducer.watch(loss)
    loss.backward()
    weight, bias = model.first.weight.grad, model.first.bias.grad
    assert weight.untyped_storage().data_ptr() == bias.untyped_storage().data_ptr()
    other = Branches()
    other(samples()).backward()
    torch.testing.assert_close(gradients(model), gradients(other), rtol=0, atol=0)
