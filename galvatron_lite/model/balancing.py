"""Losses that balance the experts of a mixture: whether a model is asked for one, and what its plans keep to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

LOGITS = "router_logits"  # where transformers' models return what their routers computed


def asks_balance(model: nn.Module, batch: Any) -> bool:
    """Whether a model of transformers is asked, by the batch or else by its configuration, to balance its experts."""
    wanted = batch.get(f"output_{LOGITS}") if isinstance(batch, Mapping) else None
    wanted = getattr(getattr(model, "config", None), f"output_{LOGITS}", False) if wanted is None else wanted
    return wanted is True


def undivided_reason(model: nn.Module, batch: Any) -> str:
    """Why several micro-batches train something else than one; empty where they do not.

    A loss that balances experts multiplies two means over all tokens: that of a part of them is another.
    """
    if not asks_balance(model, batch):
        return ""
    return f"one micro-batch: output_{LOGITS} adds a loss on the routers' logits of all tokens together"
