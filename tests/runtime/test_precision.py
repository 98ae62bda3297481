"""Copies of weights that autocast makes, and how long they last."""

from __future__ import annotations

import torch
from torch import nn

from galvatron_lite.parallelism.precision import compute_context, holding_copies

CPU = torch.device("cpu")


def copies_kept(passes: int) -> int:
    """Different half-precision copies of a Linear's weight that so many forward passes keep for backward."""
    linear, kept = nn.Linear(4, 8, bias=False), set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) in ((8, 4), (4, 8)):
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    losses = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        for _ in range(passes):
            with compute_context(torch.bfloat16, CPU):
                losses.append(linear(torch.randn(3, 4, requires_grad=True)).float().sum())
    gradients = [torch.autograd.grad(loss, linear.weight)[0] for loss in losses]
    assert all(one.dtype is torch.float32 for one in gradients)
    return len(kept)


def test_passes_of_a_step_share_copies() -> None:
    assert copies_kept(3) == 3
    with holding_copies(torch.bfloat16, CPU):
        assert copies_kept(3) == 1
        assert not torch.is_autocast_enabled("cpu")


def test_nothing_is_held_in_full_precision() -> None:
    with holding_copies(None, CPU):
        assert copies_kept(2) == 2
