"""Norms that compute in the precision of what they are given, under autocast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from galvatron_lite.parallelism.precision import narrow_norms

WIDTH = 16


class Doubled(nn.LayerNorm):
    """One with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's word
        return 2 * super().forward(input)


@pytest.mark.parametrize("norm", [nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, bias=False), nn.RMSNorm(WIDTH)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_made_has_the_dtype_given(norm: nn.Module, dtype: torch.dtype) -> None:
    with torch.no_grad():
        for one in norm.parameters():
            one.uniform_(0.5, 1.5)
    value = torch.randn(4, WIDTH)
    expected, model = norm(value), nn.Sequential(norm)
    narrow_norms(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = model(value.to(dtype))
    assert made.dtype is dtype
    torch.testing.assert_close(made.float(), expected, rtol=2e-2 if dtype is torch.bfloat16 else 1e-6, atol=2e-2)


def test_weights_have_gradients_in_their_own_dtype() -> None:
    norm = nn.LayerNorm(WIDTH)
    narrow_norms(norm)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        norm(torch.randn(4, WIDTH, dtype=torch.bfloat16)).sum().backward()
    assert norm.weight.grad is not None
    assert norm.weight.grad.dtype is torch.float32


def test_shapes_alone_can_be_asked_for() -> None:
    norm = nn.RMSNorm(WIDTH, device="meta")
    narrow_norms(norm)
    assert norm(torch.empty(3, WIDTH, device="meta")).shape == (3, WIDTH)


def test_norms_with_a_forward_of_their_own_stay() -> None:
    norm, value = Doubled(WIDTH), torch.randn(2, WIDTH)
    expected = norm(value)
    narrow_norms(norm)
    assert "forward" not in vars(norm)
    assert torch.equal(norm(value), expected)
