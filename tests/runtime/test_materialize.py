"""Materialising from the meta device: real values, the same for every order and stage, or a clear error."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import call_model, loss_of
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.zoo.gpt import initialise
from galvatron_lite.parallelism.pipeline.stage import StageModel
from galvatron_lite.runtime.parameters.materialize import Materializer
from tests.equivalence.families import FAMILIES, PlainModel, build_family, build_model

CPU = torch.device("cpu")


def fill(module: nn.Module) -> None:
    """Initialises what the plain model holds itself; everything else keeps torch's own initial values."""
    if isinstance(module, PlainModel):
        nn.init.normal_(module.position, std=0.02)


@cache
def known(family: str) -> tuple[object, tuple[Layer, ...]]:
    _, batch, layers = build_family(family, 2)
    return batch, layers


def from_meta(family: str) -> tuple[nn.Module, tuple[Layer, ...], object]:
    batch, layers = known(family)
    with torch.device("meta"):
        model = build_model(family)
    return model, layers, batch


def placed(family: str, seed: int = 0, own: slice = slice(None)) -> tuple[nn.Module, object]:
    model, layers, batch = from_meta(family)
    names = [layer.name for layer in layers][own]
    StageModel(model, layers, names)
    own_rule = hasattr(model, "_init_weights")
    init_fn = None if own_rule else fill if family == "plain" else initialise
    materializer = Materializer(model, layers, CPU, seed, init_fn)
    for layer in layers:
        if layer.name in names or layer.role is Role.BEFORE:
            materializer.place(layer)
    return model, batch


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_the_ties_buffers_and_spread_of_one_built_for_real(family: str) -> None:
    model, batch = placed(family)
    reference = build_model(family)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert len(list(model.parameters())) == len(list(reference.parameters()))
    buffers = dict(reference.named_buffers())
    assert {name for name, _ in model.named_buffers()} == set(buffers)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    for (name, value), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if value.numel() >= 1024:
            assert float(value.detach().std()) == pytest.approx(float(expected.detach().std()), rel=0.2, abs=1e-6), name
        elif float(expected.detach().std()) == 0.0:
            assert torch.equal(value, expected), name
    assert bool(loss_of(call_model(model, batch), batch).isfinite())


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_get_the_weights_of_the_whole(family: str) -> None:
    model = placed(family)[0]
    whole = dict(model.named_parameters(remove_duplicate=False))
    shared = whole.keys() - {name for name, _ in model.named_parameters()}
    seen = set()
    for own in (slice(0, 2), slice(2, 4), slice(4, None)):
        for name, value in placed(family, own=own)[0].named_parameters():
            seen.add(name)
            # copies of shared parameters are made equal when the pipeline starts
            assert name in shared or torch.equal(value, whole[name]), name
    assert seen | shared == set(whole)


def test_seed_changes_the_weights() -> None:
    first, second = placed("llama", seed=0)[0], placed("llama", seed=1)[0]
    assert not torch.equal(first.get_parameter("lm_head.weight"), second.get_parameter("lm_head.weight"))


def test_random_state_of_the_process_is_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    placed("plain")
    torch.manual_seed(7)
    model, layers, _ = from_meta("zoo-llama")
    torch.manual_seed(7)
    Materializer(model, layers, CPU, 0, fill).place(layers[1])
    assert torch.equal(torch.rand(3), expected)


def test_real_models_are_left_as_they_are() -> None:
    model, _, layers = build_family("qwen2", 2)
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    materializer = Materializer(model, layers, CPU)
    for layer in layers:
        materializer.place(layer)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_only_the_layer_asked_for_becomes_real() -> None:
    model, layers, _ = from_meta("llama")
    Materializer(model, layers, CPU).place(layers[2])
    real = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    assert real == {name for name, _ in model.named_parameters() if name.startswith("model.layers.1.")}


class Scaled(nn.Module):
    """Has a buffer and a parameter that torch cannot initialise by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(3), persistent=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.scale


SCALED = (Layer("before", "before", Role.BEFORE, ("0",)),)


@pytest.mark.parametrize("name", ["scale", "table", "mask"])
def test_what_nothing_fills_is_named(name: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Scaled())

    def most(module: nn.Module) -> None:
        if isinstance(module, Scaled):
            with torch.no_grad():
                for other, value in [("scale", 1.0), ("table", 2), ("mask", True)]:
                    if other != name:
                        getattr(module, other).fill_(value)

    with pytest.raises(InputError, match=rf"(parameter|buffer) 0\.{name}.*init_fn"):
        Materializer(model, SCALED, CPU, 0, most).place(SCALED[0])


def test_attention_of_torch_is_initialised() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16))
    Materializer(model, SCALED, CPU).place(SCALED[0])
    assert bool(model(torch.rand(2, 4, 8)).isfinite().all())
