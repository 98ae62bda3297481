"""ZeRO on its own: what each rank holds, what stays untouched, when parameters are freed."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from galvatron_lite.parallelism.zero.apply import STAGE_3, ZeroGroup, apply_root, shard_group
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
    assert model[1].weight.grad is not None
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
