"""scripts/cyclic_study: a short run against the plain reference, and the page against the figures it was made from."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from functools import partial
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest
import torch

from ..cyclic_reference import train_reference
from .pages import ROOT, text_of

STAGES = {
    "ResNet": [["conv1", "bn1", "stages.0"], ["stages.1"], ["stages.2"], ["stages.3", "fc"]],
    "GPT": [["embed", "positions", "blocks.0"], ["blocks.1"], ["blocks.2"], ["blocks.3", "norm", "head"]],
}
ALIGNED = 16
"""Bytes to which tensors of a message are rounded up."""


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import cyclic_study

        yield cyclic_study


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``scripts/cyclic_study --quick`` finds."""
    path = tmp_path_factory.mktemp("study") / "study.json"
    command = [sys.executable, "scripts/cyclic_study.py", "--quick", "--output", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def published(script: ModuleType) -> Any:
    return script.read_value(script.Study, script.DATA)


@pytest.mark.study
def test_a_short_run_ends_where_the_reference_does(script: ModuleType, quick: dict[str, Any]) -> None:
    from cyclic_study_train import micro_batches, share

    torch.set_num_threads(1)
    assert len(quick["runs"]) == 6
    every = {task.name: task for task in script.tasks()}
    for run in quick["runs"]:
        task, steps = every[run["task"]], run["steps"]
        model = task.make(run["seed"])
        batches = [micro_batches(batch) for batch in task.batches(steps, run["seed"])]
        scheduler = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=partial(share, steps=steps))
        optimizer = partial(task.optimizer, lr=run["rate"])
        found = train_reference(
            model, STAGES[task.name], batches, optimizer_factory=optimizer, rule=run["rule"],
            scheduler_factory=scheduler,
        )  # fmt: skip
        # plain torch adds gradients in another order, and batch norms magnify what that rounds
        off = 1e-3 if run["rule"] == "dp" else 1e-6
        assert run["curve"][0] == pytest.approx(mean_of_known(run["rule"], [one.losses for one in found]), rel=off)
        model.load_state_dict(found[-1].parameters | found[-1].buffers)
        coarse = "%" in task.figure and run["rule"] == "dp"
        assert run["figure"] == pytest.approx(task.judge(model), abs=2.0 if coarse else 1e-3), run


def mean_of_known(rule: str, losses: list[list[float]]) -> float:
    """Mean of what training steps return: in the cycle the last worker's loss is known in the next call."""
    if rule == "dp":
        return fmean(map(fmean, losses))
    flat = [loss for step in losses for loss in step]
    known = len(losses[0]) - 1
    calls = [flat[:known], *(flat[start : start + known + 1] for start in range(known, len(flat) - 1, known + 1))]
    return fmean(map(fmean, calls))


@pytest.mark.study
def test_the_cycle_keeps_the_same_all_the_time(quick: dict[str, Any]) -> None:
    for one in quick["memory"]:
        assert len(set(one["cyclic"])) == len(set(one["early"])) == 1
        assert one["early"][0] < one["cyclic"][0] < max(one["together"])
        assert one["together"] == one["together"][::-1]
        assert one["peaks"]["early"] < one["peaks"]["cyclic"] < one["peaks"]["together"]
        assert max(one["together"]) < one["peaks"]["together"]


@pytest.mark.study
def test_workers_send_what_the_programme_says(quick: dict[str, Any]) -> None:
    for one in quick["messages"]:
        assert one["collectives"] == 0
        counted, told = (sum(map(sum, one[name])) for name in ("counted", "programme"))
        # every stage's gradient three times along each track
        assert told == 2 * 3 * sum(one["stages"])
        assert told <= counted < 1.01 * told
        for process, sent in enumerate(one["counted"]):
            assert all((value > 0) == (least > 0) for value, least in zip(sent, one["programme"][process], strict=True))
            assert max(sent) <= max(one["stages"]) * 1.01


def test_the_page_is_of_the_data(script: ModuleType, published: Any) -> None:
    text = text_of("docs/cyclic.md")
    for name, table in script.TABLES.items():
        assert script.replaced(text, name, table(published)) == text, "run scripts/cyclic_study --draw"
    assert script.figure(published) == text_of("docs/cyclic.svg")
    ET.fromstring(text_of("docs/cyclic.svg"))


def test_a_row_of_the_page_by_hand() -> None:
    data = json.loads(text_of("docs/data/cyclic.json"))
    runs = [one for one in data["runs"] if (one["task"], one["rule"], one["rate"]) == ("GPT", "cdp-v2", 0.004)]
    assert len({one["seed"] for one in runs}) == len(runs) >= 3
    figures = [one["figure"] for one in runs]
    shown = f"{sum(figures) / len(figures):.2f} ({min(figures):.2f} to {max(figures):.2f})"
    row = next(
        line for line in text_of("docs/cyclic.md").splitlines() if line.startswith("| GPT, AdamW | 0.004 | cdp-v2")
    )
    assert row.strip("|").split("|")[-2].strip() == shown


def test_the_data_is_of_a_whole_run(script: ModuleType, published: Any) -> None:
    kinds = {(task.name, rule, rate) for task in script.tasks() for rule in script.RULES for rate in task.rates}
    assert {(one.task, one.rule, one.rate) for one in published.runs} == kinds
    steps = {task.name: task.steps for task in script.tasks()}
    assert all(one.steps == steps[one.task] and len(one.curve) == -(-one.steps // 10) for one in published.runs)
    assert [one.task for one in published.memory] == [one.task for one in published.messages] == list(steps)


def test_pictures_and_text_are_the_same_every_time(script: ModuleType) -> None:
    for task in script.tasks():
        (one,), (same,), (other,) = task.batches(1, 0), task.batches(1, 0), task.batches(1, 1)
        assert all(torch.equal(one[name], same[name]) for name in one)
        assert not all(torch.equal(one[name], other[name]) for name in one)
