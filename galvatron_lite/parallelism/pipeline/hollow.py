"""Hollow modules: modules of the user's model that belong to another pipeline stage.

The user's glue code (the ``forward`` of the model) runs on every stage, so it still meets these modules. A hollow
module holds no parameters and its ``forward`` is replaced. Its weights stay readable as meta tensors, because glue code
may ask for their shape or dtype (Vision Transformers of transformers do).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.model.trace_meta import meta_copy


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Make calls of the module run ``forward``; its hooks still run."""
    module.forward = forward


def drop_parameters(module: nn.Module) -> None:
    """Turn every parameter of the module and its submodules into a plain attribute on the meta device."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            shape_only = torch.empty_like(parameter, device="meta", requires_grad=False)
            delattr(owner, name)
            setattr(owner, name, shape_only.detach())


def drop_loose_parameters(module: nn.Module, device: torch.device | None = None) -> None:
    """Take the parameters a module holds directly; glue code that still reads them gets NaN without memory.

    What glue code computes from them before the first block is thrown away on later stages. Were such a value used
    after the last block all the same, the loss would be NaN, not silently wrong.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        unknown = torch.full((), float("nan"), dtype=parameter.dtype, device=device or parameter.device)
        delattr(module, name)
        setattr(module, name, unknown.expand(parameter.shape))


def hollow_with_shape(module: nn.Module) -> None:
    """Drop the module's parameters; its output becomes NaN of the right shape.

    The shape comes from running a copy on the meta device, so it is right for every input. The values only feed glue
    code whose results another stage computes.
    """
    drop_parameters(module)
    shape_model = meta_copy(module).train(module.training)

    def forward(*args: Any, **kwargs: Any) -> Any:
        device = _device_of((args, kwargs))
        with torch.no_grad():
            output = shape_model(*map_tensors(args, _to_meta), **map_tensors(kwargs, _to_meta))
        return map_tensors(output, lambda tensor: _unknown(tensor, device))

    replace_forward(module, forward)


def _device_of(arguments: Any) -> torch.device:
    tensors: Iterator[Tensor] = tensors_of(arguments)
    return next((tensor.device for tensor in tensors), torch.get_default_device())


def _to_meta(tensor: Tensor) -> Tensor:
    # by its shape: a picture of which this rank holds a share says the whole one
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _unknown(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_floating_point():
        return torch.full(tensor.shape, float("nan"), dtype=tensor.dtype, device=device)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
