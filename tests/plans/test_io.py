from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from yaml import safe_dump as dump

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import to_data
from galvatron_lite.model.graph import Layer, Recompute, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import check_plan, file_named, read_plan, write_plan
from galvatron_lite.plans.phases import PHASES_VERSION, PhasedPlan, PlannedPhase, check_phased, read_phases
from galvatron_lite.plans.schema import (
    PLAN_VERSION,
    BranchPlacement,
    LayerRun,
    Plan,
    Proof,
    Provenance,
    Schedule,
    Stage,
    layer_runs,
)
from tests.plans.export import plans as exported
from tests.runtime.plans import make_plan

MIXED = (
    LayerRun("before", "before", 1, Strategy(data=4)),
    LayerRun("layers.0", "layers.2", 3, Strategy(zero=2, zero_stage=3, tensor=2, sequence_parallel=True)),
    LayerRun("after", "after", 1, Strategy(data=4, recompute=Recompute.FULL)),
)
PLAN = Plan(PLAN_VERSION, "toy", 4, 16, 2, Schedule.ONE_F_ONE_B, "fp32", (Stage(MIXED),))


def test_a_plan_reads_back_as_written(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == PLAN


def test_a_plan_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Checkpoints hold plans, and have to load."""
    provenance = Provenance("0", "p", "h", "", "c", {}, 1, Proof.GIVEN)
    data: Any = to_data(replace(PLAN, provenance=provenance))
    data["provenance"]["simulated"] = True
    (tmp_path / "plan.yaml").write_text(dump(data))
    assert read_plan(tmp_path / "plan.yaml").stages == PLAN.stages


def test_another_version_is_refused(tmp_path: Path) -> None:
    write_plan(replace(PLAN, version=99), tmp_path / "plan.yaml")
    with pytest.raises(FileFormatError, match="version: 99"):
        read_plan(tmp_path / "plan.yaml")


def test_a_plan_written_by_hand_is_refused_with_how_to_price_it(tmp_path: Path) -> None:
    (tmp_path / "hand.yaml").write_text("devices: 4\nruns: []\n")
    with pytest.raises(FileFormatError, match=r"galvatron evaluate .*hand.yaml --profile PROFILE -o priced.yaml"):
        read_plan(tmp_path / "hand.yaml")
    for text in ("version: 9\nruns: []\n", "devices: 4\n", "[]\n"):
        (tmp_path / "hand.yaml").write_text(text)
        with pytest.raises(FileFormatError, match=r"hand.yaml, version.* Make the plan anew") as caught:
            read_plan(tmp_path / "hand.yaml")
        assert caught.value.value == (9 if "9" in text else None)
    (tmp_path / "hand.yaml").write_text("version: 99\nphases: []\n")
    with pytest.raises(FileFormatError, match=r"hand.yaml, version: 99"):
        read_phases(tmp_path / "hand.yaml")


def test_all_degrees_that_multiply_to_the_devices_are_named() -> None:
    run = replace(MIXED[0], strategy=Strategy(height=2, width=4))
    with pytest.raises(InputError, match="data x zero x context x tensor x height x width is 8, but each stage has 4"):
        check_plan(replace(PLAN, stages=(Stage((run,)),)))


def _with_strategy(strategy: Strategy) -> Plan:
    return replace(PLAN, stages=(Stage((LayerRun("layers.0", "layers.0", 1, strategy),)),))


def _beside(stages: tuple[Stage, ...] = (Stage(()),), **changes: Any) -> Plan:
    """A plan of branches, the last device's one changed."""
    run = LayerRun("left.0", "left.0", 1, Strategy())
    branch = replace(BranchPlacement("left", ("left",), 3, 1, (run,)), **changes)
    return replace(PLAN, stages=stages, branches=(branch,))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, devices=0), "devices"),
        (replace(PLAN, microbatches=3), "a.yaml, microbatches: 3 .*must divide the global batch, 16"),
        (replace(PLAN, microbatches=0), "a.yaml, microbatches: 0 "),
        (replace(PLAN, global_batch=0), "a.yaml, global_batch: 0 "),
        (replace(PLAN, stages=()), "at least one stage"),
        (replace(PLAN, devices=5, stages=PLAN.stages * 2), "multiple of the number of stages, 2"),
        (replace(PLAN, stages=(Stage(()),)), "at least one layer"),
        (_with_strategy(Strategy(data=2)), "each stage has 4 devices"),
        (_with_strategy(Strategy(zero=4)), "zero_stage"),
        (_with_strategy(Strategy(data=4, sequence_parallel=True)), "tensor degree above 1"),
        (replace(_with_strategy(Strategy(data=4)), microbatches=8), "4 replicas cannot share"),
        (_with_strategy(Strategy(data=0)), "strategy.data: 0 .*A degree is at least 1"),
        (replace(PLAN, precision="fp12"), "a.yaml, precision: 'fp12' .*Choose one of fp64"),
        (replace(PLAN, virtual_stages=2), "virtual_stages: 2 .*divide the 1 stages"),
        (_beside(stages=(Stage(()),) * 2), "a.yaml, stages: 2 .*Beside branches there is one stage"),
        (_beside(first=4), "branches.0: 'first 4, devices 1' .*numbered from 0"),
        (_beside(first=2, devices=2), "branches.0.runs.0.strategy: 'unsplit' .*left has 2 devices"),
        (_beside(runs=()), "branches.0, runs: 'none' .*A branch has at least one layer"),
    ],
)
def test_contradictions_are_named(plan: Plan, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_plan(plan, "a.yaml")
    assert caught.value.field.startswith("a.yaml, "), "the file, then the field"


def test_the_least_allowed_numbers_are_accepted() -> None:
    plan = replace(_with_strategy(Strategy()), devices=1, global_batch=1, microbatches=1)
    assert check_plan(plan) is plan
    assert check_plan(_beside()).branches[0].first == 3
    assert check_phased(PhasedPlan(1, (PlannedPhase("one", 0, 1, 64, plan),))).steps == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ([{}, {"first": 7}], "phases.1.first"), ([{"steps": 0}], "phases.0.steps"), ([], "phases"),
        ([{}, {"first": 3, "plan": replace(PLAN, devices=8)}], "phases.1.plan, stages.0.runs.0.strategy"),
        ([{"plan": replace(PLAN, microbatches=3)}], "phases.0.plan, microbatches"),
    ],
)  # fmt: skip
def test_contradictions_of_phases_are_named(changes: list[dict[str, Any]], field: str) -> None:
    first = PlannedPhase("one", 0, 3, 64, PLAN)
    phases = tuple(replace(first, **change) for change in changes)
    with pytest.raises(InputError) as caught:
        check_phased(PhasedPlan(1, phases), "a.yaml")
    assert caught.value.field == f"a.yaml, {field}"


