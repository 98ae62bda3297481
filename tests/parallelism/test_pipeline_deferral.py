"""Gradients of weights that are made later are those of backward."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from galvatron_lite.parallelism.pipeline.deferral import Deferral, defer_weights


class InPlace(nn.Module):
    """Writes to what a linear layer gave, which is a view where there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        hidden *= self.scale
        hidden += 1
        return hidden.square().sum()


def test_results_may_be_written_to() -> None:
    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(2, 3, 4)
    alone = copy.deepcopy(model)
    alone(x).backward()
    deferral = Deferral()
    defer_weights(model, deferral)
    model(x).backward()
    assert model.linear.weight.grad is None
    for task in deferral.take():
        task()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
