"""Norms that compute in the precision of what they are given, under autocast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from galvatron_lite.parallelism.precision import narrow_norms
from galvatron_lite.verify.dry.ledger import Ledger
from galvatron_lite.verify.dry.mode import DryMode
from galvatron_lite.verify.dry.world import RankPlace

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


class RootNorm(nn.Module):
    """RMSNorm in steps, as models of transformers have it; ``offset`` of its weight (Gemma has 1)."""

    def __init__(self, offset: float | None = None) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.offset = nn.Parameter(torch.rand(WIDTH)), 1e-6, offset

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        wide = value.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight if self.offset is None else self.weight + self.offset) * wide.to(value.dtype)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(WIDTH)), 1e-6

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.weight * value


def test_a_module_that_computes_rms_norm_keeps_and_gives_narrow_tensors() -> None:
    norm, value = RootNorm(), torch.randn(4, WIDTH)
    expected, told = norm(value), DryMode(Ledger(RankPlace()))
    with told:  # values are not there; what the module computes is found out all the same
        narrow_norms(norm)
    assert "forward" in vars(norm)
    torch.testing.assert_close(norm(value), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = norm(value.bfloat16())
    assert made.dtype is torch.bfloat16
    torch.testing.assert_close(made.float(), expected, rtol=2e-2, atol=2e-2)
    made.sum().backward()
    assert norm.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("module", [RootNorm(1.0), Scale()], ids=str)
def test_modules_that_compute_something_else_stay(module: nn.Module) -> None:
    narrow_norms(module)
    assert "forward" not in vars(module)
