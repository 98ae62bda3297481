"""Reference models of pictures: published parameter counts, shapes of every stage, losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.model.zoo import SIZES, build
from tests.model.learning import assert_learns

# Of shipped files, see ``test_shapes_pictures``. U-Net: github.com/milesial/Pytorch-UNet
# (3 channels, normalised: 31,037,698 with 2 classes; 31,037,633 and bilinear 17,262,977 with 1) and
# github.com/mateuszbuda/brain-segmentation-pytorch (32 channels, 7,763,041).
PUBLISHED: list[tuple[str, dict[str, Any], int]] = [
    ("unet", {"norm": True, "channels": 3}, 31_037_698),
    ("unet", {"norm": True, "channels": 3, "classes": 1}, 31_037_633),
    ("unet", {"norm": True, "channels": 3, "classes": 1, "bilinear": True}, 17_262_977),
    ("unet", {"norm": True, "channels": 3, "classes": 1, "base": 32}, 7_763_041),
]
MINI = [name for name in SIZES if name.endswith("-mini") and not name.startswith("perception")]


def on_meta(name: str, **fields: Any) -> nn.Module:
    with torch.device("meta"):
        return build(name, **fields)


@pytest.mark.parametrize(("name", "fields", "parameters"), PUBLISHED)
def test_published_parameters(name: str, fields: dict[str, Any], parameters: int) -> None:
    assert sum(parameter.numel() for parameter in on_meta(name, **fields).parameters()) == parameters


@pytest.mark.parametrize("name", MINI)
def test_small_sizes_learn_their_example_batch(name: str) -> None:
    """The loss is that of the outputs, and some steps of gradient descent lower it."""
    torch.manual_seed(0)
    model = build(name)
    batch = model.example_batch(4)
    entering, labels = batch.values()
    expected = (F.mse_loss if "targets" in batch else F.cross_entropy)(model(entering), labels)
    torch.testing.assert_close(model(**batch), expected)
    assert_learns(model, batch)


def test_a_convnext_on_the_meta_device_can_be_initialised() -> None:
    model = on_meta("convnext-mini").to_empty(device="cpu")
    model.apply(model._init_weights)
    assert torch.equal(model.stages[0][0].gamma, torch.full((8,), 1e-6))
