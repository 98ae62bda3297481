"""The loss of the perception network: squared and absolute differences of pictures and of their edges."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

_PICTURE, _EDGES = 0.85, 0.15


def edges(pictures: Tensor) -> Tensor:
    """How steep pictures (..., height, width) are at every pixel with eight neighbours, (..., height - 2, width - 2).

    The length of the slopes along both sides by Sobel's kernels: differences of pixels two apart, weighted 1, 2, 1
    across. Where there is no slope the gradient is 0.
    """
    across, along = _weighted(pictures, -1), _weighted(pictures, -2)
    slopes = torch.stack([across[..., 2:, :] - across[..., :-2, :], along[..., 2:] - along[..., :-2]])
    steep: Tensor = torch.linalg.vector_norm(slopes, dim=0)
    return steep


def _weighted(pictures: Tensor, dim: int) -> Tensor:
    """Sums of three neighbours along a dim, weighted 1, 2, 1; two fewer."""
    inner = pictures.shape[dim] - 2
    one, two, three = (pictures.narrow(dim, start, inner) for start in range(3))
    return one + 2 * two + three


def edge_loss(pictures: Tensor, targets: Tensor) -> Tensor:
    """0.85 MSE + 0.15 MSE of the edges + 0.85 smooth L1 + 0.15 smooth L1 of the edges; a scalar.

    MSSCE of Sah and Chinara 2024 (arXiv:2412.18165), but for the edges: theirs are Canny's, through which no gradient
    flows; these are Sobel's, which can be derived.

    Args:
        pictures: (samples, 1, height, width), at least three pixels along each side.
        targets: what they should be, of the same shape.
    """
    pairs = ((_PICTURE, pictures, targets), (_EDGES, edges(pictures), edges(targets)))
    terms = [weight * (F.mse_loss(x, y) + F.smooth_l1_loss(x, y)) for weight, x, y in pairs]
    return terms[0] + terms[1]
