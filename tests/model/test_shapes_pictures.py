"""Closed forms of convolutional networks against the captured graphs of the reference models, and published counts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, ModelGraph, OperatorClass, Recompute
from galvatron_lite.model.shapes import Shape, build_graph, load_model, load_shape, shape_from_data
from galvatron_lite.model.shapes.fields import CosmoFlowShape
from galvatron_lite.model.shapes.registry import model_names, shape_from_flags
from galvatron_lite.model.zoo import SIZES, build
from galvatron_lite.parallelism.channel.parts import divides
from galvatron_lite.parallelism.pictures import windows_of
from galvatron_lite.parallelism.spatial.grids import splits_pixels

MINI = [name for name in SIZES if name.endswith("-mini")]


def shape_of(name: str) -> Shape:
    """The shape of a reference model."""
    return shape_from_data(SIZES[name]) if name in SIZES else load_shape(name)


def batch_of(name: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        shape = build(name).config
        sides = (shape.image_size,) * (3 if name.startswith("cosmoflow") else 2)
        entering = torch.empty(2, shape.channels, *sides)
        if name.startswith("cosmoflow"):
            return {"volumes": entering, "targets": torch.empty(2, shape.classes)}
        if name.startswith("perception"):
            return {"pictures": entering, "targets": torch.empty(2, 1, *sides)}
        places = (2, *sides) if name.startswith("unet") else (2,)
        return {"pictures": entering, "labels": torch.empty(places, dtype=torch.long)}


@cache
def graphs(name: str) -> tuple[ModelGraph, ModelGraph]:
    """The captured graph and the closed form of one reference model."""
    with torch.device("meta"):
        model = build(name, **({"dropout": 0.0} if "vgg" in name or "alexnet" in name else {}))
    return trace(model, batch_of(name), precision="fp32"), build_graph(shape_of(name), precision="fp32")


CASES = [*MINI, "cosmoflow-512"]


def pairs(name: str) -> list[tuple[LayerKind, LayerKind]]:
    traced, built = graphs(name)
    return [(traced.kind_of(a), built.kind_of(b)) for a, b in zip(traced.layers, built.layers, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_layers_parameters_and_tensors_between_them_are_equal(name: str) -> None:
    traced, built = graphs(name)
    assert built.parameters == traced.parameters
    assert (built.tensors, built.dead, built.notes) == (traced.tensors, traced.dead, traced.notes)
    if not name.startswith("convnext"):  # transformers and torchvision disagree on what a downsampling layer is called
        assert [layer.name for layer in built.layers] == [layer.name for layer in traced.layers]
    for mine, theirs in pairs(name):
        assert theirs.parameters.total == mine.parameters.total
        assert theirs.buffer_bytes == mine.buffer_bytes
        if theirs.name not in ("before", "after"):  # labels enter the first layer, the loss leaves the last one
            assert (theirs.input_bytes, theirs.output_bytes) == (mine.input_bytes, mine.output_bytes)


def work(kind: LayerKind, backward: bool) -> dict[OperatorClass, int]:
    sums = dict.fromkeys((OperatorClass.CONVOLUTION, OperatorClass.MATMUL), 0)
    for one in kind.operators:
        if one.kind in sums:
            sums[one.kind] += one.backward_flops if backward else one.flops
    return sums


@pytest.mark.parametrize("name", CASES)
def test_work_is_equal(name: str) -> None:
    """By class; a squeeze's two linear layers are convolutions of one pixel in the reference model."""
    for mine, theirs in pairs(name):
        for backward in (False, True):
            ours, counted = work(theirs, backward), work(mine, backward)
            assert sum(ours.values()) == sum(counted.values()), mine.name
            assert ours == counted or "regnet" in name


@pytest.mark.parametrize("name", CASES)
def test_kept_bytes_are_equal(name: str) -> None:
    for mine, theirs in pairs(name):
        assert set(theirs.kept) <= set(mine.kept)
        for choice, kept in theirs.kept.items():
            assert kept.total == mine.kept[choice].total, (mine.name, choice)


@pytest.mark.parametrize("name", CASES)
def test_pictures_windows_and_sums_are_equal(name: str) -> None:
    for mine, theirs in pairs(name):
        ours, counted = theirs.dims, mine.dims
        for field in ("in_channels", "out_channels", "depth", "height", "width"):
            assert getattr(ours, field) == getattr(counted, field), (mine.name, field)
        windows = [sorted(map(repr, windows_of(kind.operators))) for kind in (mine, theirs)]
        assert windows[0] == windows[1], mine.name
        assert sum(one.statistics for one in theirs.operators) == sum(one.statistics for one in mine.operators)


@pytest.mark.parametrize("name", CASES)
def test_the_same_splits_are_offered(name: str) -> None:
    for mine, theirs in pairs(name):
        assert splits_pixels(theirs) == splits_pixels(mine)
        for degree in (2, 4):
            assert divides(theirs, "filters", degree) == divides(mine, "filters", degree), mine.name


def test_half_precision_halves_what_is_kept() -> None:
    """As a model that is cast whole: no copies of weights, no picture in fp32."""
    for name in ("vgg-mini", "unet-mini", "cosmoflow-mini"):
        whole, half = (build_graph(shape_of(name), precision=precision) for precision in ("fp32", "bf16"))
        for layer in whole.layers[1:-1]:
            kept = [graph.kind_of(layer).kept[Recompute.FULL].total for graph in (whole, half)]
            assert kept[0] == 2 * kept[1]


