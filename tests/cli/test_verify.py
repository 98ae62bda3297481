"""``galvatron verify`` as it is called."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from galvatron_lite.cli import app
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import write_plan
from galvatron_lite.plans.schema import Plan
from galvatron_lite.verify.schema import Check, Verdict, Verification
from tests.docs.pages import commands, text_of
from tests.equivalence import plans

MODEL = """
import torch
from galvatron_lite.model.zoo.gpt import GPT, GPTConfig
def make_model():
    return GPT(GPTConfig(vocab=32, layers=2, hidden=32, heads=4, sequence=16))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan for two processes, and the function that makes its model."""
    names = ["before", "blocks.0", "blocks.1", "after"]
    plan = plans.write_plan([names], dict.fromkeys(names, Strategy(data=2)), devices=2, batch=4)
    write_plan(plan, tmp_path / "plan.yaml")
    (tmp_path / "train.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def verify(*words: str) -> Result:
    return CliRunner().invoke(app, ["verify", "plan.yaml", *words])


@pytest.mark.usefixtures("folder")
def test_the_command_of_the_page() -> None:
    _, first, *words = shlex.split(next(commands(text_of("docs/verify.md"))))
    done = CliRunner().invoke(app, [first, *words, "--checks", "dry", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
    assert found["passed"]
    skipped = {name for name, verdict in verdicts.items() if verdict == "skipped"}
    # a plan written by hand has no prediction, and was made from no profile
    assert skipped == {"memory is as predicted", "memory fits the budget", "communication is as priced"}
    assert "dry run" in verdicts
    assert [role["ranks"] for role in found["roles"]] == [[0, 1]]


def test_failed_checks_are_printed_and_set_the_exit_status(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> Verification:
        return Verification((Check("order", Verdict.FAILED, "Rank 1 [of 2] waits.", ("a line",)),))

    monkeypatch.setattr("galvatron_lite.api_plans.verify_plan", failing)
    done = verify("--model", "train.py:make_model")
    assert done.exit_code == 1
    assert "failed" in done.output
    assert "Rank 1 [of 2] waits." in done.output
    assert "a line" in done.output


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--checks", "all"], "--checks: 'all' cannot be used. Give one or several of dry, numbers"),
        (["--processes", "1"], "--processes: 1 cannot be used."),
        ([], "The plan is for tiny, which is no model known here: --model NAME or SCRIPT.py:FACTORY."),
        (["--model", "gpt-huge"], "model: 'gpt-huge' is unknown."),
        (["--model", "train.py:other"], "train.py has no function 'other'."),
    ],
)
def test_what_cannot_be_used_is_named(words: list[str], said: str) -> None:
    done = verify(*words)
    assert done.exit_code == 1
    assert said in str(done.exception)


def test_a_plan_that_is_not_for_the_model(folder: Path) -> None:
    names = ["before", "a", "b", "c", "after"]
    plan: Plan = plans.write_plan([names], dict.fromkeys(names, Strategy()), devices=1, batch=4)
    write_plan(plan, folder / "plan.yaml")
    done = verify("--model", "train.py:make_model", "--checks", "dry")
    assert done.exit_code == 1
    assert "'a' cannot be used. The model has no such layer" in str(done.exception)
