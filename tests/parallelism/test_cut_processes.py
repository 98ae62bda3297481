"""Cut tensors of real processes: the collectives and messages of gloo."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from galvatron_lite.parallelism.cuts.functions import own
from galvatron_lite.parallelism.cuts.line import ProcessLine
from galvatron_lite.parallelism.cuts.tensor import Cut, local_of
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES
from tests.parallelism.cut_functions import picture, train
from tests.pool import WorkerPool


def segment(x: Tensor, target: Tensor) -> list[Tensor]:
    """A crop, shares of unequal length that move and are gathered, statistics, a mask and a loss."""
    cropped = functional.relu(x[:, :, 2:, ::2] * 2, inplace=True)
    normed = (cropped - cropped.mean((2, 3), keepdim=True)) / (cropped.var((2, 3), keepdim=True) + 1).sqrt()
    largest = normed.amax((2, 3))
    mask = torch.logical_xor(normed > 0, torch.flip(normed, (2,)) > 0)
    loss = functional.cross_entropy(normed, target, ignore_index=2)
    return [torch.where(mask, normed, cropped), largest, loss, normed.flatten(1), normed[:, :, -1]]


TARGET = torch.randint(0, 3, (2, 6, 3), generator=torch.Generator().manual_seed(1))


def one_rank() -> tuple[list[Tensor], Tensor, Tensor]:
    line = ProcessLine()
    leaf = picture(2, 3, 8, 5).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cut = own(leaf.view_as(leaf), (Cut(2, 8, line),), PIXELS_RULES)
        found = train(lambda x: segment(x, TARGET), [leaf], [cut], dist.get_world_size())
    torch.manual_seed(3)
    dropped = functional.dropout(torch.ones_like(cut), 0.5)
    return found, local_of(dropped).detach(), torch.rand(3)


def test_processes_share_a_picture(pool: WorkerPool) -> None:
    leaf = picture(2, 3, 8, 5).requires_grad_()
    *expected, gradient = train(lambda x: segment(x, TARGET), [leaf], [leaf.view_as(leaf)], 1)
    everyone = pool.run(3, one_rank)
    near = {"rtol": 1e-10, "atol": 1e-10}
    for found, _, _ in everyone:
        torch.testing.assert_close(found[:-1], expected, **near)
    torch.testing.assert_close(torch.stack([found[-1] for found, _, _ in everyone]).sum(0), gradient, **near)
    assert not torch.equal(everyone[0][1], everyone[1][1])
    assert torch.equal(everyone[0][2], everyone[2][2])
