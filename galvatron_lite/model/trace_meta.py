"""A copy of a model without storages, to be run for its shapes alone."""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from galvatron_lite.errors import TraceError
from galvatron_lite.model.training_form import prepare_for_training

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Torch's type of every precision a model can be traced at."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Modules whose statistics are of the samples that are worked on at once."""


def meta_copy(model: nn.Module, precision: str | None = None) -> nn.Module:
    """A copy of a model on the meta device, in training mode, its storages never read.

    Args:
        model: on any device.
        precision: floating parameters and buffers are cast to it; None leaves them as they are.

    Parameters that are tied stay tied. It runs as the model does in training; see ``prepare_for_training``.

    Raises:
        TraceError: the model cannot be copied, or an unknown precision.
    """
    dtype = None if precision is None else dtype_of(precision)
    _check_hooks(model)
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False), *_loose_tensors(module)]:
            memo.setdefault(id(tensor), _meta_tensor(tensor, dtype))
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as cause:
        raise TraceError("model", type(model).__name__, f"It must allow copy.deepcopy: {cause}") from cause
    for module in twin.modules():
        _simplify(module)
    prepare_for_training(twin)
    return twin.train()


def _check_hooks(model: nn.Module) -> None:
    """Refuse weights that old hooks compute, of which torch cannot make copies once they have run."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    old = next((type(hook) for hook in hooks if isinstance(hook, (WeightNorm, SpectralNorm))), None)
    if old is not None:
        name = old.__module__
        remedy = f"Use {name.replace('utils.', 'utils.parametrizations.')}, whose modules can be copied."
        raise TraceError("model", name, remedy)


def _simplify(module: nn.Module) -> None:
    """Switch off what needs data or other ranks."""
    experts: dict[str, str | None] = getattr(module, "get_experts_implementation", dict)()
    if set(experts.values()) & {"eager", "batched_mm"}:
        # loops over experts that tokens chose need data; what is planned for takes them together
        with suppress(ValueError):  # a model without experts says that it has no choice
            module.set_experts_implementation("grouped_mm")  # type: ignore[operator]
    if isinstance(module, BATCH_NORMS) and module.momentum is None:
        # a running mean: torch would read how many batches there were; what runs is the same with any momentum
        module.momentum = 0.1
    if isinstance(module, nn.SyncBatchNorm):
        # its own forward, in a world of processes, asks for a GPU and for the others
        module.forward = partial(_alone, module)  # type: ignore[method-assign]


def _alone(norm: nn.SyncBatchNorm, tensor: Tensor) -> Tensor:
    statistics = norm.running_mean, norm.running_var
    return batch_norm(tensor, *statistics, norm.weight, norm.bias, True, norm.momentum or 0.0, norm.eps)


def _loose_tensors(module: nn.Module) -> list[Tensor]:
    return [value for value in vars(module).values() if isinstance(value, Tensor)]


def _meta_tensor(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kept, device="meta")
    return nn.Parameter(twin, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


def dtype_of(precision: str) -> torch.dtype:
    """Torch's type of a precision.

    Raises:
        TraceError: a precision no model can be traced at.
    """
    if precision not in DTYPES:
        raise TraceError("precision", precision, f"Choose one of {', '.join(DTYPES)}.")
    return DTYPES[precision]


def precision_of(model: nn.Module) -> str:
    """The precision that most of a model's floating parameters have; ``fp32`` for a model without any."""
    items: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            items[parameter.dtype] = items.get(parameter.dtype, 0) + parameter.numel()
    most = max(items, key=lambda dtype: items[dtype], default=torch.float32)
    return next((name for name, dtype in DTYPES.items() if dtype is most), "fp32")
