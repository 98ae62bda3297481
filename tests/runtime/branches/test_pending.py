"""Functions of what branches return, which run later than they are called."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from galvatron_lite.runtime.branches.pending import DeferredFunction, pending, resolved
from galvatron_lite.runtime.loss.weights import ShareScale


@dataclass
class Run:
    device: torch.device
    applied: list[DeferredFunction] = field(default_factory=list)
    shapes: dict[object, Any] = field(default_factory=dict)


@dataclass
class Branch:
    run: Run
    output: Tensor

    def value(self) -> Tensor:
        return self.output


def test_terms_of_a_loss_are_scaled_once_where_they_are_called() -> None:
    logits, targets = torch.randn(3, 4), torch.arange(3)
    late = pending(Branch(Run(logits.device), logits), torch.empty(3, 4, device="meta"))
    with ShareScale(terms=(torch.tensor(2.0),)).inside():
        loss = resolved(functional.cross_entropy(late, targets))
    torch.testing.assert_close(loss, 2 * functional.cross_entropy(logits, targets))
