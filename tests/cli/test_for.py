"""``plan --for``: plans that another tool can be told in full, priced as its software runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron_lite import api, explain
from galvatron_lite.cli import app
from galvatron_lite.errors import InputError
from galvatron_lite.plans.export.tools import TOOLS, export

MODEL = ("--layers", "4", "--hidden", "1024", "--heads", "16", "--vocab", "32000", "--seq", "1024")
WHERE = ("--cluster", "h100", "--gpus", "8", "--batch", "64", "--mem", "6GB")


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_the_settings_say_all_of_the_plan(tool: str, tmp_path: Path) -> None:
    file = tmp_path / "settings"
    result = CliRunner().invoke(app, ["plan", *MODEL, *WHERE, "--for", tool, "-o", str(file)])
    assert result.exit_code == 0, result.output
    assert file.read_text()
    assert "Not among" not in result.output


def test_costs_are_those_of_the_software() -> None:
    asked = {"model": "llama3-8b", "cluster": "h100", "gpus": 8, "batch": 16, "mem": "80GB", "runners_up": 0}
    ours, theirs = (api.plan(backend=name, **asked) for name in ("galvatron", "megatron"))  # type: ignore[arg-type]
    assert ours.prediction is not None
    assert theirs.prediction is not None
    assert theirs.prediction.step_seconds < ours.prediction.step_seconds  # fused kernels
    assert export(theirs, "megatron", strict=True).text


def test_a_tool_that_there_is_not() -> None:
    result = CliRunner().invoke(app, ["plan", *MODEL, *WHERE, "--for", "horovod"])
    assert result.exit_code != 0


def test_a_plan_for_other_software_is_explained_with_its_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = api.plan(model="gpt2", cluster="h100", gpus=8, batch=64, mem="80GB", backend="megatron", runners_up=0)
    assert plan.provenance is not None
    assert plan.provenance.stack == "megatron-core"
    assert explain(plan, what_if=False).step_seconds == pytest.approx(plan.prediction.step_seconds)  # type: ignore[union-attr]


@pytest.mark.parametrize("tool", ["megatron", "nemo", "torchtitan"])
def test_software_for_transformers_gets_no_convolutional_network(tool: str) -> None:
    with pytest.raises(InputError, match=f"'{tool}' cannot be used. It trains no convolutional networks"):
        api.plan(model="resnet50", cluster="h100", gpus=8, target=tool)
