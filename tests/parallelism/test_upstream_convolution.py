"""Why convolutions of cut pictures are our own: DTensor's are not right when a side of the picture is sharded.

torch 2.13 returns an output labelled whole (Replicate) that is only a share, made without borrowed rows. Up to 2.12 the
last side is right in forward, but its input gets no gradient, and rows are exchanged along the wrong side. The day this
test fails, look whether ``parallelism/spatial`` can be built on DTensor instead.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.pool import WorkerPool

RANKS = 2


def sharded_convolution(side: int | None) -> dict[str, bool | str]:
    """What a convolution of a picture that is sharded along a side (None: whole) gives: which results are right."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    picture, weight = torch.randn(1, 2, 8, 8), torch.randn(3, 2, 3, 3)
    leaf = picture.clone().requires_grad_()
    expected = functional.conv2d(leaf, weight, padding=1)
    expected.square().sum().backward()
    assert leaf.grad is not None
    mesh = init_device_mesh("cpu", (RANKS,))
    placement = Replicate() if side is None else Shard(side)
    theirs = distribute_tensor(picture, mesh, [placement]).requires_grad_()
    found: dict[str, bool | str] = {"forward": False, "gradient": False, "labelled whole": False, "error": ""}
    try:
        result = functional.conv2d(theirs, distribute_tensor(weight, mesh, [Replicate()]), padding=1)
        assert isinstance(result, DTensor)
        found["labelled whole"] = result.placements == (Replicate(),)
        found["forward"] = _near(result.full_tensor(), expected.detach())
        result.square().sum().backward()
        gradient = theirs.grad
        found["gradient"] = isinstance(gradient, DTensor) and _near(gradient.full_tensor(), leaf.grad)
    except Exception as error:
        found["error"] = repr(error)
    return found


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_what_is_compared_is_right_where_nothing_is_sharded(pool: WorkerPool) -> None:
    for found in pool.run(RANKS, sharded_convolution, side=None):
        assert found["forward"], found
        assert found["gradient"], found


@pytest.mark.parametrize("side", [2, 3])
def test_dtensors_convolution_is_not_right_along_a_sharded_side(pool: WorkerPool, side: int) -> None:
    for found in pool.run(RANKS, sharded_convolution, side=side):
        assert not (found["forward"] and found["gradient"]), "DTensor's convolution is right: see this module's text"
        if torch.__version__.startswith("2.13."):
            assert found["labelled whole"], found
            assert not found["forward"], found
