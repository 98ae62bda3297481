"""Hollow modules: modules of the user's model that belong to another pipeline stage.

The user's glue code (the ``forward`` of the model) runs on every stage, so it still meets these modules. A hollow
module holds no parameters and its ``forward`` is replaced. Its weights stay readable as meta tensors, because glue code
may ask for their shape or dtype (Vision Transformers of transformers do).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import NoneType
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


def hollow_with_shape(module: nn.Module, give: Callable[[Any, torch.device], Any] | None = None) -> None:
    """Drop the module's parameters; its output becomes NaN of the right shape, or what ``give`` makes of it.

    The shape comes from running a copy on the meta device, once for the shapes of its arguments, so it is right for
    every input. The values only feed glue code whose results another stage computes.

    Args:
        module: changed in place.
        give: makes of an output on the meta device, and the arguments' device, what the module returns.
    """
    drop_parameters(module)
    shape_model = meta_copy(module).train(module.training)
    known: dict[object, Any] = {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        device, key = _device_of((args, kwargs)), _key((args, kwargs))
        if key not in known:
            to_meta = partial(_to_meta, _dtype_of(shape_model))
            with torch.no_grad():
                known[key] = shape_model(*map_tensors(args, to_meta), **map_tensors(kwargs, to_meta))
        return give(known[key], device) if give is not None else map_tensors(known[key], partial(_nan, device))

    replace_forward(module, forward)


def _key(value: Any) -> object:
    """What the shape of an output depends on."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _key(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_key(item) for item in value)
    return value if isinstance(value, (bool, int, float, str, NoneType)) else type(value)


def _device_of(arguments: Any) -> torch.device:
    tensors: Iterator[Tensor] = tensors_of(arguments)
    return next((tensor.device for tensor in tensors), torch.get_default_device())


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    return next((one.dtype for one in module.parameters() if one.is_floating_point()), None)


def _to_meta(dtype: torch.dtype | None, tensor: Tensor) -> Tensor:
    # by its shape: a picture of which this rank holds a share says the whole one; in the precision of the parameters,
    # whatever that of compute
    own = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tuple(tensor.shape), dtype=own, device="meta")


def _nan(device: torch.device, tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return torch.full(tensor.shape, float("nan"), dtype=tensor.dtype, device=device)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
