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


def shapes_of(model: nn.Module, paths: list[str]) -> list[tuple[int, ...]]:
    """Shapes of what comes out of some modules, for one sample of the example batch."""
    seen: dict[str, tuple[int, ...]] = {}
    for path in paths:
        model.get_submodule(path).register_forward_hook(
            lambda _module, _args, output, path=path: seen.update({path: tuple(output.shape[1:])})
        )
    config = model.config
    sides = (config.image_size,) * 2
    sides = (config.image_size,) * 3 if hasattr(config, "kernels") else sides
    output = model(torch.empty((1, config.channels, *sides), device="meta"))
    return [*(seen[path] for path in paths), tuple(output.shape[1:])]


STAGES: list[tuple[str, list[str], list[tuple[int, ...]]]] = [
    # He et al. 2015, table 1
    ("resnet-50", ["conv1", "maxpool", *(f"stages.{i}" for i in range(4))],
     [(64, 112, 112), (64, 56, 56), (256, 56, 56), (512, 28, 28), (1024, 14, 14), (2048, 7, 7), (1000,)]),
    ("resnet-152", ["stages.1", "stages.2.35", "stages.3"],
     [(512, 28, 28), (1024, 14, 14), (2048, 7, 7), (1000,)]),
    # Simonyan and Zisserman 2014, table 1
    ("vgg-16", [f"features.{i}" for i in range(5)],
     [(64, 112, 112), (128, 56, 56), (256, 28, 28), (512, 14, 14), (512, 7, 7), (1000,)]),
    ("alexnet", [f"features.{i}" for i in range(5)],
     [(64, 27, 27), (192, 13, 13), (384, 13, 13), (256, 13, 13), (256, 6, 6), (1000,)]),
    # Liu et al. 2022, table 9
    ("convnext-t", ["stem", *(f"stages.{i}" for i in range(4))],
     [(96, 56, 56), (96, 56, 56), (192, 28, 28), (384, 14, 14), (768, 7, 7), (1000,)]),
    # Radosavovic et al. 2020, table 9
    ("regnet-y-3.2gf", ["stem", *(f"trunk.{i}" for i in range(4))],
     [(32, 112, 112), (72, 56, 56), (216, 28, 28), (576, 14, 14), (1512, 7, 7), (1000,)]),
    # Ronneberger et al. 2015, figure 1, with padding
    ("unet", ["inc", *(f"downs.{i}" for i in range(4)), *(f"ups.{i}" for i in range(4))],
     [(64, 512, 512), (128, 256, 256), (256, 128, 128), (512, 64, 64), (1024, 32, 32),
      (512, 64, 64), (256, 128, 128), (128, 256, 256), (64, 512, 512), (2, 512, 512)]),
    ("unet-bilinear", ["downs.3", "ups.0", "ups.3"], [(512, 32, 32), (256, 64, 64), (64, 512, 512), (2, 512, 512)]),
    # the layer tables of the oracle: COSMOFLOW.net and COSMOFLOW.net_256
    ("cosmoflow-512", [f"convolutions.{i}{part}" for i in range(7) for part in (".conv", "")],
     [(16,) + (510,) * 3, (16,) + (255,) * 3, (32,) + (253,) * 3, (32,) + (126,) * 3, (64,) + (62,) * 3,
      (64,) + (31,) * 3, (128,) + (29,) * 3, (128,) + (14,) * 3, (256,) + (13,) * 3, (256,) + (6,) * 3,
      (256,) + (5,) * 3, (256,) + (2,) * 3, (128, 1, 1, 1), (128, 1, 1, 1), (4,)]),
    ("cosmoflow-256", [f"convolutions.{i}" for i in range(7)],
     [(16,) + (128,) * 3, (32,) + (64,) * 3, (64,) + (32,) * 3, (128,) + (8,) * 3, (256,) + (4,) * 3,
      (256,) + (2,) * 3, (128, 1, 1, 1), (4,)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "paths", "shapes"), STAGES, ids=[stage[0] for stage in STAGES])
def test_shapes_of_every_stage(name: str, paths: list[str], shapes: list[tuple[int, ...]]) -> None:
    assert shapes_of(on_meta(name), paths) == shapes


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
