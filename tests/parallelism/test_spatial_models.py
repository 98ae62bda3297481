"""Small networks, as users write them, on cut pictures: results and gradients are those of one device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from math import prod

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.parallelism.sharded.collectives import distribute, full_tensor
from galvatron_lite.parallelism.sharded.tensor import ShardSpec
from galvatron_lite.parallelism.spatial.apply import bind_modules
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES
from tests.parallelism.sharded_compare import lines_of, picture, results_of, weights
from tests.parallelism.thread_group import ThreadGroup, run_threads


class SqueezeExcite(nn.Module):
    """Hu et al. 2018: channels weighed by what their means say."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 4), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        x = functional.silu(self.conv(x))
        b, c, _, _ = x.size()
        scale = self.fc(self.pool(x).view(b, c)).view(b, c, 1, 1)
        return x * scale.expand_as(x)


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class SmallUNet(nn.Module):
    """Ronneberger et al. 2015: skips are padded (or cropped) to what was up-sampled."""

    def __init__(self, bilinear: bool, crop: bool = False) -> None:
        super().__init__()
        self.crop = crop
        self.first, self.second = _double(4, 4), nn.Sequential(nn.MaxPool2d(2), _double(4, 8))
        up = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), nn.Conv2d(8, 4, 1))
        self.up = up if bilinear else nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last, self.out = _double(8, 4), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        x = self.up(self.second(skip))
        dy, dx = skip.size()[2] - x.size()[2], skip.size()[3] - x.size()[3]
        if self.crop:
            skip = skip[:, :, : x.shape[2], : x.shape[3]]
        else:
            x = functional.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.out(self.last(torch.cat([skip, x], dim=1)))


class Vgg(nn.Module):
    """Simonyan and Zisserman 2014: flattened pictures of 7 x 7."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2, 2))
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(nn.Linear(3 * 7 * 7, 8), nn.ReLU(True), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class Volumes(nn.Module):
    """CosmoFlow's kind of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = nn.Conv3d(2, 3, 3, padding=1), nn.GroupNorm(3, 3), nn.MaxPool3d(2)
        self.up, self.fc = nn.ConvTranspose3d(3, 3, 2, 2), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(functional.leaky_relu(self.norm(self.conv(x)), 0.3))
        return self.fc(self.up(x).mean(dim=(-3, -2, -1)))


class Pyramid(nn.Module):
    """Chen et al. 2017: dilated convolutions and a whole-picture branch that is up-sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(4, 3, 3, padding=d, dilation=d, bias=False) for d in (1, 2, 3))
        self.pooled, self.last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 3, 1)), nn.Conv2d(12, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        whole_picture = functional.interpolate(self.pooled(x), size=size, mode="bilinear", align_corners=False)
        x = self.last(torch.cat([*(functional.relu(branch(x)) for branch in self.branches), whole_picture], 1))
        return functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


class Inception(nn.Module):
    """Szegedy et al. 2014: branches of different windows side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 3, padding=1)
        self.five, self.rows = nn.Conv2d(4, 2, 5, padding=2), nn.Conv2d(4, 2, (1, 7), padding=(0, 3))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        average = functional.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
        branches = [self.one(x), self.three(x), self.five(x), self.rows(x), self.pool(x), average]
        return torch.cat([functional.relu(b, inplace=True) for b in branches], 1)


class Shuffle(nn.Module):
    """ShuffleNetV2: halves of the channels, shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, dim=1)
        x = torch.cat((one, self.conv(other)), dim=1)
        batch, channels, height, width = x.size()
        x = x.view(batch, 2, channels // 2, height, width)
        return torch.transpose(x, 1, 2).contiguous().view(batch, channels, height, width)


FLAT = (2, 4, 11, 9)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "squeeze-excite": (SqueezeExcite, FLAT),
    "u-net, transposed": (lambda: SmallUNet(False), FLAT),
    "u-net, bilinear": (lambda: SmallUNet(True), FLAT),
    "u-net, cropped": (lambda: SmallUNet(False, crop=True), FLAT),
    "vgg head": (Vgg, (2, 4, 14, 14)),
    "vgg head, gathered": (Vgg, (2, 4, 18, 20)),
    "volumes": (Volumes, (2, 2, 5, 6, 7)),
    "pyramid": (Pyramid, FLAT),
    "inception": (Inception, FLAT),
    "shuffle": (Shuffle, FLAT),
}
SMALL = {"hidden_sizes": [8, 16], "depths": [1, 1]}


class Gate(nn.Module):
    """What users write by hand: crops, gates, shuffles, statistics and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.project, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, ...]:
        skip = functional.gelu(self.down(pixel_values))
        up = self.up(functional.silu(skip, inplace=False))[..., 1:-2, :-1]
        top, left = (up.size(-2) - skip.size(-2)) // 2, (up.size(-1) - skip.size(-1)) // 2
        cropped = up[:, :, top : top + skip.size(-2), left : left + skip.size(-1)]
        both = torch.cat([cropped, skip], dim=1)
        mixed = functional.channel_shuffle(both, 2).view(-1, 2, 8, *both.shape[2:]).sum(1)
        gate = mixed.mean((2, 3), keepdim=True).sigmoid()
        normed = (mixed - mixed.mean(1, keepdim=True)) * torch.rsqrt(mixed.var(1, keepdim=True) + 1e-6) * self.scale
        tokens = self.project(normed.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) * gate
        a, b = tokens.chunk(2, 1)
        tokens = torch.cat(((a * 1).relu_(), b[:, [1, 0, 3, 2]]), 1)
        pooled = torch.cat([tokens.amax((2, 3)), functional.adaptive_avg_pool2d(tokens, 1).flatten(1)], 1)
        alike = functional.cosine_similarity(tokens, skip).unsqueeze(1)
        return functional.interpolate(tokens * alike, size=pixel_values.shape[-2:]), pooled


