"""Norms in the precision of compute.

On accelerators autocast runs ``layer_norm`` and ``rms_norm`` in float32 (``AT_FORALL_FP32`` in ATen's autocast_mode.h):
it keeps a wide copy of their input, returns a wide output, and each matmul behind them keeps a copy of that of its own.
Where tokens are shared, twice the bytes are gathered. Their kernels take half precision as it is and compute in float32
inside, which is how other frameworks run them; so do CPUs under autocast.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional


def narrow_norms(model: nn.Module) -> None:
    """Let norms compute in the dtype of what they are given, in place; those with a forward of their own stay as are.

    Args:
        model: that runs inside autocast.
    """
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and _is_plain(module):
            module.forward = partial(_normed, module)  # type: ignore[method-assign]


def _is_plain(norm: nn.LayerNorm | nn.RMSNorm) -> bool:
    return type(norm).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward) and "forward" not in vars(norm)


def _normed(norm: nn.LayerNorm | nn.RMSNorm, value: Tensor) -> Tensor:
    weight = None if norm.weight is None else norm.weight.to(value.dtype)
    # without data (shapes alone are asked for) there is no autocast
    with nullcontext() if value.is_meta else torch.autocast(value.device.type, enabled=False):
        if isinstance(norm, nn.RMSNorm):
            return functional.rms_norm(value, norm.normalized_shape, weight, norm.eps)
        bias = None if norm.bias is None else norm.bias.to(value.dtype)
        return functional.layer_norm(value, norm.normalized_shape, weight, bias, norm.eps)
