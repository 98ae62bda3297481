"""The other questions of ``galvatron plan``, from the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from galvatron_lite.cli import terminal
from galvatron_lite.plans.io import read_plan
from galvatron_lite.plans.schema import Plan, Proof
from galvatron_lite.search.planner import find_plan
from tests.cli.conftest import Galvatron

SMALL = ["plan", "--layers", "2", "--hidden", "512", "--heads", "8", "--vocab", "1000", "--seq", "128",
         "--cluster", "a100-40gb", "--gpus", "4"]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--best-batch", "--max-batch", "12"], ["of best", "Best batch: ", "samples/s", "Looked at"]),
        (["--fewest"], ["Fewest: 1 GPU fits the model", "up to the answer"]),
        (["--step", "1s", "--batch", "32"], ["1 GPU takes at most 1 s a step", "GPUs"]),
        (["--fewest", "--rate", "1K"], ["1K samples/s"]),
        (["--tokens", "0.2M"], ["2 GPUs", "200K tokens/s"]),
        (["--price", "2.5", "--batch", "32", "--tokens-total", "300B", "--within", "90d"],
         ["Cheapest: ", "300B tokens", "GPU-hours", "cheapest", "at 2.5 a GPU-hour"]),
        (["--price", "2", "--batch", "16", "--steps", "10K"], ["10K steps"]),
    ],
)  # fmt: skip
def test_questions_are_answered(galvatron: Galvatron, options: list[str], said: list[str]) -> None:
    ended = galvatron(*SMALL, *options)
    assert ended.status == 0
    for words in ("From the shape given: estimated", "off by", *said):
        assert words in ended.out
    assert " 0.0 " not in ended.out
    assert ("samples/s" in ended.out) == (options[0] not in ("--tokens", "--price"))


def test_the_front_is_printed_drawn_and_written_as_json(galvatron: Galvatron, tmp_path: Path) -> None:
    target = tmp_path / "front.svg"
    options = ["--pareto", "--gpus", "1", "--batch", "8", "--memory-step", "400MB", "--plot", target]
    ended = galvatron(*SMALL, *options)
    assert "none is beaten in both time and memory" in ended.out
    assert str(target) in ended.out
    assert target.read_text().startswith("<svg")
    data = json.loads(galvatron(*SMALL, *options, "--json").out)
    assert data["step"] == 400 * 10**6
    peaks = [point["peak_memory"] for point in data["points"]]
    assert peaks == sorted(peaks, reverse=True)


def test_the_plan_of_an_answer_is_written(galvatron: Galvatron, tmp_path: Path) -> None:
    target = tmp_path / "plan.yaml"
    ended = galvatron(*SMALL, "--best-batch", "--max-batch", "8", "-o", target, "--json")
    assert read_plan(target).global_batch == json.loads(ended.out)["answer"]["batch"]


def test_where_no_number_of_gpus_is_enough_the_table_is_shown_and_the_status_is_one(galvatron: Galvatron) -> None:
    ended = galvatron(*SMALL, "--step", "1us", "--batch", "32")
    assert ended.status == 1
    assert "too few: compute alone" in ended.out
    assert ended.err.startswith("galvatron: No number of GPUs up to 4 takes at most 1 us a step.")
    assert "No number of GPUs" not in ended.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pareto", "--price", "2"], "--pareto cannot be used here. --price asks something else: ask one thing."),
        (["--step", "1s", "--rate", "5", "--batch", "8"], "--rate: '5' cannot be used. --step asks something else"),
        (["--best-batch", "--fewest"], "ask one thing"),
        (["--steps", "5"], "--steps: '5' cannot be used. It belongs to --price."),
        (["--max-batch", "5", "--pareto"], "It belongs to --best-batch."),
        (["--plot", "a.svg"], "It belongs to --best-batch or --fewest"),
        (["--pareto", "--plot", "a.png"], "ends in .svg"),
        (["--pareto", "-o", "plan.yaml"], "--pareto has many plans"),
        (["--pareto", "--certify"], "--certify"),
        (["--pareto", "--best", "3"], "--best"),
        (["--best-batch", "--batch", "8"], "--max-batch limits it"),
        (["--step", "1s"], "--batch is missing"),
        (["--step", "1 fortnight", "--batch", "8"], "300ms, 2s"),
        (["--rate", "lots"], "--rate: 'lots'"),
        (["--price", "0"], "--price: 0.0 cannot be used. Give a number above 0."),
        (["--price", "1", "--steps", "5", "--samples-total", "7", "--batch", "8"], "just one of samples"),
        (["--price", "1", "--within", "soon"], "--within"),
        (["--memory-step", "5", "--pareto"], "40GiB"),
        (["--fix", "tpp=2"], "Did you mean tp or pp?"),
        (["--forbid", "sleep"], "--forbid"),
        (["--fix", "tp=3"], "It must divide the 4 devices"),
        (["--schedule", "dapple"], "Known: gpipe, 1f1b"),
        (["--backend", "mxnet"], "--backend"),
        (["--certify", "--fewest"], "--certify cannot be used here. It belongs to a single plan"),
    ],
)
def test_what_cannot_be_asked_is_named_in_one_line(galvatron: Galvatron, options: list[str], said: str) -> None:
    ended = galvatron(*SMALL, *options)
    assert ended.status == 1
    assert ended.err.startswith("galvatron: ")
    assert said in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--fix", "pp=2", "--fix", "m=4"], lambda plan: (plan.pipeline, plan.microbatches) == (2, 4)),
        (["--fix", "mbs=2", "--fix", "dp=4"], lambda plan: plan.microbatch == 8),
        (["--forbid", "pp", "--forbid", "dp"], lambda plan: plan.pipeline == 1 and _all(plan, "batch_degree", 1)),
        (["--fix", "zero=3"], lambda plan: _all(plan, "zero_stage", 3)),
        (["--fix", "layers.*.recompute=full"], lambda plan: _blocks(plan) == {"full"}),
        (["--fix", "recompute=selective"], lambda plan: _blocks(plan) == {"selective"}),
        (["--schedule", "gpipe", "--fix", "pp=4"], lambda plan: plan.schedule.value == "gpipe"),
    ],
)
def test_pins_are_kept(galvatron: Galvatron, tmp_path: Path, options: list[str], kept) -> None:  # type: ignore[no-untyped-def]
    target = tmp_path / "plan.yaml"
    assert galvatron(*SMALL, "--batch", "32", *options, "-o", target).status == 0
    assert kept(read_plan(target))


def _all(plan, name: str, value: int) -> bool:  # type: ignore[no-untyped-def]
    return {getattr(run.strategy, name) for stage in plan.stages for run in stage.runs} == {value}


def _blocks(plan) -> set[str]:  # type: ignore[no-untyped-def]
    runs = [run for stage in plan.stages for run in stage.runs if run.first.startswith("layers.")]
    return {run.strategy.recompute.value for run in runs}


def test_the_number_of_other_plans_shown_is_an_option(galvatron: Galvatron) -> None:
    def others(*options: str) -> int:
        return len(json.loads(galvatron(*SMALL, "--batch", "32", "--json", *options).out).get("alternatives", []))

    assert (others("--best", "0"), others("--best", "1")) == (0, 1)
    assert others() >= 1


def test_a_profile_keeps_its_precision_and_its_samples(
    galvatron: Galvatron, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    galvatron("profile", "gpt2", "--estimate", "--cluster", "a100-40gb", "--gpus", "2")
    assert "--precision: 'fp16' cannot be used. Profile gpt2 is of bf16" in galvatron("plan", "--precision", "fp16").err
    assert "--seq: 77 cannot be used" in galvatron("plan", "--seq", "77").err
    assert galvatron("plan", "--precision", "bf16", "--seq", "1024").status == 0


def test_a_bar_is_shown_only_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[float] = []
    clock = [0.0]
    monkeypatch.setattr(terminal, "monotonic", lambda: clock[0])
    monkeypatch.setattr("rich.progress.Progress.start", lambda bar: started.append(clock[0]))
    with terminal.progress_bar("Searching") as move:
        for clock[0] in (0.5, 1.9, 2.1):
            move(1, 2, "something")
    assert started == [2.1]


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["analysis.setting.find_plan", "request.find_profile"])
@pytest.mark.parametrize("question", [[], ["--fewest"], ["--best-batch"], ["--price", "1"], ["--pareto"]])
def test_an_interrupt_before_a_first_plan_says_so(
    galvatron: Galvatron, monkeypatch: pytest.MonkeyPatch, place: str, question: list[str]
) -> None:
    monkeypatch.setattr(f"galvatron_lite.{place}", stop)
    assert galvatron(*SMALL, *question) == (130, "", "galvatron: Interrupted before a first plan was found.\n")


def test_an_interrupted_plan_says_how_far_it_may_be_from_the_best(
    galvatron: Galvatron, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: Any, **named: Any) -> Plan:
        plan = find_plan(*given, **named)
        assert plan.provenance is not None
        return replace(plan, provenance=replace(plan.provenance, proof=Proof.FEASIBLE, gap=0.25, interrupted=True))

    monkeypatch.setattr("galvatron_lite.analysis.setting.find_plan", stopped)
    assert "interrupted; feasible, at most 25.0% from the best" in galvatron(*SMALL).out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["plan"], "or plan without one: --model NAME --cluster NAME"),
        ([*SMALL, "--schedule", "1f2b"], "--schedule: '1f2b' is unknown. Did you mean 1f1b?"),
        (["plan", "--cluster", "a100-80gb"], "--model NAME --cluster NAME"),
        (["plan", "--model", "gpt2", "--cluster", "a100"], "Did you mean a100-"),
        (["plan", "--model", "gpt2", "--cluster", "a100-v100", "--mem", "40GB"], "--mem 90% is of each type's own"),
        ([*SMALL, "-o", "nowhere/at/all.yaml"], "There is no folder nowhere/at: make it first."),
        (["plan", "--model", "gpt2", "--cluster", "empty.yaml"], "'nothing' cannot be used"),
    ],
)
def test_errors_of_missing_options_name_a_remedy(
    galvatron: Galvatron, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").touch()
    ended = galvatron(*options)
    assert ended.status == 1
    assert said in ended.err
    assert len(list(tmp_path.iterdir())) == 1


def test_numbers_of_one_type_of_devices_say_that_their_precision_is_their_own(galvatron: Galvatron) -> None:
    options = [*SMALL[:-3], "a100-v100", "--fewest", "--batch", "8"]
    assert json.loads(galvatron(*options, "--json").out)["plan"]["precision"] == "bf16"
    assert "all of one type, in their own best" in galvatron(*options).out
