"""Loops that call backward themselves, under a plan whose micro-batches are worked on when the model is called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.engine import ParallelModel
from tests.equivalence.families import PlainModel, make_batches
from tests.runtime.plans import make_plan

SAMPLES = 4
BATCHES = make_batches("plain", SAMPLES, 2)


def model_of(microbatches: int = 2) -> ParallelModel:
    torch.manual_seed(0)
    model = PlainModel()
    layers = discover_layers(model, BATCHES[0])
    names = [[layer.name for layer in layers]]
    plan = make_plan(names, [[Strategy()] * len(layers)], SAMPLES, microbatches)
    return ParallelModel(model, plan, layers, BATCHES[0], device="cpu")


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_are_those_of_the_loss_that_backward_was_called_on() -> None:
    torch.manual_seed(0)
    alone, parallel = PlainModel(), model_of()
    for batch in BATCHES:
        alone.zero_grad()
        parallel.zero_grad()
        loss, expected = parallel(batch), alone(*batch)
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)
        (3 * loss).backward()
        (3 * expected).backward()
        torch.testing.assert_close(gradients_of(parallel), gradients_of(alone))


def test_gradients_of_several_batches_add_up() -> None:
    torch.manual_seed(0)
    alone, parallel = PlainModel(), model_of()
    for batch in BATCHES:
        parallel(batch).backward()
        alone(*batch).backward()
    torch.testing.assert_close(gradients_of(parallel), gradients_of(alone))


def test_gradients_that_were_thrown_away_are_missed() -> None:
    parallel = model_of()
    loss = parallel(BATCHES[0])
    parallel.zero_grad()
    with pytest.raises(InputError, match="before that"):
        loss.backward()


def test_without_gradients_nothing_is_stepped() -> None:
    parallel = model_of()
    with torch.no_grad():
        loss = parallel(BATCHES[0])
    assert not loss.requires_grad
    assert gradients_of(parallel) == []
