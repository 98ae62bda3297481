"""Whether a model learns."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def assert_learns(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Some steps of gradient descent lower the loss of a batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses: list[Tensor] = []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(model(**batch))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
