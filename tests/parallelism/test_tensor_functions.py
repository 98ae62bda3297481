"""Collectives with autograd, and slices of parameters, against the whole tensors they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.functions import (
    copy_to_group,
    gather_last,
    gather_tokens,
    reduce_from_group,
    reduce_scatter_tokens,
)
from galvatron_lite.parallelism.tensor.group import ShapeOnlyGroup
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement, gather_full, slice_full
from tests.parallelism.thread_group import ThreadGroup, run_threads

SIZE = 2


def per_rank(shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    return [torch.randn(shape, generator=generator) for _ in range(SIZE)]


def forward_backward(group: ThreadGroup, function: object, tensor: Tensor, *extra: int) -> tuple[Tensor, Tensor]:
    """The result, and the gradient for a random gradient of the result that differs from rank to rank."""
    assert callable(function)
    leaf = tensor.clone().requires_grad_()
    result = function(leaf, group, *extra)
    torch.manual_seed(0)
    result.backward(per_rank(tuple(result.shape))[group.rank])
    assert leaf.grad is not None
    return result.detach(), leaf.grad


def test_copy_and_reduce() -> None:
    tensors = per_rank((2, 4, 3))
    weights = per_rank((2, 4, 3))
    copied = run_threads(SIZE, lambda group: forward_backward(group, copy_to_group, tensors[group.rank]))
    reduced = run_threads(SIZE, lambda group: forward_backward(group, reduce_from_group, tensors[group.rank]))
    for rank in range(SIZE):
        torch.testing.assert_close(copied[rank], (tensors[rank], sum(weights)))
        torch.testing.assert_close(reduced[rank], (sum(tensors), weights[rank]))


def test_token_gather_and_reduce_scatter_are_transposes() -> None:
    shards, wholes = per_rank((2, 4, 3)), per_rank((2, 8, 3))
    gathered = run_threads(SIZE, lambda group: forward_backward(group, gather_tokens, shards[group.rank]))
    scattered = run_threads(SIZE, lambda group: forward_backward(group, reduce_scatter_tokens, wholes[group.rank]))
    weights = per_rank((2, 8, 3))
    for rank in range(SIZE):
        torch.testing.assert_close(gathered[rank], (torch.cat(shards, 1), sum(weights).chunk(2, 1)[rank]))  # type: ignore[union-attr]
        total = sum(wholes)
        assert isinstance(total, Tensor)
        torch.testing.assert_close(scattered[rank], (total.chunk(2, 1)[rank], torch.cat(per_rank((2, 4, 3)), 1)))


@pytest.mark.parametrize("columns", [6, 7])
def test_gathered_columns(columns: int) -> None:
    whole = torch.randn(2, 3, columns)

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        start, length = share(columns, SIZE, group.rank)
        leaf = whole.narrow(-1, start, length).clone().requires_grad_()
        result = gather_last(leaf, group, columns)
        result.backward(whole)
        assert leaf.grad is not None
        return result.detach(), leaf.grad - leaf.detach()

    for result, difference in run_threads(SIZE, work):
        torch.testing.assert_close(result, whole)
        assert not difference.any()


@given(st.integers(1, 500), st.integers(1, 16))
def test_shares_cover_everything_evenly(extent: int, degree: int) -> None:
    shares = [share(extent, degree, rank) for rank in range(degree)]
    assert [index for start, length in shares for index in range(start, start + length)] == list(range(extent))
    lengths = [length for _, length in shares]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 4), st.integers(0, 1))
def test_slices_make_the_whole_again(parts: list[int], degree: int, dim: int) -> None:
    shape = [3, 3]
    shape[dim] = sum(parts)
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor, ParameterShard]:
        shard = ParameterShard(Placement.SHARDED, tuple(shape), degree, group.rank, dim, tuple(parts))
        local = slice_full(whole, shard)
        return local, gather_full(local, shard, group), shard

    for local, again, shard in run_threads(degree, work):
        assert tuple(local.shape) == shard.local_shape
        assert torch.equal(again, whole)


def test_fused_parts_are_sliced_one_by_one() -> None:
    # query 0..3, key 4..5, value 6..7: the second of two devices has the second half of each
    shard = ParameterShard(Placement.SHARDED, (8,), degree=2, rank=1, dim=0, parts=(4, 2, 2))
    assert slice_full(torch.arange(8), shard).tolist() == [2, 3, 5, 7]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shapes_without_a_group(device: str) -> None:
    group = ShapeOnlyGroup(4, rank=3)
    tensor = torch.arange(2 * 8 * 3.0, device=device).reshape(2, 8, 3)
    assert group.all_reduce(tensor).shape == (2, 8, 3)
    assert group.all_gather(tensor, 1).shape == (2, 32, 3)
    scattered = group.reduce_scatter(tensor, 1)
    assert scattered.shape == (2, 2, 3)
    assert device == "meta" or torch.equal(scattered, tensor[:, 6:])
    with pytest.raises(InputError, match="divisible by the tensor-parallel degree 4"):
        group.reduce_scatter(tensor, 2)
