"""Forward passes that read values of the samples: which of these rule out that a batch is shared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.describe import plan_notes
from galvatron_lite.verify.trial.check import try_model
from tests.equivalence.plans import uniform_plan
from tests.model.models import hugging_face

WIDTH, SAMPLES = 16, 8


class Reading(nn.Module):
    """Runs what a function of it, its hidden state and the classes gives."""

    on: Tensor
    count: Tensor
    seen: float

    def __init__(self, reads: Callable[[Reading, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.reads = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), reads
        self.register_buffer("on", torch.tensor(1.0))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:
        loss: Tensor = self.last(self.reads(self, self.first(inputs) + 0.5, classes)).square().mean()
        return loss


def counted(model: Reading, hidden: Tensor) -> Tensor:
    if hidden.mean() > 0:
        model.count.add_(1)
    return hidden


def halved(hidden: Tensor) -> Tensor:
    for _ in range(4):
        if hidden.norm() < 1e3:
            break
        hidden = hidden / 2
    return hidden


def checked(hidden: Tensor) -> Tensor:
    if torch.isnan(hidden).any() or not torch.isfinite(hidden).all():
        raise ValueError("not finite")
    if hidden.abs().max() > 1e5:
        raise ValueError("large")
    assert not (hidden > 1e5).any()
    return hidden


def logged(model: Reading, hidden: Tensor) -> Tensor:
    model.seen = hidden.mean().item()
    return hidden


def chosen(hidden: Tensor, classes: Tensor) -> Tensor:
    made = torch.zeros_like(hidden)
    for number in range(4):
        mask = classes == number
        if mask.any():
            made[mask] = hidden[mask] * number
    return made


def by_row(hidden: Tensor, centre: Tensor | float) -> Tensor:
    """Each sample by what is read of it, and of the centre."""
    return torch.stack([row * 2 if max((row - centre).tolist()) > -9 else row for row in hidden])


REFUSED: dict[str, Callable[[Reading, Tensor, Tensor], Tensor]] = {
    "mean": lambda model, hidden, _: hidden * 2 if hidden.mean() > 0 else hidden,
    "both": lambda model, hidden, _: hidden * 2 if (hidden.mean() > 0) & (hidden.std() > 0) else hidden,
    "number": lambda model, hidden, _: hidden * 2 if hidden.mean().item() > 0.01 else hidden,
    "buffer": lambda model, hidden, _: counted(model, hidden),
    "loop": lambda model, hidden, _: halved(hidden),
    "list": lambda model, hidden, _: hidden * 2 if max(hidden.mean(0).tolist()) > -9 else hidden,
    "rows and the mean": lambda model, hidden, _: by_row(hidden, hidden.mean(0)),
    "array": lambda model, hidden, _: hidden * 2 if hidden.detach().mean(0).numpy().max() > -9 else hidden,
}
TOLD: dict[str, Callable[[Reading, Tensor, Tensor], Tensor]] = {
    "sizes": lambda model, hidden, _: hidden * 2 if hidden.abs().flatten().sum() > 0 else hidden,
    "any": lambda model, hidden, classes: hidden * 2 if (classes >= 0).any() else hidden,
    "count": lambda model, hidden, classes: hidden * 2 if (classes >= 0).sum().item() > 1 else hidden,
}
FREE: dict[str, Callable[[Reading, Tensor, Tensor], Tensor]] = {
    "assertion": lambda model, hidden, _: checked(hidden),
    "buffer": lambda model, hidden, _: hidden * 2 if model.on > 0 else hidden,
    "parameter": lambda model, hidden, _: hidden * 2 if model.first.weight.norm() > 0 else hidden,
    "shape": lambda model, hidden, _: hidden * 2 if len(hidden) > 0 else hidden,
    "log": lambda model, hidden, _: logged(model, hidden),
    "rows": lambda model, hidden, _: by_row(hidden, 0.0),
    "rows of several outputs": lambda model, hidden, _: sum(by_row(one, 0.0) for one in (hidden, hidden + 1)),
    "lengths": lambda model, hidden, classes: hidden * torch.tensor(classes.tolist()).unsqueeze(1),
    "experts": lambda model, hidden, classes: chosen(hidden, classes),
    "amount": lambda model, hidden, classes: hidden * 2 / ((classes >= 0).float().mean().item() + 1),
}


def reading(reads: Callable[[Reading, Tensor, Tensor], Tensor]) -> tuple[Reading, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = {"inputs": torch.randn(SAMPLES, WIDTH), "classes": torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])}
    return Reading(reads), batch


@pytest.mark.parametrize("name", REFUSED)
def test_a_number_of_all_samples_that_decides_keeps_the_batch_whole(name: str) -> None:
    """The example's shares decide alike, so that their losses are those of the batch."""
    model, batch = reading(REFUSED[name])
    graph = trace(reading(REFUSED["mean"])[0], batch)
    findings = try_model(model, batch, graph.layers)
    assert findings.pins()["fix"] == ("dp=1", "microbatches=1")
    shared = uniform_plan(graph, Strategy(data=2), batch=SAMPLES)
    with pytest.raises(InputError, match=rf"{__name__.rpartition('.')[2]}\.py:\d+.* decides what runs"):
        findings.check(shared)
    findings.check(uniform_plan(graph, Strategy(), batch=SAMPLES))
    assert "decides what the model runs" in plan_notes(graph, shared)[0]
    assert not plan_notes(graph, uniform_plan(graph, Strategy(), batch=SAMPLES))


@pytest.mark.parametrize("name", TOLD)
def test_a_guard_of_which_one_outcome_was_seen_is_reported(name: str) -> None:
    model, batch = reading(TOLD[name])
    findings = try_model(model, batch, discover_layers(reading(FREE["shape"])[0], batch))
    (line,) = findings.warnings()
    assert "test_reads.py" in line
    assert not findings.pins()


@pytest.mark.parametrize("name", FREE)
def test_reads_that_do_not_decide_are_allowed(name: str) -> None:
    model, batch = reading(FREE[name])
    findings = try_model(model, batch, discover_layers(reading(FREE["shape"])[0], batch))
    assert (findings.warnings(), findings.pins().get("fix")) == ([], None)


def test_an_assertion_of_finite_numbers_is_traced() -> None:
    assert not trace(*reading(FREE["assertion"])).compares


@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("family", ["Llama", "Bert"])
def test_masks_of_transformers_are_free(family: str, padded: int) -> None:
    model, batch = hugging_face(family)
    mask = torch.ones_like(batch["input_ids"])
    mask[1::2, mask.shape[1] - padded :] = 0
    batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    findings = try_model(model, batch, discover_layers(model, batch))
    assert (findings.warnings(), findings.pins()) == ([], {})
