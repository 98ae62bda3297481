"""The example's model and data: a small ConvNeXt that tells the direction of waves in noisy pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from galvatron_lite.model.shapes import ConvNextShape
from galvatron_lite.model.zoo.convnets import ConvNeXt

CLASSES = 6
SIDE = 256
BATCH = 4
SEED = 0
LEARNING_RATE = 2e-3
MAX_GRAD_NORM = 1.0
CONFIG = ConvNextShape(depths=(2, 3), widths=(32, 64), image_size=SIDE, classes=CLASSES)


def waves(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Pictures (samples, 3, SIDE, SIDE) of waves in noise, each across the direction that its label says."""
    samples = len(labels)

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(samples, 1, 1, generator=generator)

    angle = (labels[:, None, None] + draw(-0.3, 0.3)) * math.pi / CLASSES
    across = torch.arange(SIDE) / SIDE
    along = across[:, None] * angle.sin() + across * angle.cos()
    pictures = torch.sin(2 * math.pi * (along * draw(4, 12) + draw(0, 1)))
    return pictures[:, None] + torch.randn(samples, 3, SIDE, SIDE, generator=generator)


def batches(count: int, samples: int = BATCH, seed: int = SEED) -> Iterator[dict[str, Tensor]]:
    """Random pictures and their labels, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        labels = torch.randint(0, CLASSES, (samples,), generator=generator)
        yield {"pictures": waves(labels, generator), "labels": labels}


def make() -> tuple[ConvNeXt, dict[str, Tensor]]:
    """The model and an example batch, for ``galvatron profile scripts/train_convnext_model.py:make``."""
    torch.manual_seed(SEED)
    return ConvNeXt(CONFIG, scale=0.1), next(batches(1))
