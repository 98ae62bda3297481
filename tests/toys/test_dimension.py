"""A dimension that one file adds is planned with, printed, pinned, exported, verified, explained and trained under."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from galvatron_lite import plan as make_plan
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Role
from galvatron_lite.parallelism.base import Dimension
from galvatron_lite.parallelism.layout import Layout, layout_of
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.registry import add, added
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import read_plan, write_plan
from galvatron_lite.plans.schema import Plan
from galvatron_lite.plans.written import parse_strategy
from tests.equivalence import plans as written
from tests.equivalence.training import SAMPLES, Case, Reference, make_case, train_alone, train_under_plans
from tests.pool import WorkerPool
from tests.toys.lanes import LANES
from tests.toys.pods import PODS
from tests.toys.test_schedule import MODEL, run

SETUP = {"model": "gpt2", "cluster": "a100-80gb", "gpus": 4, "batch": 16}
COMMAND = ("--model", "gpt2", "--cluster", "a100-80gb", "--gpus", "4", "--batch", "16")


@pytest.fixture
def pods() -> Iterator[Dimension]:
    with added(PODS):
        yield PODS


def strategies(plan: Plan) -> set[Strategy]:
    return {run.strategy for stage in plan.stages for run in stage.runs}


@pytest.mark.parametrize(("toy", "degree"), [(PODS, 2), (LANES, 4)])
def test_it_is_planned_with_pinned_printed_exported_and_explained(toy: Dimension, degree: int, tmp_path: Path) -> None:
    saved, settings, word = str(tmp_path / "plan.yaml"), str(tmp_path / "settings"), f"{toy.name}{degree} "
    with added(toy):
        text = run("plan", *COMMAND, "--fix", f"{toy.aliases[0]}={degree}", "--fix", "pp=1", "-o", saved)
        assert word in text
        plan = read_plan(Path(saved))
        assert all(dict(one.more) == {toy.name: degree} and one.devices == 4 for one in strategies(plan))
        assert all(parse_strategy(str(one)) == one for one in strategies(plan))
        assert word in run("explain", saved)
        assert toy.name in run("export", saved, "--to", "torchtitan", "-o", settings)
        assert not any(one.more for one in strategies(make_plan(**SETUP, forbid=toy.name)))
        assert not any(one.more for one in strategies(make_plan(**SETUP, backend="torchtitan")))
        with pytest.raises(InputError, match=f"Backend torchtitan cannot run {toy.means}"):
            make_plan(**SETUP, fix=f"{toy.name}={degree}", backend="torchtitan")


@pytest.mark.usefixtures("pods")
def test_pods_of_replicas_cost_what_as_many_replicas_do() -> None:
    pods, data = (make_plan(**SETUP, fix=fix) for fix in (["pods=2", "data=2"], ["pods=1", "data=4"]))
    assert strategies(pods) == {Strategy(data=2, more=(("pods", 2),))}
    assert pods.prediction.step_seconds == data.prediction.step_seconds
    assert pods.prediction.peak_memory == data.prediction.peak_memory


@pytest.mark.usefixtures("pods")
def test_its_axis_says_how_activations_lie_and_which_ranks_work_together() -> None:
    strategy = parse_strategy("pods2 zero3x2 tensor2")
    assert layout_of(strategy) == Layout(batch=4, copies=2)
    lines = lines_of(strategy)
    assert lines.batch.through(5) == (1, 3, 5, 7)
    assert (lines.states.shards.through(5), lines.states.replicas.through(5)) == ((5, 7), (1, 5))


@pytest.mark.parametrize("strategy", ["pods2 zero3x2", "pods2 zero1x2", "pods2 tensor2", "lanes4"])
def test_it_is_verified(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(MODEL)
    names = ["before", "blocks.0", "blocks.1", "after"]
    with added(PODS), added(LANES):
        plan = written.write_plan([names], dict.fromkeys(names, parse_strategy(strategy)), devices=4, batch=8)
        write_plan(plan, Path("plan.yaml"))
        found = json.loads(run("verify", "plan.yaml", "--model", "train.py:make_model", "--checks", "dry", "--json"))
    verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
    assert found["passed"], found
    assert verdicts["gradients are summed"] == "passed"


def test_the_dimension_is_unknown_before_and_after_registration(tmp_path: Path) -> None:
    names = ["before", "after"]
    with added(PODS):
        plan = written.write_plan([names], dict.fromkeys(names, parse_strategy("pods2")), devices=2, batch=4)
        write_plan(plan, tmp_path / "plan.yaml")
        with pytest.raises(InputError, match="Give a name that no dimension has"):
            add(PODS)
    with pytest.raises(InputError, match=r"strategy\.more.*there are none"):
        read_plan(tmp_path / "plan.yaml")
    with pytest.raises(InputError, match="pods2"):
        parse_strategy("pods2")
    with pytest.raises(InputError, match="'pods' is unknown"):
        make_plan(**SETUP, fix="pods=2")


def test_a_plan_by_hand_whose_fields_contradict_one_another_is_refused(tmp_path: Path) -> None:
    names = ["before", "after"]
    with added(LANES):
        plan = written.write_plan([names], dict.fromkeys(names, parse_strategy("lanes2 data2")), devices=4, batch=4)
        write_plan(plan, tmp_path / "plan.yaml")
        with pytest.raises(InputError, match=r"strategy\.lanes: 2 .*Lanes take all devices"):
            read_plan(tmp_path / "plan.yaml")


def trained(case: Case, reference: Reference, texts: list[str]) -> list[str]:
    """What goes wrong under each strategy of the blocks; layers around them are plain data parallel."""
    with added(PODS), added(LANES):
        every = []
        for text in texts:
            block = parse_strategy(text)
            chosen = {
                one.name: block if one.role is Role.BLOCK else Strategy(data=block.devices) for one in case.layers
            }
            made = {"devices": block.devices, "batch": SAMPLES, "microbatches": 2}
            every.append(written.write_plan([list(chosen)], chosen, **made))
        return train_under_plans(case, every, reference)


@pytest.mark.parametrize(
    ("world", "texts"),
    [
        (2, ["pods2", "lanes2", "lanes2 recompute"]),
        (4, ["pods2 zero3x2", "pods2 tensor2+sp", "pods2 data2", "lanes4"]),
    ],
)
def test_ranks_train_under_it_like_one_process(pool: WorkerPool, world: int, texts: list[str]) -> None:
    found = pool.run(world, trained, timeout=180.0, case=make_case("gpt2"), reference=train_alone("gpt2"), texts=texts)
    assert found == [[]] * world
