"""The code of the page on cyclic data parallelism that saves and resumes does so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from galvatron_lite.runtime.cyclic.model import CyclicModel
from galvatron_lite.world import join
from tests.docs.pages import text_of
from tests.parallelism.cyclic.models import blocks_case, make_batches, make_plan

STEPS, EVERY = 8, 3


def codes() -> list[str]:
    """The Python of the section."""
    section = text_of("docs/cyclic.md").split("## How do I save and resume?")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


class StoppedError(Exception):
    pass


def model_of(rule: str) -> CyclicModel:
    torch.manual_seed(0)
    model, layers, stages = blocks_case(3)
    return CyclicModel(model, make_plan(stages, rule, "single"), layers)


def run(code: str, parallel: CyclicModel, stop: int = STEPS) -> dict[str, Any]:
    """Run it; it is stopped before a training step."""
    torch.manual_seed(1)
    batches = make_batches(STEPS, 3)

    def batch_of(step: int) -> dict[str, Tensor]:
        if step == stop:
            raise StoppedError
        return batches[step]

    names: dict[str, Any] = {
        "torch": torch, "parallel": parallel, "steps": STEPS, "every": EVERY, "batch_of": batch_of,
    }  # fmt: skip
    exec(code, names)
    return names


def test_what_the_page_says_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join(torch.device("cpu"))
    training, _ = codes()
    for name in ("stopped", "whole"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "stopped")
    with pytest.raises(StoppedError):
        run(training, model_of("cdp-v2"), stop=7)
    assert sorted(path.name for path in Path("checkpoints").iterdir()) == ["step-3", "step-6"]
    resumed = run(training, model_of("cdp-v2"))["weights"]
    monkeypatch.chdir(tmp_path / "whole")
    whole = run(training, model_of("cdp-v2"))["weights"]
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


def test_what_the_page_says_goes_on_under_another_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join(torch.device("cpu"))
    training, other_rule = codes()
    monkeypatch.chdir(tmp_path)
    trained = run(training, model_of("cdp-v2"), stop=STEPS + 1)["weights"]
    saved = model_of("cdp-v2")
    saved.load_full_state_dict(trained)
    saved.save("checkpoints/step-100")
    other = model_of("cdp-v1")
    run(other_rule, other)
    after = other.full_state_dict()
    assert all(torch.equal(value, after[name]) for name, value in trained.items())


def test_the_errors_are_as_printed() -> None:
    """What the page shows of errors is in the code that raises them."""
    sources = "".join(
        text_of(f"galvatron_lite/{name}.py").replace("\n", " ")
        for name in ("parallelism/cyclic/mailbox", "folders", "runtime/checkpoint/manifest")
    )
    for said in (
        "Training has stopped. Start all processes again and resume from the last checkpoint (load_latest).",
        "waited in vain for {} from", "which is gone or was silent for", "gradients of activations",
        "The checkpoint is damaged: delete it and resume from the one before, which load_latest(folder) finds.",
        "It holds {size} of {expected.bytes} bytes.",
    ):  # fmt: skip
        assert said in sources
