"""A schedule that one file adds is planned with, printed, pinned, exported, verified, explained and trained under."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron_lite import plan as make_plan
from galvatron_lite.cli import app
from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.parallelism.backends import GALVATRON, MEGATRON
from galvatron_lite.parallelism.pipeline.schedule import Schedule, register, registered, schedules
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import check_runs, read_plan, write_plan
from tests.equivalence import plans as written
from tests.equivalence.test_schedules import observed, plan_of
from tests.equivalence.training import Case, Reference, make_case, train_alone, train_under_plans
from tests.pool import WorkerPool
from tests.toys.eager import EAGER

MODEL = """
from galvatron_lite.model.zoo.gpt import GPT, GPTConfig
def make_model():
    return GPT(GPTConfig(vocab=32, layers=2, hidden=32, heads=4, sequence=16))
"""
SETUP = ("--model", "gpt2", "--cluster", "a100-80gb", "--gpus", "2", "--batch", "8")


@pytest.fixture
def eager() -> Iterator[Schedule]:
    with registered(EAGER):
        yield EAGER


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.usefixtures("eager")
def test_it_is_planned_with_pinned_printed_exported_and_explained(tmp_path: Path) -> None:
    saved, settings = str(tmp_path / "plan.yaml"), str(tmp_path / "settings")
    text = run("plan", *SETUP, "--fix", "pp=2", "--schedule", "eager", "--fix", "recompute=none", "-o", saved)
    assert "2 stages (eager-1f1b)" in text
    assert read_plan(Path(saved)).schedule is EAGER
    assert "eager-1f1b" in run("explain", saved)
    assert "schedule eager-1f1b (these settings: 1f1b)" in run("export", saved, "--to", "torchtitan", "-o", settings)
    said = run("export", saved, "--to", "megatron", "-o", settings)
    assert "schedule eager-1f1b (these settings: 1f1b); Megatron runs 1f1b" in said


@pytest.mark.usefixtures("eager")
def test_it_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(MODEL)
    names = ["before", "blocks.0", "blocks.1", "after"]
    made = {"devices": 2, "batch": 8, "microbatches": 4, "schedule": EAGER}
    plan = written.write_plan([names[:2], names[2:]], dict.fromkeys(names, Strategy()), **made)
    write_plan(plan, Path("plan.yaml"))
    found = json.loads(run("verify", "plan.yaml", "--model", "train.py:make_model", "--checks", "dry", "--json"))
    verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
    assert found["passed"]
    assert verdicts["dry run"] == "passed", verdicts


@pytest.mark.usefixtures("eager")
def test_the_search_chooses_among_it_and_others() -> None:
    setup = {"model": "gpt2", "cluster": "a100-80gb", "gpus": 2, "batch": 8, "fix": "pp=2"}
    both = make_plan(schedules=["1f1b", EAGER], **setup)
    each = [make_plan(schedules=[one], **setup) for one in ("1f1b", "eager")]
    assert [plan.schedule for plan in each] == [Schedule.ONE_F_ONE_B, EAGER]
    assert [plan.prediction.step_seconds for plan in each] == pytest.approx([both.prediction.step_seconds] * 2, 1e-3)
    # the first of two groups holds three micro-batches instead of two
    assert each[1].prediction.peak_memory > each[0].prediction.peak_memory
    assert EAGER in GALVATRON.schedules
    assert EAGER not in MEGATRON.schedules


def test_the_schedule_is_unknown_before_and_after_registration(tmp_path: Path) -> None:
    case = make_case("gpt2")
    with registered(EAGER):
        plan = plan_of(case, (EAGER, 1, (3,), 4, Strategy()), 2)
        write_plan(plan, tmp_path / "plan.yaml")
        assert pickle.loads(pickle.dumps(plan)).schedule is EAGER
        with pytest.raises(InputError, match="Another schedule has this name"):
            register(EAGER)
    assert EAGER not in schedules()
    with pytest.raises(FileFormatError, match=r"Input should be 'gpipe', '1f1b'.*or 'cyclic'"):
        read_plan(tmp_path / "plan.yaml")
    with pytest.raises(InputError, match="Known: gpipe, 1f1b"):
        make_plan(model="gpt2", cluster="a100-80gb", gpus=2, schedules="eager")
    with pytest.raises(InputError, match="galvatron trains with gpipe, 1f1b"):
        check_runs(plan)


def trained(case: Case, reference: Reference) -> list[str]:
    """What goes wrong; the second stage holds two micro-batches, and one under 1F1B."""
    with registered(EAGER):
        plans = [plan_of(case, (EAGER, 1, (3,), count, Strategy()), 2) for count in (1, 4)]
        return [*train_under_plans(case, plans, reference), *(one for plan in plans for one in observed(case, plan))]


def test_two_ranks_train_under_it_like_one_process(pool: WorkerPool) -> None:
    case = make_case("gpt2")
    found = pool.run(2, trained, timeout=120.0, case=case, reference=train_alone("gpt2"))
    assert found == [[], []]
