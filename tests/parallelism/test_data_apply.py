"""Gradients of replicas over processes, and shards of states, against one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.data.apply import GradientReducer, Reduced
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.zero.apply import STAGE_3, ZeroGroup, apply_root, shard_group
from galvatron_lite.parallelism.zero.cost import cut_dim
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.full_state import full_gradients
from tests.equivalence.plans import write_plan
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


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def expected(passes: int = 1) -> dict[str, Tensor | None]:
    """One process: the mean of the two halves' losses, ``passes`` times."""
    model, values = Branches(), samples()
    for _ in range(passes):
        (model(values[:2]) / 2 + model(values[2:]) / 2).backward()
    return gradients_of(model)


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
        found[name] = gradients_of(model)
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
    torch.testing.assert_close(gradients_of(model), gradients_of(other), rtol=0, atol=0)


def make_three() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))


def rows() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def loss_of_rows(model: nn.Module) -> Tensor:
    share = 8 // dist.get_world_size()
    start = dist.get_rank() * share
    loss: Tensor = model(rows()[start : start + share]).square().sum()
    return loss


def full(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("zero",))


def held_after_forward(zero_stage: int) -> list[bool]:
    """Whether each layer's parameters are still gathered between forward and backward."""
    model, mesh = make_three(), make_mesh()
    for layer in model:
        shard_group(ZeroGroup((layer,), mesh, zero_stage), ())
    apply_root(model, mesh)
    loss_of_rows(model)
    return [not isinstance(layer.weight, DTensor) for layer in model]


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_stage_3_frees_parameters_after_forward(pool: WorkerPool, zero_stage: int) -> None:
    assert pool.run(2, held_after_forward, zero_stage=zero_stage) == [[zero_stage != STAGE_3] * 3] * 2


def low_precision() -> tuple[torch.dtype, torch.dtype]:
    model, mesh, seen = make_three(), make_mesh(), list[torch.dtype]()
    model[1].register_forward_hook(lambda module, _, __: seen.append(module.weight.dtype))
    for layer in model:
        shard_group(ZeroGroup((layer,), mesh, STAGE_3), (), torch.bfloat16)
    apply_root(model, mesh)
    loss_of_rows(model).backward()
    return seen[0], model[1].weight.grad.dtype


def test_bf16_compute_keeps_fp32_gradients(pool: WorkerPool) -> None:
    assert pool.run(2, low_precision) == [(torch.bfloat16, torch.float32)] * 2


class Viewing(nn.Module):
    """Its result is a view, which its caller writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).view(-1, 3, 2)


def views() -> tuple[list[str], bool]:
    """What is warned of, and whether gradients are those of the module alone."""
    torch.manual_seed(0)
    model, plain = Viewing(), Viewing()
    plain.load_state_dict(model.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard_group(ZeroGroup((model,), make_mesh(), STAGE_3), ())
        for one in (model, plain):
            out = one(rows())
            out += 1
            out.square().sum().backward()
    both = zip(model.parameters(), plain.parameters(), strict=True)
    equal = all(torch.allclose(full(own.grad), dist.get_world_size() * other.grad) for own, other in both)
    return [str(one.message) for one in caught if "view tensor" in str(one.message)], equal


def test_views_that_a_layer_returns_may_be_written_to(pool: WorkerPool) -> None:
    assert pool.run(2, views) == [([], True)] * 2


@pytest.mark.parametrize(
    ("shape", "ranks", "stage", "dim"),
    [
        ((4096, 11008), 64, 3, 0),
        ((50257, 768), 8, 3, 0),  # a row more or less
        ((8, 14336, 4096), 32, 3, 1),
        ((8, 14336, 4096), 32, 1, 0),  # would not lie together
        ((1, 14336, 4096), 4, 1, 1),
        ((1, 3, 4096), 4, 3, 2),
        ((1, 3, 5), 4, 3, 0),
        ((2,), 4, 3, 0),
        ((), 4, 3, 0),
    ],
)
def test_few_rows_are_cut_along_another_dim(shape: tuple[int, ...], ranks: int, stage: int, dim: int) -> None:
    assert cut_dim(shape, ranks, stage) == dim


LAYERS = (
    Layer("before", "before", Role.BEFORE, ("first", "second", "places")),
    Layer("blocks.0", "block", Role.BLOCK, ("blocks.0",)),
    Layer("after", "after", Role.AFTER, ("end",)),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv1d(3, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
        self.places = nn.Embedding(6, 4)
        self.places.requires_grad_(False)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.end = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x).square()).transpose(1, 2)
        hidden = self.blocks[0](hidden + self.places(torch.arange(6)))
        return self.end(hidden).square().mean()


def gradients() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    batch, alone = torch.randn(4, 3, 6), Model()
    alone(batch).backward()
    strategies = {layer.name: Strategy(zero=2, zero_stage=3) for layer in LAYERS}
    plan = write_plan([list(strategies)], strategies, devices=2, batch=4, microbatches=1)
    model = ParallelModel(Model(), plan, LAYERS, batch, loss_fn=lambda output, _: output, device="cpu")
    model.backward_step(batch)
    return full_gradients(model), {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}


def test_a_frozen_module_is_gathered_by_itself(pool: WorkerPool) -> None:
    for found, expected in pool.run(2, gradients):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient)
