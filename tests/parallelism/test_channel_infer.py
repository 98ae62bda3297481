"""What of a layer is split, and that it then communicates what the cost model says."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, Recompute, Role
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.base import Moment
from galvatron_lite.parallelism.channel.apply import shard_channels
from galvatron_lite.parallelism.channel.cost import ChannelDimension
from galvatron_lite.parallelism.channel.infer import infer_channels
from galvatron_lite.parallelism.channel.parts import ChannelPlan, OperatorPart, sliced_kind
from galvatron_lite.parallelism.sharded.groups import ShapeOnlyAxisGroup
from galvatron_lite.parallelism.strategy import Strategy
from tests.parallelism import channel_layers as blocks
from tests.parallelism.channel_layers import Outcome, shared
from tests.parallelism.test_states_cost import work


def plan_of(layer: nn.Module, by: str, degree: int = 2, channels: int = 8) -> ChannelPlan:
    return infer_channels(layer, (torch.zeros(2, channels, 6, 6),), {}, by, degree)


def test_norms_with_a_plain_mean_of_all_batches_are_split_as_others() -> None:
    layer = blocks.Basic(8, 16, 2)
    for module in layer.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    assert plan_of(layer, "filters") == plan_of(blocks.Basic(8, 16, 2), "filters")


def test_equal_widths_and_a_shortcut_that_runs_first_need_no_guess() -> None:
    class Block(blocks.Basic):
        def forward(self, x: Tensor) -> Tensor:
            assert self.project is not None
            beside = self.project(x)
            return self.conv2(self.conv1(x)) + beside

    plan = plan_of(Block(8, 8, 2), "filters")
    assert plan.parts == {
        "project.0": OperatorPart.FILTERS,
        "conv1": OperatorPart.FILTERS,
        "conv2": OperatorPart.CHANNELS,
    }


def test_groups_that_cannot_be_shared_stay_whole() -> None:
    plan = plan_of(blocks.Bottleneck(8, 12, 8, groups=3), "filters")
    assert plan.parts == {"conv1": OperatorPart.FILTERS, "conv3": OperatorPart.FILTERS}


def test_convolutions_with_a_forward_of_their_own_stay_whole() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)

    layer = nn.Sequential(nn.Conv2d(8, 8, 1), Standardised(8, 8, 1), nn.Conv2d(8, 8, 1))
    assert plan_of(layer, "filters").parts == {"0": OperatorPart.FILTERS, "2": OperatorPart.FILTERS}


def test_a_layer_without_channels_to_split() -> None:
    for layer in (nn.Conv2d(8, 8, 1, groups=8), nn.Conv2d(8, 1, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)):
        plan = plan_of(layer, "filters")
        assert (plan.parts, plan.partial) == ({}, frozenset())


class Twice(nn.Module):
    """A norm that is given shares, and then whole pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.two(self.norm(self.one(x))))