@pytest.mark.parametrize(("name", "value"), [("batch", 0), ("sequence", -1)])
def test_numbers_of_phases_that_cannot_be_are_named(tmp_path: Path, name: str, value: int) -> None:
    phase = {"name": "one", "steps": 3, "batch": 8, name: value}
    (tmp_path / "a.yaml").write_text(dump({"version": PHASES_VERSION, "phases": [phase]}))
    with pytest.raises(InputError) as caught:
        read_phases(tmp_path / "a.yaml")
    assert caught.value.field.startswith(f"{tmp_path / 'a.yaml'}, phases.0")
    assert caught.value.field.endswith(name)


def _edited(tmp_path: Path, old: str, new: str) -> Path:
    """The file of the plan, with a word of it changed."""
    path = tmp_path / "edited.yaml"
    text = dump(to_data(PLAN))
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path


def test_a_misspelt_key_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"edited.yaml, microbatchs: .*Did you mean microbatches\?"):
        read_plan(_edited(tmp_path, "microbatches", "microbatchs"))
    with pytest.raises(FileFormatError, match=r"edited.yaml, stages.0.runs.0.strategy.dta: .*Did you mean data\?"):
        read_plan(_edited(tmp_path, "data: 4", "dta: 4"))


def test_strategies_may_be_in_short_form_and_unknown_words_are_named(tmp_path: Path) -> None:
    long = "strategy:\n      data: 4\n"
    assert read_plan(_edited(tmp_path, long, "strategy: data4\n")) == PLAN
    with pytest.raises(FileFormatError, match=r"stages.0.runs.0.strategy: 'wholee' .*Write parts such .* or unsplit"):
        read_plan(_edited(tmp_path, long, "strategy: wholee\n"))


@pytest.mark.parametrize(("given", "said"), [("a.yaml", "a.yaml, stages[1]: layers"), (PLAN, "plan.stages[1]: layers")])
def test_errors_about_parts_of_a_plan_name_its_file(given: Plan | str, said: str) -> None:
    with pytest.raises(InputError) as caught, file_named(given):
        raise InputError("plan.stages[1]: layers", "a to b", "Plan anew.")
    assert caught.value.field == said
    with pytest.raises(InputError, match=r"^batch"), file_named(given):
        raise InputError("batch", 3, "Give 4.")


def test_neighbouring_layers_of_one_strategy_are_a_run() -> None:
    layers = [Layer(name, "kind", Role.BLOCK) for name in "abcd"]
    runs = layer_runs(layers, [Strategy(data=2), Strategy(data=2), Strategy(tensor=2), Strategy(data=2)])
    assert [(run.first, run.last, run.count) for run in runs] == [("a", "b", 2), ("c", "c", 1), ("d", "d", 1)]


def test_plans_save_and_load_themselves(tmp_path: Path) -> None:
    plan = make_plan([["before", "after"]], [[Strategy(data=2)] * 2], 8)
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(str(tmp_path / "plan.yaml")) == plan
    with pytest.raises(InputError, match="microbatches"):
        replace(plan, microbatches=3).save(tmp_path / "wrong.yaml")
    assert not (tmp_path / "wrong.yaml").exists()


WRONG = LayerRun("x", "x", 1, Strategy(data=8))
RIGHT = LayerRun("y", "y", 1, Strategy(data=2))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("last", [False, True])
def test_every_run_of_every_stage_is_checked(number: int, last: bool) -> None:
    good = exported.plan(Strategy(data=2), (2, 1, 3, 2))
    runs = good.stages[number].runs
    stage = Stage((*runs, WRONG) if last else (WRONG, *runs))
    bad = replace(good, stages=(*good.stages[:number], stage, *good.stages[number + 1 :]))
    with pytest.raises(
        InputError, match=rf"plan, stages\.{number}\.runs\.{len(runs) if last else 0}\.strategy: 'data8'"
    ):
        check_plan(bad)


@pytest.mark.parametrize(
    ("first", "devices", "runs"), [(0, 2, (RIGHT, WRONG)), (-1, 2, (RIGHT,)), (3, 2, (RIGHT,)), (0, 0, (RIGHT,))]
)
def test_every_branch_is_checked(first: int, devices: int, runs: tuple[LayerRun, ...]) -> None:
    good = BranchPlacement("left", ("left",), 0, 2, (RIGHT,))
    check_plan(branched(good, good))
    with pytest.raises(InputError, match=r"plan, branches\.1"):
        check_plan(branched(good, BranchPlacement("right", ("right",), first, devices, runs)))


def branched(*branches: BranchPlacement) -> Plan:
    whole = LayerRun("before", "before", 1, Strategy())
    return replace(exported.PLANS["data"], stages=(Stage((whole,)),), branches=branches)
