"""The true norm of the whole gradient, whatever part of it each rank holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from galvatron_lite.runtime.sharding import Owned

_TINY = 1e-6


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def squared_norm_share(owned: Iterable[Owned], elsewhere: frozenset[str], device: torch.device) -> Tensor:
    """This rank's share of the squared norm of the whole gradient; the sum over all ranks is the squared norm.

    Each part of the gradient is counted once: a part that n ranks hold counts 1/n on each.

    Args:
        owned: this rank's parameters.
        elsewhere: names of parameters that another stage counts.
        device: of the result.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for one in owned:
        gradient = one.gradient
        if gradient is not None and not elsewhere & set(one.names):
            by_copies.setdefault(one.copies, []).append(local_tensor(gradient))
    total = torch.zeros((), device=device)
    for copies, gradients in by_copies.items():
        with torch._C.DisableTorchFunctionSubclass():  # they may be guarded against norms that others take
            total += get_total_norm(gradients).float() ** 2 / copies
    return total


def clip_factor(norm: Tensor, largest: float) -> Tensor:
    """What makes a gradient's norm ``largest`` at most (as ``torch.nn.utils.clip_grad_norm_``)."""
    return torch.clamp(largest / (norm + _TINY), max=1.0)


def step_factor(squared: Tensor, lifted: float | None, largest: float | None) -> Tensor | None:
    """What the gradient is multiplied by before a step; None where it stays as it is.

    Args:
        squared: its squared norm as it is.
        lifted: the factor by which the loss was scaled, to be undone.
        largest: norm to clip it to, then.
    """
    if lifted is None and largest is None:
        return None
    back = torch.full_like(squared, 1.0 / (lifted or 1.0))
    return back if largest is None else back * clip_factor(squared.sqrt() * back, largest)


def multiply_gradients(owned: Iterable[Owned], factor: Tensor) -> None:
    """Multiply all gradients by a number, on the device and where the optimizer sees them in host memory."""
    held = list(owned)
    gradients = [local_tensor(gradient) for one in held if (gradient := one.gradient) is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
    hosts = [one.host for one in held if one.host is not None]
    lowered = [host.copy.grad for host in hosts if host.copy.grad is not None]
    if lowered:
        torch._foreach_mul_(lowered, factor.to("cpu"))
        for host in hosts:
            host.noted()
