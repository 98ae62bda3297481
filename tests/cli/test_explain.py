"""``galvatron explain`` and ``galvatron compare`` as a reader sees them."""

from __future__ import annotations

import json
import random
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron_lite import api
from galvatron_lite.analysis.report.page import PlanView, with_timeline
from galvatron_lite.api_plans import read_priced
from galvatron_lite.cli import app
from galvatron_lite.plans.io import read_plan, write_plan
from galvatron_lite.profiler.store import write_profile
from galvatron_lite.request import PlanRequest
from galvatron_lite.runs.schema import RankRecord, StepPart, StepRecord
from tests.docs.pages import commands, text_of
from tests.factories import random_profile
from tests.runs.lines import a_header, a_rank_header, write

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
    data = json.loads(run("explain", "data.yaml", "--profile", "profile.yaml", "--mem", "2MB", "--json"))
    assert data["step_seconds"] > 0
    assert data["memory"][0]["budget_bytes"] == 2 * 10**6
    assert data["price"]["seconds_per_gib"] >= 0
    assert data["step_seconds"] == pytest.approx(sum(part["seconds"] for part in data["time"]["parts"]), rel=1e-12)


def test_plans_are_compared(folder: Path) -> None:
    shown = run("compare", "data.yaml", "sharded.yaml", "--profile", "profile.yaml", "--mem", "2MB")
    lines = [line.rstrip() for line in shown.splitlines()]
    assert lines[0].startswith("test, all priced with test: ")
    header = next(line for line in lines if line.split() == ["data", "sharded"])
    rows = {line.split("  ")[0].strip(): line for line in lines[lines.index(header) :] if line}
    assert {"step", "samples/s", "memory"} <= rows.keys()
    assert any(line.split() == ["l0", "…", "l3", "(4)", "data2", "zero3x2"] for line in lines)
    assert any(line.startswith("sharded against data: ") for line in lines)
    data = json.loads(run("compare", "data.yaml", "sharded.yaml", "--profile", "profile.yaml", "--json"))
    assert [one["name"] for one in data["plans"]] == ["data", "sharded"]
    assert data["buys"][0]["added_step_seconds"] == pytest.approx(
        data["plans"][1]["step_seconds"] - data["plans"][0]["step_seconds"]
    )


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


COMMANDS = list(dict.fromkeys(commands(text_of("docs/report.md"))))
PLAN, *SHOWN = [words for words in COMMANDS if words.startswith(("galvatron plan ", "galvatron report "))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plan of the page, and a run under it."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert CliRunner().invoke(app, shlex.split(PLAN)[1:]).exit_code == 0
    plan = read_plan(folder / "plan.yaml")
    run = folder / "runs" / "first"
    run.mkdir(parents=True)
    steps = [StepRecord(step, 1000.0 + step, 0.1 if step else 5.0, samples=64, tokens=65536) for step in range(10)]
    write(run, "steps-00001.jsonl", [a_header(plan=plan), *steps])
    seconds = {StepPart.FORWARD: 0.03, StepPart.BACKWARD: 0.06, StepPart.OPTIMIZER: 0.01}
    record = RankRecord(0, 9, 10, 0.1, parts=seconds, memory=8 * 2**30)
    write(run, "rank-00000-00001.jsonl", [a_rank_header(0), record])
    return folder


def run_in(place: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> str:
    monkeypatch.chdir(place)
    done = CliRunner().invoke(app, shlex.split(words))
    assert done.exit_code == 0, done.output
    return done.output


def test_the_profile_of_the_plan_is_found_and_prices_are_shown(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in(place, monkeypatch, "report plan.yaml -o why.html --search 3")
    html = (place / "why.html").read_text(encoding="utf-8")
    for words in ("A step, pass by pass", "Why this plan", "What keeps it from being faster", "What each choice gains"):
        assert words in html


def test_measured_figures_are_beside_the_prediction(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in(place, monkeypatch, "report plan.yaml --run runs/first -o run.html --search 0")
    html = (place / "run.html").read_text(encoding="utf-8")
    said = read_plan(place / "plan.yaml").prediction
    assert said is not None
    assert "Measured beside predicted" in html
    assert "7 steps, 3 to 9" in html  # the first three are not counted
    assert "100 ms" in html  # the median of the others; the slow first one is left out
    assert "8.0 GiB" in html
    assert "under another plan" not in html


def test_a_run_under_another_plan_is_reported(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = read_plan(place / "plan.yaml")
    write_plan(replace(plan, microbatches=2), place / "other.yaml")
    out = run_in(place, monkeypatch, "report other.yaml --run runs/first -o other.html --search 0")
    assert "under another plan" in out


def test_written_files_are_reported_as_json(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.loads(run_in(place, monkeypatch, "report plan.yaml -o a.html --trace a.json --search 0 --json"))
    assert [one["file"] for one in data["written"]] == ["a.json", "a.html"]
    assert [one["bytes"] for one in data["written"]] == [(place / name).stat().st_size for name in ("a.json", "a.html")]


@pytest.mark.parametrize(
    ("words", "said"),
    [("nothing.yaml", "There is no such file"), ("plan.yaml --run nowhere", "There is no such folder"),
     ("hand.yaml", "galvatron evaluate"), ("plan.yaml --model llama2-7b", "--cluster is missing")],
)  # fmt: skip
def test_what_cannot_be_shown_is_an_error_that_says_what_to_do(
    place: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    (place / "hand.yaml").write_text("devices: 1\nruns: []\n")
    monkeypatch.chdir(place)
    done = CliRunner().invoke(app, ["report", *shlex.split(words)])
    assert done.exit_code != 0
    assert said in str(done.exception)


def test_a_folder_that_is_not_there_is_not_made(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    for option in ("-o", "--trace"):
        done = CliRunner().invoke(app, ["report", "plan.yaml", option, "nowhere/x.html"])
        assert done.exit_code != 0
        assert "There is no folder nowhere" in str(done.exception or done.output)
    assert not (place / "nowhere").exists()


def test_a_profile_among_the_kept_ones_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = replace(api.find_profile(model="bert-large", cluster="rtx-titan", gpus=2), name="kept")
    monkeypatch.chdir(tmp_path)
    write_plan(api.plan(known, batch=4, runners_up=0), tmp_path / "plan.yaml")
    write_profile(known, tmp_path / "profiles/here/kept.yaml")
    write_profile(replace(known, name="later"), tmp_path / "profiles/here/later.yaml")
    shown = with_timeline(PlanView("plan.yaml", *read_priced(tmp_path / "plan.yaml", PlanRequest())))
    assert shown.profile == known
    assert shown.timeline is not None
