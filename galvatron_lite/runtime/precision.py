"""The precision of compute. Parameters, their gradients and the optimizer's states stay float32.

Under bf16 and fp16 the model runs inside autocast, and floating-point inputs of every block are cast, so that
activations are of that precision whichever way a layer is split: ZeRO gathers parameters in it, and all else is cast
where autocast casts it: weights once a step (``holding_copies``). Norms compute in it, too (``runtime.norms``), and
stacked experts (``runtime.stacked_experts``). Under fp16 the loss is scaled (``runtime.scaling``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

from galvatron_lite.errors import InputError

_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: str) -> torch.dtype | None:
    """The dtype that compute is cast to; None where it runs in the parameters' own (fp32).

    Raises:
        InputError: a precision that training does not offer.
    """
    if precision not in _DTYPES:
        raise InputError("precision", precision, f"Choose one of {', '.join(_DTYPES)}.")
    return _DTYPES[precision]


def compute_context(compute: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """What forward passes run inside."""
    return nullcontext() if compute is None else torch.autocast(device.type, dtype=compute)


@contextmanager
def holding_copies(compute: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """What all forward and backward passes of a step run inside, for weights to be cast once.

    Autocast keeps the copies that it makes until the outermost of its contexts is left. Were that of one forward pass
    the outermost, each micro-batch in flight would hold copies of its own. This one casts nothing by itself.
    """
    if compute is None:
        yield
        return
    before = _HELD.set({})
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _HELD.reset(before)


def copy_held(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a parameter in another dtype, made once a step where autocast would make one of a weight only once."""
    held = _HELD.get()
    if held is None or not torch.is_autocast_cache_enabled() or not torch.is_grad_enabled():
        return parameter.to(dtype)
    key = id(parameter)
    if key not in held:
        held[key] = parameter, parameter.to(dtype)
    return held[key][1]


_HELD: ContextVar[dict[int, tuple[Tensor, Tensor]] | None] = ContextVar("galvatron_held_copies", default=None)
"""Parameters and their copies, of the step that runs."""
