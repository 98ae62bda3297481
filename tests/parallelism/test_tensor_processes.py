"""Split blocks in real processes (gloo): output, input gradient and every parameter gradient equal one process's."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.tensor.apply import gather_full, shard_layer
from galvatron_lite.parallelism.tensor.group import ProcessTensorGroup
from galvatron_lite.parallelism.tensor.infer import infer_block
from tests.parallelism.tensor_blocks import make_case, run_whole, split_and_compare
from tests.pool import WorkerPool

NAMES = ["zoo_gpt", "zoo_llama", "hf_llama", "hf_gpt2", "hf_bert", "hf_vit"]
VARIANTS = list(product([False, True], Recompute))


def compare_all() -> dict[str, float]:
    """Errors by case and variant (sequence parallelism, recomputation)."""
    group = ProcessTensorGroup()
    return {
        f"{name} {variant}": split_and_compare(make_case(name), group, *variant)
        for name in NAMES
        for variant in VARIANTS
    }


def test_two_processes_equal_one(pool: WorkerPool) -> None:
    for errors in pool.run(2, compare_all):
        assert len(errors) == len(NAMES) * len(VARIANTS)
        for name, error in errors.items():
            assert error <= make_case(name.split()[0]).tolerance, name


def collectives() -> list[Any]:
    group = ProcessTensorGroup()
    mine = torch.arange(8.0).reshape(2, 4) + 10 * group.rank
    results = [group.all_reduce(mine)]
    results += [group.all_gather(mine, dim) for dim in (0, 1, -1)]
    results += [group.reduce_scatter(mine, dim) for dim in (0, 1)]
    # strided tensors, too
    return [*results, group.all_reduce(mine.t()), group.all_gather(mine.t(), 1), group.reduce_scatter(mine.t(), 1)]


def test_collectives(pool: WorkerPool) -> None:
    first = torch.arange(8.0).reshape(2, 4)
    second, total = first + 10, 2 * first + 10
    for rank, results in enumerate(pool.run(2, collectives)):
        expected = [total, torch.cat([first, second], 0), *[torch.cat([first, second], 1)] * 2]
        expected += [total.chunk(2, 0)[rank], total.chunk(2, 1)[rank]]
        expected += [total.t(), torch.cat([first.t(), second.t()], 1), total.t().chunk(2, 1)[rank]]
        torch.testing.assert_close(results, expected)


def split_under_zero(reshard: bool) -> float:
    """Tensor degree 2 inside ZeRO over 2: gradients, gathered over both, against one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("zero", "tensor"))
    group = ProcessTensorGroup(mesh["tensor"].get_group())
    case = make_case("zoo_llama")
    block = copy.deepcopy(case.block)
    shards = shard_layer(block, infer_block(case.block, case.args, case.kwargs), group)
    sharded: Any = fully_shard(block, mesh=mesh["zero"], reshard_after_forward=reshard)
    sharded.set_gradient_divide_factor(1.0)
    row = case.args[0].chunk(2)[mesh["zero"].get_local_rank()]
    output = block(row, *case.args[1:])
    (output.sin() + output.square()).sum().backward()
    whole = run_whole(case)
    errors = []
    for name, parameter in block.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        gradient = gather_full(parameter.grad.full_tensor(), shards[name], group)
        errors.append(float((gradient - whole[name]).abs().max() / whole[name].abs().max()))
    dist.barrier()
    return max(errors)


@pytest.mark.parametrize("reshard", [True, False])
def test_split_blocks_inside_zero(pool: WorkerPool, reshard: bool) -> None:
    assert max(pool.run(4, split_under_zero, reshard=reshard)) < 1e-10
