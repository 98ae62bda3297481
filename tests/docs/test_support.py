"""scripts/support_matrix: the page against its data, and what it says of models that run, differ, fail and refuse."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from galvatron_lite.errors import InputError

from .pages import ROOT, text_of

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)

def make():
    return Model(), {"x": torch.randn(4, 6, 8), "y": torch.randn(4, 6, 8)}
"""


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import support_matrix

        yield support_matrix


@pytest.fixture
def own(script: ModuleType, tmp_path: Path) -> Any:
    (tmp_path / "mine.py").write_text(MODEL)
    return script.own_family(f"{tmp_path / 'mine.py'}:make")


def ways_named(script: ModuleType, *names: str) -> list[Any]:
    return [way for way in script.WAYS if way.name in names]


def test_the_page_is_that_of_the_data(script: ModuleType) -> None:
    import support_matrix_page as page

    data = json.loads(text_of("docs/data/support.json"))
    text = text_of("docs/support.md")
    assert page.page_of(text, data) == text, "run scripts/support_matrix --page"
    # One cell of the table by hand, and every family somewhere on the page.
    names = [way.name for way in script.WAYS]
    line = next(line for line in text.splitlines() if line.startswith("| llama |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
    state = data["families"]["llama"]["ways"]["tensor"]["state"]
    assert cells[names.index("tensor")].startswith("yes") == (state == "works")
    assert all(f"| {name} |" in text for name in data["families"])
    assert set(script.NAMED) >= {"llama", "qwen2", "qwen3", "mistral", "mixtral", "gpt2", "bert", "vit", "t5"}


def test_a_family_from_its_configuration(script: ModuleType) -> None:
    ways = ways_named(script, "zero3", "tensor+sp", "1f1b", "expert")
    row = script.in_a_process(lambda: script.build("llama"), ways)
    assert row["model"] == "LlamaForCausalLM"
    assert row["blocks"] == 2
    assert {way: one["state"] for way, one in row["ways"].items()} == dict.fromkeys(
        ("zero3", "tensor+sp", "1f1b"), "works"
    )


def test_differences_failures_and_refusals_are_reported(
    script: ModuleType, own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import support_matrix_trial as trial

    graph, (way,) = script.capture(own), ways_named(script, "data")
    reference = trial.train_alone(own)
    assert trial.try_way(own, graph, way, reference).state is trial.State.WORKS
    shifted = replace(reference, losses=[reference.losses[0], 1.1 * reference.losses[1]])
    monkeypatch.setattr(trial, "train_alone", lambda _family: shifted)  # in float64, too
    found = trial.try_way(own, graph, way, shifted)
    assert (found.state, found.why.startswith("step 2: the loss is")) == (trial.State.WRONG, True)
    turned = [dict(one) for one in reference.gradients]
    turned[0]["blocks.1.up.bias"] = -turned[0]["blocks.1.up.bias"]
    monkeypatch.setattr(trial, "train_alone", lambda _family: replace(reference, gradients=turned))
    found = trial.try_way(own, graph, way, replace(reference, gradients=turned))
    assert "step 1: the gradient of blocks.1.up.bias is off" in found.why

    def failing(error: Exception) -> Callable[..., None]:
        def fail(*_: Any, **__: Any) -> None:
            raise error

        return fail

    monkeypatch.setattr(trial, "ParallelModel", failing(InputError("plan", "it", "Not so.")))
    found = trial.try_way(own, graph, way, reference)
    assert (found.state, found.why) == (trial.State.NO, "plan: 'it' cannot be used. Not so.")
    monkeypatch.setattr(trial, "ParallelModel", failing(ZeroDivisionError("by zero")))
    found = trial.try_way(own, graph, way, reference)
    assert (found.state, found.why) == (trial.State.CRASHES, "ZeroDivisionError: by zero")
