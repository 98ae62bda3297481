"""ZeRO on its own: what each rank holds, what stays untouched, when parameters are freed."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.zero.apply import STAGE_3, ZeroGroup, apply_root, shard_group
from galvatron_lite.parallelism.zero.cost import cut_dim
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.full_state import full_gradients
from tests.equivalence.plans import write_plan
from tests.pool import WorkerPool


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))


def rows() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def own_loss(model: nn.Module) -> Tensor:
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
    model, mesh = make_model(), make_mesh()
    for layer in model:
        shard_group(ZeroGroup((layer,), mesh, zero_stage), ())
    apply_root(model, mesh)
    own_loss(model)
    return [not isinstance(layer.weight, DTensor) for layer in model]


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_stage_3_frees_parameters_after_forward(pool: WorkerPool, zero_stage: int) -> None:
    assert pool.run(2, held_after_forward, zero_stage=zero_stage) == [[zero_stage != STAGE_3] * 3] * 2


def low_precision() -> tuple[torch.dtype, torch.dtype]:
    model, mesh, seen = make_model(), make_mesh(), list[torch.dtype]()
    model[1].register_forward_hook(lambda module, _, __: seen.append(module.weight.dtype))
    for layer in model:
        shard_group(ZeroGroup((layer,), mesh, STAGE_3), (), torch.bfloat16)
    apply_root(model, mesh)
    own_loss(model).backward()
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
