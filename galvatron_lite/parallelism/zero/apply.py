"""ZeRO: FSDP2 (``fully_shard``) for every layer, over the ranks that share its states."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

STAGE_3 = 3


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


def apply_zero(
    root: nn.Module,
    groups: Sequence[ZeroGroup],
    ignored: Collection[nn.Parameter],
    compute: torch.dtype | None = None,
) -> list[FSDPModule]:
    """Shard the parameters of every group, in place; gradients are sums (not means) over the mesh.

    Args:
        root: the model that holds the groups. It gets FSDP's root context, which orders prefetching, and no
            parameters of its own.
        groups: in the order they run.
        ignored: parameters that stay as they are although they lie inside a group.
        compute: see ``mixed_precision``.

    Returns:
        The FSDP modules; empty where there are no groups.
    """
    made: list[FSDPModule] = []
    for group in groups:
        modules = list(group.modules)
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=group.mesh,
            reshard_after_forward=group.zero_stage == STAGE_3,
            mp_policy=mixed_precision(compute),
            ignored_params=set(ignored),
        )
        made += [module for module in modules if isinstance(module, FSDPModule)]
    if groups and not isinstance(root, FSDPModule):
        fully_shard(
            root, mesh=groups[0].mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
            ignored_params=_unmanaged(root, groups, ignored),
        )  # fmt: skip
    for module in made:
        module.set_gradient_divide_factor(1.0)
        # gloo has neither averaging nor pre-multiplied sums
        module.set_force_sum_reduction_for_comms(True)
    return made


def set_all_reduce(modules: Sequence[FSDPModule], enabled: bool) -> None:
    """Whether the next backward passes also sum over the mesh's data axis; once a step is enough."""
    for module in modules:
        module.set_requires_all_reduce(enabled, recurse=False)


def _unmanaged(
    root: nn.Module, groups: Sequence[ZeroGroup], ignored: Collection[nn.Parameter]
) -> set[nn.Parameter]:
    managed = {id(p) for group in groups for module in group.modules for p in module.parameters()}
    left = {parameter for parameter in root.parameters() if id(parameter) not in managed}
    return left | set(ignored)
