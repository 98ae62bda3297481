"""ZeRO: FSDP2 (``fully_shard``) for every layer, over the ranks that share its states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.parallelism.zero.cost import cut_dim

STAGE_2, STAGE_3 = 2, 3


@dataclass(frozen=True, slots=True)
class ZeroGroup:
    """Modules whose parameters are gathered and reduced together: a layer, or layers that share parameters."""

    modules: tuple[nn.Module, ...]  # outermost first where they are nested
    mesh: DeviceMesh  # axes (data, zero), or only zero
    zero_stage: int  # 3: parameters are gathered for each use; 2: from forward until backward ends


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
    for one in group.modules:
        one.register_forward_hook(_without_views)
    ranks = group.mesh.size(group.mesh.ndim - 1)
    fully_shard(
        list(group.modules) if len(group.modules) > 1 else group.modules[0],
        mesh=group.mesh,
        reshard_after_forward=group.zero_stage == STAGE_3,
        mp_policy=mixed_precision(compute),
        ignored_params={*ignored, *_of_other_types(group.modules)},
        shard_placement_fn=lambda parameter: Shard(cut_dim(parameter.shape, ranks, group.zero_stage)),
    )
    made: list[FSDPModule] = [module for module in group.modules if isinstance(module, FSDPModule)]
    for module in made:
        module.set_gradient_divide_factor(1.0)
        # gloo has neither averaging nor pre-multiplied sums
        module.set_force_sum_reduction_for_comms(True)
    return made


def _of_other_types(modules: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Trained parameters of another type than most (complex ones): FSDP shards parameters of one type alone."""
    items = Counter[torch.dtype]()
    trained = {one for module in modules for one in module.parameters() if one.requires_grad}
    for one in trained:
        items[one.dtype] += one.numel()
    return {one for one in trained if one.dtype is not max(items, key=lambda dtype: items[dtype])}


def apply_root(root: nn.Module, mesh: DeviceMesh) -> None:
    """Give a model whose groups are sharded FSDP's root context, which orders prefetching; it has no parameters."""
    if not isinstance(root, FSDPModule):
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        root.register_forward_hook(_without_views)
        fully_shard(root, mesh=mesh, mp_policy=policy, ignored_params=set(root.parameters()))


def _without_views(_module: nn.Module, _args: object, output: Any) -> Any:
    """Forward hook: views that a module returns become results of their own, of the same memory.

    FSDP2 gathers before backward by a hook on what a module returns, which a view loses where it is written to
    (``x += y``), and so warns of every view.
    """
    if not any(one.requires_grad and _is_view(one) for one in tensors_of(output)):
        return output
    return map_tensors(output, lambda one: _detach_copy(one) if one.requires_grad and _is_view(one) else one)


def _is_view(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor._base is not None


def _detach_copy(tensor: Tensor) -> Tensor:
    made: Tensor = _Detached.apply(tensor)  # type: ignore[no-untyped-call]
    return made


class _Detached(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def set_all_reduce(modules: Sequence[FSDPModule], enabled: bool) -> None:
    """Whether the next backward passes also sum over the mesh's data axis; once a step is enough."""
    for module in modules:
        module.set_requires_all_reduce(enabled, recurse=False)
