"""Which ranks of a stage share the states of a layer and which sum its gradients. No torch here.

Ranks are row-major over (data, zero, context, tensor), tensor innermost. All but the tensor ranks see other tokens, so
gradients are summed over data x zero x context. States are sharded over zero x context (Megatron-Core's distributed
optimizer and torchtitan's ``dp_shard_cp`` mesh take context ranks in too) and replicated over data.

Experts that are spread ``expert`` ways lie on the ranks next to one another above the tensor slices (Megatron-Core's
order ``tp-ep-dp`` of expert layers), so ``expert`` times fewer ranks hold the same ones: innermost ranks of the shards
are taken first.
"""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.cluster.cluster import RankGroup
from galvatron_lite.parallelism.base import LayerWork, Strategy


@dataclass(frozen=True, slots=True)
class Spread:
    """How the states of some parameters lie on the ranks of a stage.

    Attributes:
        shards: ranks that share them.
        replicas: ranks that hold the same shard and sum its gradients.
    """

    shards: RankGroup
    replicas: RankGroup


def spread_of(strategy: Strategy) -> Spread:
    """Where the states of parameters lie that are not experts'."""
    return _spread(strategy, strategy.tensor, 1)


def expert_spread_of(strategy: Strategy) -> Spread:
    """Where the states of experts lie: devices / (expert degree x slices of an expert) ranks hold the same."""
    return _spread(strategy, expert_slices(strategy), strategy.expert)


def expert_slices(strategy: Strategy) -> int:
    """Devices that share the matmuls of one expert: the tensor group, or what of it expert parallelism leaves."""
    wanted = min(strategy.expert_tensor or strategy.tensor, strategy.tensor)
    return max(min(wanted, strategy.devices // strategy.expert), 1)


def expert_group(strategy: Strategy) -> RankGroup:
    """The ranks that exchange tokens with one another."""
    degree = strategy.expert
    return RankGroup(degree, expert_slices(strategy), strategy.devices // degree)


def shared_items(work: LayerWork, strategy: Strategy) -> tuple[tuple[float, Spread], ...]:
    """The parameters one device computes with, in parts of equal spread, experts last."""
    dense = (work.parameters - work.expert_items, spread_of(strategy))
    if work.expert_items == 0:
        return (dense,)
    return (dense, (work.expert_items, expert_spread_of(strategy)))


def _spread(strategy: Strategy, slices: int, ways: int) -> Spread:
    holders = max(strategy.devices // (slices * ways), 1)
    shards = max(strategy.state_shards // ways, 1)
    replicas = max(holders // shards, 1)
    stride = slices * ways
    return Spread(
        RankGroup(shards, stride, strategy.devices // shards),
        RankGroup(replicas, stride * shards, strategy.devices // replicas),
    )
