"""The loss of the perception network: squared and absolute differences of pictures and of their edges."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

_SOBEL = ((-1.0, 0.0, 1.0), (-2.0, 0.0, 2.0), (-1.0, 0.0, 1.0))
_PICTURE, _EDGES = 0.85, 0.15


def edges(pictures: Tensor) -> Tensor:
    """How steep pictures (samples, 1, height, width) are at every pixel, by Sobel's two kernels; the same shape."""
    kernel = pictures.new_tensor(_SOBEL)
    slopes = F.conv2d(pictures, torch.stack([kernel, kernel.T]).unsqueeze(1), padding=1)
    steep: Tensor = torch.linalg.vector_norm(slopes, dim=1, keepdim=True)
    return steep


def edge_loss(pictures: Tensor, targets: Tensor) -> Tensor:
    """0.85 MSE + 0.15 MSE of the edges + 0.85 smooth L1 + 0.15 smooth L1 of the edges; a scalar.

    MSSCE of Sah and Chinara 2024 (arXiv:2412.18165), but for the edges: theirs are Canny's, through which no gradient
    flows; these are Sobel's, which every pixel's gradient passes.

    Args:
        pictures: (samples, 1, height, width).
        targets: what they should be, of the same shape.
    """
    pairs = ((_PICTURE, pictures, targets), (_EDGES, edges(pictures), edges(targets)))
    terms = [weight * (F.mse_loss(x, y) + F.smooth_l1_loss(x, y)) for weight, x, y in pairs]
    return terms[0] + terms[1]
