"""Process groups of experts that are spread over the ranks of a stage.

The order is that of ``parallelism.ranks``: slices of an expert innermost, then the ranks over which experts are spread,
then those that share the states of the same ones (ZeRO), then their replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from galvatron_lite.parallelism.ranks import expert_slices, expert_spread_of
from galvatron_lite.parallelism.strategy import Strategy

Group = dist.ProcessGroup | None
Ranks = tuple[int, ...]
Key = tuple[str, Ranks]
EXPERTS = "experts"
"""Purpose of the groups that exchange tokens."""


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """This rank's groups for the experts of a layer."""

    line: Group  # ranks over which the experts are spread
    gradients: Group  # ranks that hold the same experts (the same slices of them) and took other tokens to them
    # what ``fully_shard`` takes where some of those share the states: axes (data, zero), or only zero
    mesh: DeviceMesh | None
    sliced: bool  # whether the tensor group shares each expert
    shards: int  # ranks that share the states of the same experts


def expert_keys(strategy: Strategy, start: int, states: str, gradients: str) -> list[Key]:
    """Every group that a strategy's experts need, of a stage that starts at rank ``start``.

    Args:
        strategy: with experts spread or not.
        start: first rank.
        states: purpose of groups that share or replicate states.
        gradients: purpose of groups that sum gradients.
    """
    if strategy.expert == 1:
        return []
    grid = _grid(strategy, start)
    return [
        *((EXPERTS, line) for line in _rows(grid, 2)),
        *((gradients, line) for line in _rows(grid.flatten(0, 1), 0)),
        *((states, line) for line in _rows(grid, 1)),
        *((states, line) for line in _rows(grid, 0)),
    ]


def expert_groups(
    strategy: Strategy,
    start: int,
    rank: int,
    groups: Mapping[Key, dist.ProcessGroup],
    purposes: tuple[str, str],
    mesh: Callable[[Sequence[Group], torch.Tensor], DeviceMesh | None],
) -> ExpertGroups | None:
    """The groups of one rank; None where experts are not spread.

    Args:
        strategy: see ``expert_keys``.
        start: first rank of the stage.
        rank: this one.
        groups: all groups of more than one rank.
        purposes: of states and gradients, as given to ``expert_keys``.
        mesh: makes one of the groups of replicas and of shards, and the ranks (replicas, shards) of both.
    """
    if strategy.expert == 1:
        return None
    grid, (states, gradients) = _grid(strategy, start), purposes
    shards = grid.shape[1]
    place = [int(at) for at in (grid == rank).nonzero()[0]]
    holders = grid[:, :, place[2], place[3]]

    def group_of(purpose: str, ranks: torch.Tensor) -> Group:
        return groups.get((purpose, tuple(ranks.flatten().tolist())))

    pair = [group_of(states, holders[:, place[1]]), group_of(states, holders[place[0]])]
    return ExpertGroups(
        group_of(EXPERTS, grid[place[0], place[1], :, place[3]]),
        group_of(gradients, holders),
        mesh(pair, holders) if shards > 1 else None,
        sliced=strategy.tensor > 1 and grid.shape[3] == strategy.tensor,
        shards=shards,
    )


def _grid(strategy: Strategy, start: int) -> torch.Tensor:
    """The ranks of a stage by (replicas, shards, experts, slices)."""
    shards = expert_spread_of(strategy).shards.size
    return (start + torch.arange(strategy.devices)).reshape(
        -1, int(shards), strategy.expert, int(expert_slices(strategy))
    )


def _rows(grid: torch.Tensor, dim: int) -> list[Ranks]:
    """The ranks that differ along one dim only."""
    rows = grid.movedim(dim, -1).reshape(-1, grid.shape[dim])
    return [tuple(int(rank) for rank in row) for row in rows]
