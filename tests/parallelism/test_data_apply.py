"""Gradient reduction on two ranks against one process that sees all samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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


Way = Callable[[Branches, GradientReducer], object]


def watched(model: Branches, reducer: GradientReducer) -> None:
    loss = own_loss(model)
    reducer.watch(loss)
    loss.backward()


def explicitly(model: Branches, reducer: GradientReducer) -> None:
    loss = own_loss(model)
    reducer.begin()
    loss.backward()
    reducer.finish()


def summed_at_the_end(model: Branches, reducer: GradientReducer) -> None:
    with reducer.no_sync():
        watched(model, reducer)
    watched(model, reducer)


def zeroed(model: Branches, reducer: GradientReducer, to_none: bool) -> None:
    for _ in range(3):
        model.zero_grad(set_to_none=to_none)
        watched(model, reducer)


def two_passes_a_step(model: Branches, reducer: GradientReducer, to_none: bool) -> None:
    for _ in range(2):
        model.zero_grad(set_to_none=to_none)
        for synchronise in (False, True):
            reducer.synchronise = synchronise
            reducer.begin()
            own_loss(model).backward()
        reducer.finish()


WAYS: dict[str, tuple[Way, int]] = {
    "watched": (watched, 1),
    "explicitly": (explicitly, 1),
    "twice": (lambda *both: [watched(*both) for _ in range(2)], 2),
    "summed at the end": (summed_at_the_end, 2),
    **{f"zeroed, {none}": (partial(zeroed, to_none=none), 1) for none in (True, False)},
    **{f"two passes, {none}": (partial(two_passes_a_step, to_none=none), 2) for none in (True, False)},
}
"""Ways to reduce gradients, and how many passes add up."""


def gradients_by_way() -> dict[str, dict[str, Tensor | None]]:
    found = {}
    for name, (way, _) in WAYS.items():
        model, reducer = make()
        way(model, reducer)
        found[name] = gradients(model)
    return found


def test_gradients_equal_one_process(pool: WorkerPool) -> None:
    for found in pool.run(2, gradients_by_way):
        for name, (_, passes) in WAYS.items():
            torch.testing.assert_close(found[name], expected(passes), rtol=1e-6, atol=1e-7, msg=name)
    assert expected()["dead.weight"] is None
    assert expected()["sometimes.weight"] is not None


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
