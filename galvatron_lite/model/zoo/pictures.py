"""What the reference models of pictures share: their example batches and their losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def classification_loss(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Mean cross-entropy of logits (samples, classes, ...) with labels (samples, ...); the logits without labels."""
    return logits if labels is None else F.cross_entropy(logits.float(), labels)


def random_pictures(samples: int, shape: Sequence[int], classes: int, places: Sequence[int] = ()) -> dict[str, Tensor]:
    """Random pictures (samples, *shape), and labels below ``classes`` of shape (samples, *places)."""
    draw = torch.Generator().manual_seed(0)
    return {
        "pictures": torch.rand((samples, *shape), generator=draw),
        "labels": torch.randint(0, classes, (samples, *places), generator=draw),
    }