LIBRARIES: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: hf.ResNetModel(hf.ResNetConfig(embedding_size=8, layer_type="basic", **SMALL)),
    "convnextv2": lambda: hf.ConvNextV2Model(hf.ConvNextV2Config(num_stages=2, **SMALL)),
    "regnet": lambda: hf.RegNetModel(hf.RegNetConfig(embedding_size=8, groups_width=4, **SMALL)),
    "bit": lambda: hf.BitModel(hf.BitConfig(embedding_size=8, num_groups=4, **SMALL)),
    "upernet": lambda: hf.UperNetForSemanticSegmentation(
        hf.UperNetConfig(
            backbone_config=hf.ConvNextConfig(
                hidden_sizes=[4, 4, 8, 8], depths=[1, 1, 1, 1], out_features=["stage1", "stage2", "stage3", "stage4"]
            ),
            hidden_size=8, auxiliary_in_channels=8, auxiliary_channels=8, num_labels=4, pool_scales=[1, 2],
        )
    ),
}  # fmt: skip


GRIDS = [{3: 3}, {2: 2, 3: 2}]
LARGE = (2, 3, 64, 64)
CASES = [
    *((name, *NETWORKS[name], grid) for name in NETWORKS for grid in GRIDS),
    ("by hand", Gate, (2, 3, 42, 37), GRIDS[1]),
    *((name, make, LARGE, GRIDS[1]) for name, make in LIBRARIES.items()),
]


def train(module: nn.Module, leaf: Tensor, given: Tensor, ranks: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Results and running statistics; gradients of the picture and of parameters, those of a rank to be summed."""
    made = module(given)
    results = [full_tensor(one) for one in results_of(tuple(made.values()) if isinstance(made, dict) else made)]
    torch.stack([(one * w).sum() for one, w in zip(results, weights(results), strict=True)]).sum().div(ranks).backward()
    leaves = {"picture": leaf, **dict(module.named_parameters())}
    found = [one.detach() for one in (*results, *module.buffers())]
    return found, {key: torch.zeros_like(one) if one.grad is None else one.grad for key, one in leaves.items()}


@pytest.mark.filterwarnings("ignore:torch")
@pytest.mark.parametrize(
    ("name", "make", "shape", "degrees"), CASES, ids=[f"{name} {degrees}" for name, *_, degrees in CASES]
)
def test_networks_train_as_in_one_process(
    name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], degrees: dict[int, int]
) -> None:
    torch.manual_seed(0)
    network, ranks = make().double().train(), prod(degrees.values())

    def work(group: ThreadGroup) -> tuple[list[Tensor], dict[str, Tensor]]:
        own, leaf = copy.deepcopy(network), picture(*shape).requires_grad_()
        bind_modules(own)
        cuts = tuple(ShardSpec(dim, shape[dim], line) for dim, line in lines_of(group, degrees).items())
        return train(own, leaf, distribute(leaf.clone(), cuts, PIXELS_RULES), ranks)

    leaf = picture(*shape).requires_grad_()
    expected, gradients = train(copy.deepcopy(network), leaf, leaf.clone(), 1)
    with warnings.catch_warnings():
        if name in NETWORKS and "gathered" not in name:
            warnings.simplefilter("error")
        everyone = run_threads(ranks, work)
    for found, _ in everyone:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    total = {key: torch.stack([own[key] for _, own in everyone]).sum(0) for key in gradients}
    torch.testing.assert_close(total, gradients, rtol=1e-10, atol=1e-10)
