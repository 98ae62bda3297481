"""Layers on shared pictures and on the whole picture: what both make, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.parallelism.sharded.collectives import distribute, full_tensor, sum_over
from galvatron_lite.parallelism.sharded.tensor import Call, Rules, global_shape, image_specs, specs_of, to_local
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES
from tests.parallelism.thread_group import ThreadGroup, grid_groups, run_threads


def unexpected(call: Call) -> object:
    raise AssertionError(f"{call.name} of a cut picture is not done on shares")


STRICT = Rules(PIXELS_RULES.handlers, unexpected)
"""Nothing is gathered because there is no handler for it."""

Groups = tuple[ThreadGroup | None, ...]

GRIDS = [(2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (4, 1), (1, 4)]


def grid_of(group: ThreadGroup, rows: int, columns: int) -> Groups:
    down, along = grid_groups(group, rows, columns)
    return (None, down if rows > 1 else None, along if columns > 1 else None)


@dataclass
class Found:
    """What one rank has after a forward and backward pass."""

    output: Tensor
    picture: Tensor
    parameters: list[Tensor]
    lines: list[ThreadGroup] = field(default_factory=list)


def alone(layer: Callable[..., Tensor], picture: Tensor, parameters: list[Tensor], seed: int) -> Found:
    leaf = picture.clone().requires_grad_()
    leaves = [one.clone().requires_grad_() for one in parameters]
    output = layer(leaf, *leaves)
    output.backward(direction(output, seed))
    assert leaf.grad is not None
    return Found(output.detach(), leaf.grad, [one.grad for one in leaves if one.grad is not None])


def shared(
    layer: Callable[..., Tensor],
    picture: Tensor,
    parameters: list[Tensor],
    grid: tuple[int, int],
    seed: int,
    rules: Rules = STRICT,
) -> list[Found]:
    """The same where ranks share the pixels; gradients are summed over them."""

    def work(group: ThreadGroup) -> Found:
        lines = grid_of(group, *grid)
        leaf = picture.clone().requires_grad_()
        leaves = [one.clone().requires_grad_() for one in parameters]
        output = layer(distribute(leaf, image_specs(picture.shape, lines), rules), *leaves)
        # each rank's objective counts the pixels it holds; of ranks that hold the same the first one's does
        cut = [one.group for one in specs_of(output)]
        counts = all(line.rank == 0 for line in lines if line is not None and line not in cut)
        weight = direction(output, seed) * float(counts)
        torch.autograd.backward(to_local(output), to_local(distribute(weight, specs_of(output), rules)))
        assert leaf.grad is not None
        gradients = [sum_over(one.grad, [group]) for one in leaves if one.grad is not None]
        used = [line for line in lines if isinstance(line, ThreadGroup)]
        return Found(full_tensor(output).detach(), sum_over(leaf.grad, [group]), gradients, used)

    return run_threads(grid[0] * grid[1], work)


def direction(output: Tensor, seed: int) -> Tensor:
    return torch.randn(
        global_shape(output), generator=torch.Generator().manual_seed(seed), dtype=to_local(output).dtype
    )


def same(found: Found, wanted: Found) -> None:
    close(found.output, wanted.output)
    close(found.picture, wanted.picture)
    assert len(found.parameters) == len(wanted.parameters)
    for one, other in zip(found.parameters, wanted.parameters, strict=True):
        close(one, other)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def kept(run: Callable[[], Any]) -> list[Tensor]:
    """What autograd keeps of a forward pass."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return found