# torchvision's model pages (ResNet, VGG, AlexNet, ConvNeXt, RegNet: "num_params"); ConvNeXt-XL:
# github.com/facebookresearch/ConvNeXt, 350 M, and Liu et al. 2022, table 12; CosmoFlow: the sum of the layer table.
PARAMETERS = {
    "resnet50": 25_557_032, "resnet152": 60_192_808, "vgg16": 138_357_544, "alexnet": 61_100_840,
    "convnext-t": 28_589_128, "convnext-s": 50_223_688, "convnext-b": 88_591_464, "convnext-l": 197_767_336,
    "convnext-xl": 350_196_968, "regnet-x-800mf": 7_259_656, "regnet-x-3.2gf": 15_296_552, "regnet-x-8gf": 39_572_648,
    "regnet-x-32gf": 107_811_560, "regnet-y-400mf": 4_344_144, "regnet-y-3.2gf": 19_436_338,
    "regnet-y-16gf": 83_590_140, "regnet-y-32gf": 145_046_770, "unet": 31_030_658, "unet-bilinear": 17_257_474,
    "cosmoflow-512": 2_128_064, "cosmoflow-256": 2_128_064, "perception": 74_089_462,
    "perception-published": 74_089_462,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_shipped_files_have_the_published_parameters(name: str) -> None:
    assert load_model(name).parameters == PARAMETERS[name]
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in build(name).parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(("side", "pooled"), [(8, 2), (16, 3), (40, 3), (8, 1)])
def test_pooling_to_a_fixed_number_of_pixels(side: int, pooled: int) -> None:
    """From fewer, as many, and more pixels, a whole number of times or not."""
    with torch.device("meta"):
        model = build("vgg-mini", image_size=side, pooled=pooled)
        batch = {"pictures": torch.empty(2, 3, side, side), "labels": torch.empty(2, dtype=torch.long)}
    traced = trace(model, batch).kinds["after"]
    built = build_graph(replace(shape_of("vgg-mini"), image_size=side, pooled=pooled), precision="fp32").kinds["after"]
    assert built.kept[Recompute.NONE].total == traced.kept[Recompute.NONE].total
    assert built.dims.height == traced.dims.height == side // 8
    assert windows_of(built.operators) == windows_of(traced.operators)


def test_pictures_of_which_nothing_is_left_are_named() -> None:
    with pytest.raises(InputError, match="image_size"):
        load_model("alexnet", overrides={"image_size": 32})
    assert load_model("vgg16", overrides={"image_size": 112}).parameters == 138_357_544


def test_hyphens_may_be_left_out() -> None:
    assert load_model("resnet-50") == load_model("resnet50")
    assert type(build("resnetmini")) is type(build("resnet-mini"))


def test_multiply_adds_are_the_published_ones() -> None:
    """Of one forward pass, in 10^9: torchvision's pages ("GFLOPS", which count a multiply-add once)."""
    published = {
        "resnet50": 4.09, "resnet152": 11.51, "vgg16": 15.47, "alexnet": 0.71, "convnext-t": 4.46, "convnext-l": 34.36,
        "regnet-x-800mf": 0.8, "regnet-x-32gf": 31.74, "regnet-y-400mf": 0.4, "regnet-y-16gf": 15.91,
    }  # fmt: skip
    for name, expected in published.items():
        graph = load_model(name)
        macs = sum(graph.kind_of(layer).flops for layer in graph.layers) / 2e9
        assert macs == pytest.approx(expected, abs=0.006), name
    graph = load_model("convnext-xl")  # Liu et al. 2022, table 1
    assert sum(graph.kind_of(layer).flops for layer in graph.layers) / 2e9 == pytest.approx(60.9, rel=0.002)


def test_a_cosmoflows_weights_and_activations_are_the_tables() -> None:
    """Weights, and items that enter and leave convolutions, pooling and matmuls, per sample, at 512^3 voxels."""
    graph = load_model("cosmoflow-512", precision="fp32")
    entering = leaving = 0
    for layer in graph.layers:
        kind = graph.kind_of(layer)
        entering += sum(one.shape[1] for one in kind.operators if one.kind is OperatorClass.MATMUL)
        leaving += sum(one.shape[2] for one in kind.operators if one.kind is OperatorClass.MATMUL)
        for window in windows_of(kind.operators):
            entering, leaving = entering + window.items[0], leaving + window.items[1]
    assert (graph.parameters, entering) == (2_128_064, 3_528_104_656)
    assert leaving == 2_991_233_748


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"arch": "vgg", "depths": [1, 2]}, "depths"),
        ({"arch": "alexnet", "widths": [8, 8]}, "widths"),
        ({"arch": "regnet", "widths": [24, 36], "group": 24}, "group"),
        ({"arch": "unet", "image_size": 100}, "image_size"),
        ({"arch": "cosmoflow", "image_size": 100}, "image_size"),
        ({"arch": "cosmoflow", "kernels": [3, 3]}, "kernels"),
        ({"arch": "cosmoflow", "strides": [1]}, "strides"),
        ({"arch": "perception", "image_size": 63}, "image_size"),
        ({"arch": "perception", "base": 5}, "base"),
        ({"arch": "perception", "classes": 2}, "classes"),
        ({"arch": "vgg", "depths": [0, 1, 1, 1, 1]}, "depths"),
    ],
)
def test_sizes_that_do_not_fit_are_named(data: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field):
        shape_from_data(data)


def test_shape_flags_give_lists() -> None:
    shape = shape_from_flags({"arch": "cosmoflow", "image": "256", "padded": "true", "strides": "1,1,1,2,1,1,1"})
    assert shape == CosmoFlowShape(name="flags", image_size=256, padded=True, strides=(1, 1, 1, 2, 1, 1, 1))
    assert set(PARAMETERS) <= set(model_names())
