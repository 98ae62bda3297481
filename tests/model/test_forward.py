"""Models without a loss are profiled for inference."""

from __future__ import annotations

import pytest
import torch

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.trace.run import gives_loss, mean_of_outputs
from galvatron_lite.parallelism.branch.find import find_regions
from tests.model.forks import MODELS
from tests.model.models import plain


def test_whether_a_model_gives_its_loss() -> None:
    assert gives_loss(*plain())
    assert not gives_loss(*MODELS["pair"]())
    assert not gives_loss(*MODELS["heads"]())


def test_all_that_a_model_gives_stands_in_for_a_loss() -> None:
    output = {"a": torch.tensor([1.0, 3.0]), "b": (torch.tensor([[5.0]]), torch.tensor([7]))}
    assert mean_of_outputs(output) == 2.0 + 5.0
    with pytest.raises(InputError, match="floating"):
        mean_of_outputs(torch.tensor([1]))


def test_a_model_without_a_loss_is_captured() -> None:
    graph = trace(*MODELS["pair"](), loss_fn=mean_of_outputs)
    assert [branch.roots for branch in find_regions(graph)[0].branches] == [("left",), ("right",)]
    assert graph.dead == ()


def test_a_loss_may_hold_tensors_on_the_cpu() -> None:
    """Weights of classes are the user's; the model runs on the meta device while it is traced."""
    weighted = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    batch = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    found = [
        trace(model, batch, loss_fn=lambda output, batch, loss=loss: loss(output, batch[1])).flops
        for loss in (torch.nn.functional.cross_entropy, weighted)
    ]
    assert found[0] == found[1]
