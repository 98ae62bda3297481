"""The autocast that is in force."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What autocast casts matmuls to where a tensor lies; None outside of it and on the meta device, which has none."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
