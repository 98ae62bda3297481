"""The page of explanations: its commands run as they stand, and print what it shows."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron_lite import auto_parallelize
from galvatron_lite.cli import app
from galvatron_lite.diagnose.findings import Cause
from galvatron_lite.plans.io import write_plan
from galvatron_lite.profiler.store import read_profile, write_profile
from galvatron_lite.runs.schema import RankRecord, RunHeader, StepPart
from tests.diagnose.test_planted import known_profile, plan_of
from tests.docs.pages import ROOT, commands, text_of
from tests.runs.lines import a_rank_header, write

PROFILE = "profiles/CPU-AMD-EPYC-x2-5bce98/quickstart-profile.yaml"


def test_the_page_shows_what_its_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "118")
    page = text_of("docs/explain.md")
    (tmp_path / PROFILE).parent.mkdir(parents=True)
    shutil.copy(ROOT / PROFILE, tmp_path / PROFILE)
    (tmp_path / "hand.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    printed = ""
    for words in (words for words in commands(page) if words.startswith("galvatron ") and ".yaml" in words):
        done = CliRunner().invoke(app, shlex.split(words)[1:])
        assert done.exit_code == 0, done.output
        printed += done.output
    lines = {line.rstrip() for line in printed.splitlines()}
    shown = [
        line for block in re.findall(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE) for line in block.splitlines()
    ]
    assert len(shown) > 60
    assert [line for line in shown if line.rstrip() not in lines] == []


PAGE = text_of("docs/watch.md")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose optimizer is slow, and a trace of somebody else's."""
    folder = tmp_path_factory.mktemp("place")
    profile = known_profile()
    plan = plan_of(profile)
    write(folder / "runs/first", "steps-00001.jsonl", [RunHeader(1, plan, "abc", 1000.0)])
    parts = {StepPart.FORWARD: 0.041, StepPart.BACKWARD: 0.083, StepPart.OPTIMIZER: 0.2, StepPart.OTHER: 0.005}
    for rank in range(2):
        record = RankRecord(rank, 9, 9, sum(parts.values()), parts=parts)
        write(folder / "runs/first", f"rank-0000{rank}-00001.jsonl", [a_rank_header(rank), record])
    write_profile(profile, folder / "runs/first/profile.yaml")
    write_profile(profile, folder / "profile.yaml")
    write_plan(plan, folder / "plan.yaml")
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": 0, "dur": 9e5}
    (folder / "trace.json").write_text(json.dumps({"traceEvents": [event]}))
    return folder


def test_commands_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    found = [words for words in commands(PAGE) if words.startswith("galvatron diagnose ")]
    assert len(found) >= 4
    for words in found:
        done = CliRunner().invoke(app, shlex.split(words.replace(".json.gz", ".json"))[1:])
        assert done.exit_code == 0, done.output
        assert "optimizer" in done.output or "trace.json" in words
        if "--json" in words:
            assert json.loads(done.output)["findings"][0]["cause"] == "optimizer"
    made = read_profile(place / "corrected.yaml")
    ratio = made.optimizer.seconds_per_item / read_profile(place / "profile.yaml").optimizer.seconds_per_item
    assert ratio > 50
    assert made.origin.source.endswith("corrected by run runs/first")


def test_code_and_words_are_those_of_the_package() -> None:
    call = ast.parse(PAGE.split("```python\n")[1].split("```")[0]).body[0]
    assert isinstance(call, ast.Assign)
    assert isinstance(call.value, ast.Call)
    options = {keyword.arg for keyword in call.value.keywords}
    assert options == {"log", "live", "profile_steps"}
    assert options <= set(inspect.signature(auto_parallelize).parameters)
    assert all(f"`{cause.value}`" in PAGE for cause in Cause)
    assert (ROOT / "docs/watch.md").is_file()
