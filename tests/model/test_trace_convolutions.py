"""Captured convolutional networks: layers, what autograd keeps, extents, windows, statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.capture.trace import trace
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import LayerKind, ModelGraph, OperatorClass, Recompute
from galvatron_lite.model.sides import sides_from_figures
from galvatron_lite.model.trace.operators import extents
from galvatron_lite.model.zoo import SIZES, build
from galvatron_lite.parallelism.backends import ANY
from galvatron_lite.parallelism.pictures import channels_of, extents_of, has_weights, items_of
from galvatron_lite.parallelism.recompute.apply import apply_recompute
from galvatron_lite.parallelism.spatial.grids import sensible_grids
from galvatron_lite.search.space import Fixed, Space
from tests.model.models import saved_bytes

Made = tuple[nn.Module, dict[str, Any]]
SAMPLES = 4


class Flat(nn.Module):
    """A user's network in one Sequential of unlike modules, activations in place, as torchvision writes VGG."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
            nn.ReLU(inplace=True), nn.MaxPool2d(2, 2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(nn.Linear(64, 16), nn.ReLU(inplace=True), nn.Linear(16, 10))

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        x = torch.flatten(self.avgpool(self.features(pictures)), 1)
        return F.cross_entropy(self.classifier(x), labels)


def conv_norm(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True))


