"""ZeRO: FSDP2 (``fully_shard``) for every layer, over the ranks that share its states."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

STAGE_2, STAGE_3 = 2, 3


@dataclass(frozen=True, slots=True)
class ZeroGroup:
    """Modules whose parameters are gathered and reduced together: a layer, or layers that share parameters.

    Attributes:
        modules: outermost first where they are nested.
        mesh: axes (data, zero), or only zero.
        zero_stage: 3: parameters are gathered for each use; 2: from forward until backward ends.
    """

    modules: tuple[nn.Module, ...]
    mesh: DeviceMesh
    zero_stage: int


def mixed_precision(compute: torch.dtype | None) -> MixedPrecisionPolicy:
    """Gather and compute in this dtype, reduce gradients in float32; None: all in the parameters' own dtype."""
    if compute is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def shard_group(
    group: ZeroGroup, ignored: Collection[nn.Parameter], compute: torch.dtype | None = None
) -> list[FSDPModule]:
    """Shard a group's parameters, in place; gradients become sums (not means) over the mesh.

    Args:
        group: what to shard; the model's groups are sharded in the order they run.
        ignored: parameters that stay as they are although they lie inside the group.
        compute: see ``mixed_precision``.

    Returns:
        The group's modules, which now are FSDP modules.
    """
    fully_shard(
        list(group.modules) if len(group.modules) > 1 else group.modules[0],
        mesh=group.mesh,
        reshard_after_forward=group.zero_stage == STAGE_3,
        mp_policy=mixed_precision(compute),
        ignored_params=set(ignored),
    )
    made: list[FSDPModule] = [module for module in group.modules if isinstance(module, FSDPModule)]
    for module in made:
        module.set_gradient_divide_factor(1.0)
        # gloo has neither averaging nor pre-multiplied sums
        module.set_force_sum_reduction_for_comms(True)
    return made


def apply_root(root: nn.Module, mesh: DeviceMesh) -> None:
    """Give a model whose groups are sharded FSDP's root context, which orders prefetching; it has no parameters."""
    if not isinstance(root, FSDPModule):
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        fully_shard(root, mesh=mesh, mp_policy=policy, ignored_params=set(root.parameters()))


def set_all_reduce(modules: Sequence[FSDPModule], enabled: bool) -> None:
    """Whether the next backward passes also sum over the mesh's data axis; once a step is enough."""
    for module in modules:
        module.set_requires_all_reduce(enabled, recurse=False)
