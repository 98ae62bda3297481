"""Functions on cut tensors against the same functions on whole ones: values and gradients of everything."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.parallelism.sharded.collectives import distribute, full_tensor
from galvatron_lite.parallelism.sharded.tensor import ShardedTensor, ShardSpec, global_shape, specs_of
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES
from tests.parallelism.thread_group import ThreadGroup, grid_groups, run_threads

Lines = tuple[int, ...]
"""Which dims of a tensor are cut: by the first and the second side of the grid."""
Function = Callable[..., Any]


def results_of(value: Any) -> list[Tensor]:
    """The tensors in what a function returns."""
    if isinstance(value, Tensor):
        return [value]
    return [one for item in value for one in results_of(item)] if isinstance(value, (tuple, list)) else []


def in_numbers(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64)


def weights(results: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(tuple(global_shape(one)), generator=generator, dtype=torch.float64) for one in results]


def train(function: Function, leaves: Sequence[Tensor], given: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """Results, and gradients of leaves: of a sum of the results with fixed weights, shared by the ranks."""
    results = results_of(function(*given))
    full = [full_tensor(one) for one in results]
    # torch must agree with what the cut tensor says of its shape before it is gathered
    assert [tuple(one.shape) for one in results] == [tuple(one.shape) for one in full]
    loss = sum((in_numbers(one) * w).sum() for one, w in zip(full, weights(results), strict=True)) / ranks
    assert isinstance(loss, Tensor)
    if loss.requires_grad:
        loss.backward()
    grads = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves if leaf.requires_grad]
    return [one.detach() for one in full] + [in_numbers(one) for one in grads]


def compare(
    function: Function,
    tensors: Sequence[Tensor],
    cut: Sequence[Lines],
    degrees: Sequence[int],
    *,
    stays_cut: bool | None = None,
    gathers: bool | None = False,
    tolerance: float = 1e-10,
) -> None:
    """Check a function.

    Args:
        function: of the tensors; floating-point ones get gradients.
        tensors: whole.
        cut: of each tensor the dims that the sides of the grid cut; -1 for a side that does not.
        degrees: ranks of each side, one or two.
        stays_cut: whether every result must be cut (True) or whole (False); None: either.
        gathers: whether it must say that it gathers a picture; None: it may.
        tolerance: relative and absolute.
    """
    rows, columns = (*degrees, 1)[:2]

    def leaves() -> list[Tensor]:
        return [one.clone().requires_grad_(one.is_floating_point()) for one in tensors]

    def work(group: ThreadGroup) -> list[Tensor]:
        lines = grid_groups(group, rows, columns)
        held = leaves()
        given = [
            distribute(one.view_as(one), cuts_on(one, dims, lines[: len(degrees)]), PIXELS_RULES)
            for one, dims in zip(held, cut, strict=True)
        ]

        def checked(*args: Tensor) -> Any:
            result = function(*args)
            kinds = {isinstance(one, ShardedTensor) for one in results_of(result)}
            assert stays_cut is None or kinds == {stays_cut}
            return result

        return train(checked, held, given, rows * columns)

    alone = leaves()
    expected = train(function, alone, [one.view_as(one) for one in alone], 1)
    count = len(expected) - sum(one.requires_grad for one in alone)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        everyone = run_threads(rows * columns, work)
    assert gathers in (None, any("the whole picture is gathered" in str(one.message) for one in said))
    for found in everyone:
        for one, wanted in zip(found[:count], expected[:count], strict=True):
            assert one.dtype == wanted.dtype
            torch.testing.assert_close(one, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    for number in range(count, len(expected)):
        total = torch.stack([found[number] for found in everyone]).sum(0)
        torch.testing.assert_close(total, expected[number], rtol=tolerance, atol=tolerance)


def cuts_on(tensor: Tensor, dims: Lines, lines: Sequence[ThreadGroup]) -> tuple[ShardSpec, ...]:
    cuts = [ShardSpec(dim, tensor.shape[dim], line) for dim, line in zip(dims, lines, strict=False) if dim >= 0]
    return tuple(sorted(cuts, key=lambda one: one.dim))


def picture(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def is_cut(tensor: Tensor) -> bool:
    return bool(specs_of(tensor))
