"""ResNet-50 on pictures of 224 x 224, for the accuracy of shared pixels at the size of a published network."""

from __future__ import annotations

import torch
from torch import Tensor

from galvatron_lite.model import zoo
from galvatron_lite.model.example import example_batch
from galvatron_lite.model.zoo.convnets import ImageClassifier

BATCH = 64 if torch.cuda.is_available() else 4
SEED = 0


def make() -> tuple[ImageClassifier, dict[str, Tensor]]:
    """The model and a batch of random pictures, for ``galvatron profile scripts/resnet50_model.py:make``."""
    torch.manual_seed(SEED)
    model = zoo.build("resnet-50")
    assert isinstance(model, ImageClassifier)
    return model, example_batch(model, BATCH)