class Rows(nn.Module):
    """A user's network of Sequentials that are attributes, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(*conv_norm(3, 8), nn.MaxPool2d(2))
        self.layer2 = nn.Sequential(*conv_norm(8, 16), nn.MaxPool2d(2))
        self.layer3 = nn.Sequential(*conv_norm(16, 16), nn.MaxPool2d(2))
        self.fc = nn.Linear(16 * 4, 10)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(pictures)))
        return F.cross_entropy(self.fc(x.flatten(1)), labels)


class Mirror(nn.Module):
    """A user's U-Net of attributes, with pooling modules and concatenation in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder1, self.pool1 = conv_norm(3, 4), nn.MaxPool2d(2)
        self.encoder2, self.pool2 = conv_norm(4, 8), nn.MaxPool2d(2)
        self.bottleneck = conv_norm(8, 16)
        self.up2, self.decoder2 = nn.ConvTranspose2d(16, 8, 2, 2), conv_norm(16, 8)
        self.up1, self.decoder1 = nn.ConvTranspose2d(8, 4, 2, 2), conv_norm(8, 4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        one = self.encoder1(pictures)
        two = self.encoder2(self.pool1(one))
        x = self.up2(self.bottleneck(self.pool2(two)))
        x = self.up1(self.decoder2(torch.cat([x, two], dim=1)))
        x = self.head(self.decoder1(torch.cat([x, one], dim=1)))
        return F.cross_entropy(x.mean([-2, -1]), labels)


class Loss(nn.Module):
    """A model of transformers as one that gives its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(pixel_values=pixel_values, labels=labels).loss
        return loss


def pictures(side: int) -> dict[str, Any]:
    return {"pictures": torch.randn(SAMPLES, 3, side, side), "labels": torch.zeros(SAMPLES, dtype=torch.long)}


def of_zoo(name: str) -> Made:
    model = build(name)
    return model, model.example_batch(SAMPLES)


def of_transformers(family: str) -> Made:
    import transformers

    if family == "ResNet":
        config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], num_labels=10)
        model: nn.Module = transformers.ResNetForImageClassification(config)
    else:
        config = transformers.ConvNextConfig(num_stages=2, hidden_sizes=[8, 16], depths=[2, 2], num_labels=10)
        model = transformers.ConvNextForImageClassification(config)
    return Loss(model), {"pixel_values": pictures(32)["pictures"], "labels": pictures(32)["labels"]}


MODELS: dict[str, Callable[[], Made]] = {
    name: lambda name=name: of_zoo(name) for name in SIZES if name.endswith("-mini")
} | {
    "flat": lambda: (Flat(), pictures(16)),
    "rows": lambda: (Rows(), pictures(16)),
    "mirror": lambda: (Mirror(), pictures(16)),
    "transformers-resnet": lambda: of_transformers("ResNet"),
    "transformers-convnext": lambda: of_transformers("ConvNext"),
}


@cache
def captured(name: str) -> ModelGraph:
    torch.manual_seed(0)
    return trace(*MODELS[name]())


@pytest.mark.parametrize("name", MODELS)
def test_layers_keep_what_autograd_keeps_each_tensor_once(name: str) -> None:
    """What grows with the batch: the difference of real runs of the whole model at two batch sizes."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    half = {field: tensor[: SAMPLES // 2].clone() for field, tensor in batch.items()}
    real = (saved_bytes(lambda: model(**batch), model) - saved_bytes(lambda: model(**half), model)) / (SAMPLES // 2)
    graph = captured(name)
    again = batch["pictures"][0].nbytes if "perception" in name else 0  # each of two networks counts what both read
    assert sum(graph.kind_of(layer).kept[Recompute.NONE].total for layer in graph.layers) == real + again


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_work_are_the_models(name: str) -> None:
    """Multiply-adds of convolutions and linear layers, from the shapes that came out of them in a real run."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    macs: list[int] = []

    def count(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        source = args[0] if isinstance(module, nn.ConvTranspose2d) else output
        per_item = module.weight[0].numel()
        macs.append(source[0].numel() * per_item)

    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.Linear)):
            module.register_forward_hook(count)
    model(**batch)
    graph = captured(name)
    heavy = (OperatorClass.CONVOLUTION, OperatorClass.MATMUL)
    operators = [one for layer in graph.layers for one in graph.kind_of(layer).operators if one.kind in heavy]
    assert sum(one.flops for one in operators) == 2 * sum(macs)
    assert graph.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sum(items_of(one)[2] for one in operators) == sum(p.numel() for p in model.parameters() if p.dim() > 1)


TWO_NETWORKS = [
    *(f"segmentation.{part}.{level}" for level in range(3) for part in ("downs", "sides")),
    *(f"segmentation.ups.{level}" for level in range(3)),
    *(f"reconstruction.{part}.{level}" for part in ("downs", "ups") for level in range(3)),
]
BLOCKS = {
    "perception-mini": TWO_NETWORKS,
    "perception-published-mini": TWO_NETWORKS,
    "resnet-mini": ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"],
    "vgg-mini": ["features.0", "features.1", "features.2"],
    "alexnet-mini": [f"features.{i}" for i in range(5)],
    "convnext-mini": ["stages.0.0", "stages.0.1", "downsamples.0", "stages.1.0", "stages.1.1"],
    "regnet-mini": ["trunk.0.0", "trunk.0.1", "trunk.1.0", "trunk.1.1"],
    "unet-mini": ["downs.0", "downs.1", "ups.0", "ups.1"],
    "unet-bilinear-mini": ["downs.0", "downs.1", "ups.0", "ups.1"],
    "cosmoflow-mini": [f"convolutions.{i}" for i in range(5)],
    "flat": [f"features.{i}" for i in range(9)],
    "rows": ["layer1", "layer2", "layer3"],
    "mirror": [
        "encoder1", "pool1", "encoder2", "pool2", "bottleneck", "up2", "decoder2", "up1", "decoder1",
    ],
    "transformers-resnet": [f"model.resnet.encoder.stages.{i}.layers.{j}" for i in range(2) for j in range(2)],
    "transformers-convnext": [
        f"model.convnext.encoder.stages.{part}"
        for part in ("0.layers.0", "0.layers.1", "1.downsampling_layer.0", "1.downsampling_layer.1", "1.layers.0",
                     "1.layers.1")
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_blocks_and_levels_are_layers(name: str) -> None:
    layers = discover_layers(*MODELS[name]())
    assert [layer.name for layer in layers] == ["before", *BLOCKS[name], "after"]
    assert [layer.name for layer in captured(name).layers] == ["before", *BLOCKS[name], "after"]


def kinds_of(name: str) -> list[LayerKind]:
    graph = captured(name)
    return [graph.kind_of(layer) for layer in graph.layers]


def test_an_activation_that_overwrites_its_input_cannot_run_again() -> None:
    chosen = [set(kind.kept) for kind in kinds_of("flat")[1:-1]]
    every = set(Recompute)
    once = {Recompute.NONE}
    assert chosen == [every, once, every, every, once, every, every, once, every]


def test_what_is_summed_over_all_pixels() -> None:
    """Two figures a channel of batch normalisation, one of a mean; shortcuts and squeezes among them."""
    before, first, *_, after = kinds_of("resnet-mini")
    assert [sum(one.statistics for one in kind.operators) for kind in (before, first, after)] == [16, 160, 64]
    block = kinds_of("regnet-mini")[2]
    assert sum(one.statistics for one in block.operators) == 2 * 3 * 8 + 8


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.max_pool2d(x, (2, 3)),
        lambda x: F.max_pool2d(x, 2, dilation=3),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.adaptive_avg_pool2d(x, (4, 5)),
        lambda x: F.adaptive_max_pool2d(x, 2),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: F.interpolate(x, size=(24, 48), mode="bilinear"),
        lambda x: F.interpolate(x, scale_factor=3, mode="nearest"),
        lambda x: F.interpolate(x[None], scale_factor=2, mode="trilinear")[0],
        lambda x: F.max_pool3d(x[None], (1, 2, 2))[0],
        lambda x: F.avg_pool3d(x[None], 3, 2, 1)[0],
        lambda x: nn.Conv1d(4, 6, 3, 2, 2, 2)(x[:, :, 0])[None],
        nn.Conv2d(4, 6, (3, 5), (1, 2), (1, 0), (2, 1), groups=2),
        nn.ConvTranspose2d(4, 6, 2, 2),
        nn.ConvTranspose2d(4, 6, (4, 3), (2, 1), groups=2),
    ],
)
def test_windows_tell_the_extents_after_them(call: Callable[[Tensor], Tensor]) -> None:
    """Of pictures of 4 x 8 x 12 (2 samples), or of volumes of as many items."""
    x = torch.zeros(2, 4, 8, 12)
    sizes, after = max(seen(lambda: call(x)), key=len), call(x).shape
    sides = sides_from_figures(sizes[3:] if sizes[:2] == (4, 6) else sizes[2:])
    assert tuple(side.extent for side in sides) == x.shape[4 - len(sides) :]
    assert tuple(side.output for side in sides) == after[4 - len(sides) :]


@pytest.mark.parametrize("groups", [1, 4])
def test_either_gradient_of_a_convolution_takes_what_forward_does(groups: int) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, groups=groups), nn.ConvTranspose2d(8, 4, 2, 2))
    graph = trace(model, torch.randn(2, 4, 6, 6), loss_fn=lambda output, _: output.mean(), blocks=())
    plain, back = (one for one in graph.kind_of(graph.layers[0]).operators if one.kind is OperatorClass.CONVOLUTION)
    assert plain.flops == 2 * 36 * 8 * (4 // groups) * 9
    assert plain.backward_flops == plain.flops  # a picture takes no gradient
    assert back.flops == 2 * 36 * 8 * 4 * 4
    assert back.backward_flops == 2 * back.flops


@pytest.mark.parametrize("times", [2, 3, 4])
def test_what_interpolation_reads(times: int) -> None:
    """A pixel of the output depends on those of the input that the window says, and on no others."""
    x = torch.randn(1, 1, 1, 12, dtype=torch.float64, requires_grad=True)
    y = F.interpolate(x, scale_factor=(1, times), mode="bilinear")
    side = sides_from_figures(
        seen(lambda: F.interpolate(torch.zeros(1, 1, 12), scale_factor=times, mode="linear"))[-1][2:]
    )[0]
    for place in range(side.output):
        (gradient,) = torch.autograd.grad(y[0, 0, 0, place], x, retain_graph=True)
        reached = [i for i in range(12) if 0 <= place + side.padding - i * side.stride < side.reach]
        touched = gradient.flatten().nonzero().flatten().tolist()
        assert set(touched) <= set(reached)
        assert len(reached) - len(touched) <= 1


def test_interpolation_that_copies_shares_nothing() -> None:
    sizes = seen(lambda: F.interpolate(torch.zeros(2, 4, 8, 12), scale_factor=2, mode="nearest"))[-1]
    assert [(side.kernel, side.stride, side.transposed) for side in sides_from_figures(sizes[2:])] == [(2, 2, True)] * 2


def seen(run: Callable[[], object]) -> list[tuple[int, ...]]:
    """Sizes of every operator below autograd."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[tuple[int, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            given = output if isinstance(output, tuple) else (output,)
            found.append(extents(func, args, [one for one in given if isinstance(one, Tensor)]))
            return output

    with Watch():
        run()
    return found


def test_a_shared_transposed_convolution_counts_its_weights_and_outputs() -> None:
    up = next(one for one in kinds_of("unet-mini")[3].operators if one.name.startswith("up.") and has_weights(one))
    assert items_of(up) == (16 * 8 * 8, 8 * 16 * 16, 16 * 8 * 4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("devices", [2, 4])
def test_the_search_is_offered_pixels_and_channels(name: str, devices: int) -> None:
    """Pixels wherever a picture is large enough for so many devices; channels wherever there are dense convolutions."""
    graph = captured(name)
    space = Space(graph, 8, ANY)
    for kind in {layer.kind for layer in graph.layers[1:-1]}:
        own, strategies = graph.kinds[kind], space.strategies(kind, devices, Fixed())
        assert any(one.spatial == devices for one in strategies) == bool(sensible_grids(own, devices))
        assert devices > 2 or sensible_grids(own, devices) or min(extents_of(own)[1:]) < 4
        dense = any(has_weights(one) and channels_of(one)[2] == 1 for one in own.operators)
        assert devices > 2 or any(one.slices == devices for one in strategies) == dense


@pytest.mark.parametrize("name", ["vgg-mini", "resnet-mini", "unet-mini", "cosmoflow-mini", "flat"])
def test_recomputation_is_offered_where_it_runs(name: str) -> None:
    """Blocks run for real under every choice that is offered; none that overwrites its input would run again."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    graph = captured(name)
    for choice in (Recompute.SELECTIVE, Recompute.FULL):
        for layer in graph.layers[1:-1]:
            twin = copy.deepcopy(model)
            apply_recompute(twin.get_submodule(layer.name), choice)
            if choice in graph.kind_of(layer).kept:
                run_once(twin, batch)
            elif choice is Recompute.FULL:
                with pytest.raises(RuntimeError):
                    run_once(twin, batch)


def run_once(model: nn.Module, batch: dict[str, Any]) -> None:
    model(**batch).backward()


def test_norms_with_a_plain_mean_of_all_batches_are_captured() -> None:
    """torch counts batches there, and reads the count."""
    (model, batch), (other, _) = MODELS["flat"](), MODELS["flat"]()
    for module in other.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    one, two = (trace(each, batch) for each in (model, other))
    assert one.kinds == two.kinds
    assert all(module.momentum is None for module in other.modules() if isinstance(module, nn.BatchNorm2d))