class Scaled(nn.Module):
    """A scale of its own, for shares and then for a whole picture."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.one, self.two = nn.Parameter(torch.ones(1)), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale.exp() * self.two(self.scale * self.one(x))


@pytest.mark.parametrize(
    ("layer", "by", "reason"),
    [
        (Scaled(), "filters", "scale.*keep the layer whole"),
        (nn.Sequential(nn.Conv2d(8, 8, 1), nn.Flatten(0)), "channels", "no channels"),
        (Twice(), "filters", "keep the layer whole"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*the whole picture is gathered")
def test_layers_that_cannot_be_split_are_refused(layer: nn.Module, by: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        plan_of(layer, by)


def test_fewer_channels_than_devices_are_refused() -> None:
    with pytest.raises(InputError, match="channels"):
        plan_of(nn.Conv2d(3, 8, 1), "channels", 4, channels=3)


MODELS: dict[str, dict[str, Any]] = {
    "resnet-50": {"depths": (2, 2), "width": 8, "image_size": 32, "classes": 8},
    "vgg-16": {
        "depths": (2, 2, 3),
        "widths": (8, 16, 16),
        "hidden": 16,
        "pooled": 2,
        "image_size": 32,
        "classes": 10,
        "dropout": 0.0,
    },
    "convnext-t": {"depths": (2, 2), "widths": (8, 16), "image_size": 32, "classes": 8},
    "regnet-y-400mf": {"widths": (16, 16, 32, 32), "group": 8, "stem": 8, "image_size": 32, "classes": 8},
    "unet-mini": {"image_size": 32},
    "cosmoflow-mini": {},
}
SIDES = {"cosmoflow-mini": (4, 32, 32, 32), "unet-mini": (1, 32, 32)}


@dataclass(frozen=True)
class Reference:
    """A reference model: its kinds of blocks, one module of each, and what that is given."""

    kinds: dict[str, LayerKind]
    modules: dict[str, nn.Module]
    inputs: dict[str, list[Tensor]]

    def offered(self) -> Iterator[tuple[LayerKind, nn.Module, list[Tensor], str]]:
        """What is split by the cost model."""
        for name, module in self.modules.items():
            for by in ("filters", "channels"):
                if {by: 2} in list(ChannelDimension(degree=by).choices(self.kinds[name], 2)):
                    yield self.kinds[name], module, self.inputs[name], by


@cache
def reference(name: str) -> Reference:
    """A model of ``galvatron_lite.model.zoo``, small."""
    model = build(name, **MODELS[name])
    pictures = torch.rand(2, *SIDES.get(name, (3, 32, 32)))
    graph = trace(model, pictures, loss_fn=lambda output, _: output.float().sum())
    paths = {one.kind: one.modules[0] for one in reversed(graph.layers) if one.role is Role.BLOCK}
    inputs = inputs_of(model.double(), list(paths.values()), pictures.double())
    modules = {kind: model.get_submodule(path) for kind, path in paths.items()}
    return Reference(dict(graph.kinds), modules, {kind: inputs[path] for kind, path in paths.items()})


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_the_reference_models_communicate_what_is_priced(name: str) -> None:
    """How often and how many bytes in either pass."""
    compared = set[str]()
    for kind, module, inputs, by in reference(name).offered():
        if by == "filters" or len(inputs) == 1:  # else joined along shared channels: dealt out anew, not priced
            assert counted(
                shared(module, *inputs, by=by, degree=2, gradient=inputs[0].requires_grad)[0]
            ) == pytest.approx(priced(kind, by)), (kind.name, by)
            compared.add(kind.name)
    assert compared == reference(name).modules.keys()


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_the_reference_models_keep_what_is_priced(name: str) -> None:
    """From forward to backward, but for what is handed on: within a tenth, and statistics of norms."""
    for kind, module, inputs, by in reference(name).offered():
        own, plan = copy.deepcopy(module).float(), infer_channels(module, inputs, {}, by, 2)
        shard_channels(own, plan, ShapeOnlyAxisGroup(2))
        halved = [(one[:, : one.shape[1] // 2] if by == "channels" else one).float() for one in inputs]
        expected = len(inputs[0]) * sliced_kind(kind, by, 2).kept[Recompute.NONE].total
        assert kept_bytes(own, halved) == pytest.approx(expected, rel=0.1, abs=1024), (kind.name, by)


def kept_bytes(layer: nn.Module, inputs: list[Tensor]) -> int:
    """Bytes of storages saved for backward, but for parameters and the result."""
    own = {one.untyped_storage().data_ptr() for one in layer.parameters()}
    found = dict[int, Tensor]()

    def note(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = layer(*[one.clone().requires_grad_() for one in inputs])
    own.add(result.untyped_storage().data_ptr())
    return sum(one.untyped_storage().nbytes() for place, one in found.items() if place not in own)


def inputs_of(model: nn.Module, paths: list[str], pictures: Tensor) -> dict[str, list[Tensor]]:
    """What each module is given."""
    found = dict[str, list[Tensor]]()

    def note(path: str, args: tuple[Tensor, ...]) -> None:
        found.setdefault(path, [one.detach().requires_grad_(one.requires_grad) for one in args])

    hooks = [
        model.get_submodule(path).register_forward_pre_hook(lambda _, args, path=path: note(path, args))
        for path in paths
    ]
    model(pictures)
    for hook in hooks:
        hook.remove()
    return found


def priced(kind: LayerKind, by: str) -> dict[str, float]:
    """Calls and bytes by pass and collective, two samples of eight bytes an item."""
    found = dict[str, float]()
    for one in work(Strategy(**{by: 2}), kind, 2.0, 8).communications:
        if one.moment is not Moment.STEP:
            name = f"{one.moment.value} {one.collective.value}"
            found[f"{name} calls"] = found.get(f"{name} calls", 0) + one.count
            found[f"{name} bytes"] = found.get(f"{name} bytes", 0) + one.size * one.count
    return found


def counted(outcome: Outcome) -> dict[str, float]:
    """The same as they happened.

    What joins two pictures swaps each by itself, and a rank of two sends half of its share of the result.
    """
    found = dict[str, float]()
    for moment, calls, moved in zip((Moment.FORWARD, Moment.BACKWARD), outcome.calls, outcome.moved, strict=True):
        for name, count in calls.items():
            swaps = name == "exchange"
            label = f"{moment.value} {Collective.ALL_TO_ALL.value if swaps else name}"
            found[f"{label} calls"] = count // 2 if swaps else count
            found[f"{label} bytes"] = moved[name] * 2 if swaps else moved[name]
    return found
