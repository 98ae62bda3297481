"""Losses that balance the experts of a mixture, and what they forbid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

LOGITS = "router_logits"  # output of transformers' models


def asks_balance(model: nn.Module, batch: Any) -> bool:
    """Whether the batch, or else the configuration, asks a model of transformers to balance its experts."""
    wanted = batch.get(f"output_{LOGITS}") if isinstance(batch, Mapping) else None
    wanted = getattr(getattr(model, "config", None), f"output_{LOGITS}", False) if wanted is None else wanted
    return wanted is True


def undivided_reason(model: nn.Module, batch: Any) -> str:
    """Return why several micro-batches train something else than one; empty if they do not.

    A loss that balances experts multiplies two means over all tokens, so it is no mean of the losses of parts.
    """
    if not asks_balance(model, batch):
        return ""
    return f"one micro-batch: output_{LOGITS} adds a loss on the routers' logits of all tokens together"
