"""Which ranks of a stage the plan puts together, worked out from the order of ranks alone. No torch here.

It shares nothing with ``runtime.mesh``, whose groups it is held against.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from galvatron_lite.parallelism.ranks import expert_slices, strides_of
from galvatron_lite.parallelism.strategy import Strategy

OTHERS = ("data", "zero", "context", "spatial")
"""Dimensions whose ranks see other samples, tokens or pixels."""


def degrees_of(strategy: Strategy) -> dict[str, int]:
    """Ranks in each dimension that ``strides_of`` knows."""
    return {
        "channel": strategy.slices,
        "spatial": strategy.spatial,
        "tensor": strategy.tensor,
        "context": strategy.context,
        "zero": strategy.zero,
        "data": strategy.data,
    }


def together(strategy: Strategy, rank: int, names: Iterable[str]) -> tuple[int, ...]:
    """World ranks, ascending, that differ from one in these dimensions only."""
    strides, degrees = strides_of(strategy), degrees_of(strategy)
    steps = [(int(strides[name]), degrees[name]) for name in names]
    return line_of(strategy.devices, rank, steps)


def holders_of_experts(strategy: Strategy, rank: int) -> tuple[int, ...]:
    """World ranks, ascending, that hold the same experts as one."""
    stride = int(expert_slices(strategy)) * strategy.expert
    return line_of(strategy.devices, rank, [(stride, max(strategy.devices // stride, 1))])


def line_of(devices: int, rank: int, steps: list[tuple[int, int]]) -> tuple[int, ...]:
    """World ranks, ascending, in the dims of these strides and sizes through one rank of a stage of so many."""
    start, place = rank - rank % devices, rank % devices
    first = place - sum(place // stride % size * stride for stride, size in steps)
    moves = product(*(range(0, stride * size, stride) for stride, size in steps))
    return tuple(sorted(start + first + sum(move) for move in moves))
