"""``galvatron explain`` and ``galvatron compare`` as a reader sees them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron_lite.cli import app
from galvatron_lite.profiler.store import write_profile
from tests.factories import random_profile

HAND = """devices: 2
global_batch: 4
microbatches: {microbatches}
runs:
- {{layers: l0, strategy: {strategy}}}
- {{layers: l1..l3, strategy: {strategy}}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile and two plans by hand."""
    monkeypatch.chdir(tmp_path)
    write_profile(random_profile(random.Random(6), devices=2, blocks=2), tmp_path / "profile.yaml")
    for name, microbatches, strategy in (("data", 2, "data2"), ("sharded", 1, "zero3x2")):
        (tmp_path / f"{name}.yaml").write_text(HAND.format(microbatches=microbatches, strategy=strategy))
    return tmp_path


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def test_a_plan_by_hand_is_explained(folder: Path) -> None:
    shown = run("explain", "data.yaml", "--profile", "profile.yaml", "--mem", "2MB", "--no-what-if")
    lines = [line.rstrip() for line in shown.splitlines()]
    assert lines[0] == "test on 2 devices: no pipeline, batch 4 in 2 micro-batches of 2, fp32"
    for title in (
        "What limits the step", "Price of memory", "What each choice gains (all else equal)", "Prediction accuracy",
    ):  # fmt: skip
        assert title in lines
    assert any(line.startswith("Where the step goes (devices of group 0, the busiest") for line in lines)
    assert any(line.startswith("l1 … l3 (3): data2") for line in lines)
    assert any(line.split(":")[0] == "Skipped" and "--no-what-if" in line for line in lines)


def test_json_has_units_in_its_names(folder: Path) -> None:
    told = json.loads(run("explain", "data.yaml", "--profile", "profile.yaml", "--mem", "2MB", "--json"))
    assert told["step_seconds"] > 0
    assert told["memory"][0]["budget_bytes"] == 2 * 10**6
    assert told["price"]["seconds_per_gib"] >= 0
    assert told["step_seconds"] == pytest.approx(sum(part["seconds"] for part in told["time"]["parts"]), rel=1e-12)


def test_plans_are_compared(folder: Path) -> None:
    shown = run("compare", "data.yaml", "sharded.yaml", "--profile", "profile.yaml", "--mem", "2MB")
    lines = [line.rstrip() for line in shown.splitlines()]
    assert lines[0].startswith("test, all priced with test: ")
    header = next(line for line in lines if line.split() == ["data", "sharded"])
    rows = {line.split("  ")[0].strip(): line for line in lines[lines.index(header) :] if line}
    assert {"step", "samples/s", "memory"} <= rows.keys()
    assert any(line.split() == ["l0", "…", "l3", "(4)", "data2", "zero3x2"] for line in lines)
    assert any(line.startswith("sharded against data: ") for line in lines)
    told = json.loads(run("compare", "data.yaml", "sharded.yaml", "--profile", "profile.yaml", "--json"))
    assert [one["name"] for one in told["plans"]] == ["data", "sharded"]
    assert told["buys"][0]["added_step_seconds"] == pytest.approx(
        told["plans"][1]["step_seconds"] - told["plans"][0]["step_seconds"]
    )


@pytest.mark.parametrize("width", ["40", "200"])
def test_narrow_and_wide_terminals_show_all_of_it(folder: Path, width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    shown = run("explain", "data.yaml", "--profile", "profile.yaml", "--mem", "2MB", "--no-what-if")
    assert "data2" in shown
    assert "…\n" not in shown


def test_a_plan_without_a_profile_says_what_to_give(folder: Path) -> None:
    done = CliRunner().invoke(app, ["explain", "data.yaml"])
    assert done.exit_code != 0
    assert "The plan names no profile: give --profile FILE" in str(done.exception)


@pytest.mark.parametrize(
    "words", [["explain"], ["evaluate"], ["compare", "data.yaml"], ["report"], ["verify"], ["export", "--to=nemo"]]
)
def test_a_file_of_phases_is_refused_by_name(folder: Path, words: list[str]) -> None:
    plan = (folder / "data.yaml").read_text().replace("\n", "\n    ")
    (folder / "phases.yaml").write_text(f"version: 1\nphases:\n- name: all\n  plan:\n    {plan}")
    profile = [] if words[0] in ("verify", "export") else ["--profile", "profile.yaml"]
    done = CliRunner().invoke(app, [*words, "phases.yaml", *profile])
    assert "several phases, and one is needed. Copy what stands under the plan: of a phase" in str(done.exception)
