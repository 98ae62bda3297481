"""The other questions of ``galvatron plan``, from the command line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from galvatron_lite.cli import main, terminal
from galvatron_lite.plans.io import read_plan
from galvatron_lite.plans.schema import Plan, Proof
from galvatron_lite.search.planner import find_plan

SMALL = ["plan", "--layers", "4", "--hidden", "512", "--heads", "8", "--vocab", "1000", "--seq", "128",
         "--cluster", "a100-40gb", "--gpus", "4"]  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["galvatron", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--best-batch", "--max-batch", "24"], ["of best", "Best batch: ", "samples/s", "Looked at"]),
        (["--fewest"], ["Fewest: 1 GPU fits the model", "up to the answer"]),
        (["--step", "9.5ms", "--batch", "32"], ["2 GPUs take at most 9.5 ms a step", "GPUs"]),
        (["--fewest", "--rate", "1K"], ["1K samples/s"]),
        (["--tokens", "0.2M"], ["2 GPUs", "200K tokens/s"]),
        (["--price", "2.5", "--batch", "32", "--tokens-total", "300B", "--within", "90d"],
         ["Cheapest: ", "300B tokens", "GPU-hours", "cheapest", "at 2.5 a GPU-hour"]),
        (["--price", "2", "--batch", "16", "--steps", "10K"], ["10K steps"]),
    ],
)  # fmt: skip
def test_questions_are_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], said: list[str]
) -> None:
    assert run(monkeypatch, *SMALL, *options) == 0
    out = capsys.readouterr().out
    for words in ("From the shape given: estimated", "off by", *said):
        assert words in out


def test_the_front_is_printed_drawn_and_told_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "front.svg"
    options = ["--pareto", "--layers", "2", "--gpus", "2", "--batch", "16", "--memory-step", "400MB"]
    assert run(monkeypatch, *SMALL, *options, "--plot", str(target)) == 0
    out = capsys.readouterr().out
    assert "none is beaten in both time and memory" in out
    assert str(target) in out
    assert target.read_text().startswith("<svg")
    assert run(monkeypatch, *SMALL, *options, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["step"] == 400 * 10**6
    assert [p["peak_memory"] for p in data["points"]] == sorted(
        (p["peak_memory"] for p in data["points"]), reverse=True
    )


def test_the_plan_of_an_answer_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "plan.yaml"
    assert run(monkeypatch, *SMALL, "--best-batch", "--max-batch", "16", "-o", str(target), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert read_plan(target).global_batch == data["answer"]["batch"]


def test_where_no_number_of_gpus_is_enough_the_table_is_shown_and_the_status_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *SMALL, "--step", "1us", "--batch", "32") == 1
    captured = capsys.readouterr()
    assert "too few: compute alone" in captured.out
    assert captured.err.startswith("galvatron: No number of GPUs up to 4 takes at most 1 us a step.")
    assert "No number of GPUs" not in captured.out


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
        (["--fix", "layers.9.tp=2"], "--fix"),
        (["--forbid", "sleep"], "--forbid"),
        (["--fix", "tp=3"], "It must divide the 4 devices"),
        (["--fix", "ep=2"], "No layer of flags offers it."),
        (["--fix", "tp=8"], "It must divide the 4 devices"),
        (["--schedule", "dapple"], "Known: gpipe, 1f1b"),
        (["--backend", "mxnet"], "--backend"),
    ],
)
def test_what_cannot_be_asked_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert run(monkeypatch, *SMALL, *options) == 1
    message = capsys.readouterr().err.strip()
    assert message.startswith("galvatron: ")
    assert said in message
    assert "\n" not in message


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
def test_pins_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], kept
) -> None:  # type: ignore[no-untyped-def]
    target = tmp_path / "plan.yaml"
    assert run(monkeypatch, *SMALL, "--batch", "32", *options, "-o", str(target)) == 0
    assert kept(read_plan(target))


def _all(plan, name: str, value: int) -> bool:  # type: ignore[no-untyped-def]
    return {getattr(run.strategy, name) for stage in plan.stages for run in stage.runs} == {value}


def _blocks(plan) -> set[str]:  # type: ignore[no-untyped-def]
    runs = [run for stage in plan.stages for run in stage.runs if run.first.startswith("layers.")]
    return {run.strategy.recompute.value for run in runs}


def test_other_plans_are_shown_as_many_as_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def others(*options: str) -> int:
        assert run(monkeypatch, *SMALL, "--batch", "32", "--json", *options) == 0
        return len(json.loads(capsys.readouterr().out).get("alternatives", []))

    assert others("--best", "0") == 0
    assert others("--best", "1") == 1
    assert others() >= 1


def test_a_profile_keeps_its_precision_and_its_samples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "profile", "gpt2", "--estimate", "--cluster", "a100-40gb", "--gpus", "2") == 0
    capsys.readouterr()
    assert run(monkeypatch, "plan", "--precision", "fp16") == 1
    assert "--precision: 'fp16' cannot be used. Profile gpt2 is of bf16" in capsys.readouterr().err
    assert run(monkeypatch, "plan", "--seq", "77") == 1
    assert "--seq: 77 cannot be used" in capsys.readouterr().err
    assert run(monkeypatch, "plan", "--precision", "bf16", "--seq", "1024") == 0


def test_a_bar_is_shown_only_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[float] = []
    clock = [0.0]
    monkeypatch.setattr(terminal, "monotonic", lambda: clock[0])
    monkeypatch.setattr("rich.progress.Progress.start", lambda bar: started.append(clock[0]))
    with terminal.progress_bar("Searching") as move:
        for clock[0] in (0.5, 1.9, 2.1):
            move(1, 2, "something")
    assert started == [2.1]


@pytest.mark.parametrize("question", [[], ["--fewest"], ["--best-batch"], ["--price", "1"], ["--pareto"]])
def test_an_interrupt_before_a_first_plan_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], question: list[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("galvatron_lite.analysis.setting.find_plan", stop)
    assert run(monkeypatch, *SMALL, *question) == 130
    told = capsys.readouterr()
    assert told.err == "galvatron: Interrupted before a first plan was found.\n"
    assert told.out == ""


def test_an_interrupted_plan_says_how_far_it_may_be_from_the_best(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*given: Any, **named: Any) -> Plan:
        plan = find_plan(*given, **named)
        assert plan.provenance is not None
        return replace(plan, provenance=replace(plan.provenance, proof=Proof.FEASIBLE, gap=0.25, interrupted=True))

    monkeypatch.setattr("galvatron_lite.analysis.setting.find_plan", stopped)
    assert run(monkeypatch, *SMALL) == 0
    assert "interrupted; feasible, at most 25.0% from the best" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["plan"], "or plan without one: --model NAME --cluster NAME"),
        ([*SMALL, "--schedule", "1f2b"], "--schedule: '1f2b' is unknown. Did you mean 1f1b?"),
        (["plan", "--cluster", "a100-80gb"], "--model NAME --cluster NAME"),
        (["plan", "--model", "gpt2", "--cluster", "a100"], "Did you mean a100-"),
        (["plan", "--model", "gpt2", "--cluster", "a100-v100", "--mem", "40GB"], "--mem 90% is of each type's own"),
        ([*SMALL, "-o", "nowhere/at/all.yaml"], "There is no folder nowhere/at: make it first."),
    ],
)
def test_what_is_missing_is_told_with_what_would_do(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *options) == 1
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_words_of_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *SMALL, "--tokens", "0.2M") == 0
    out = capsys.readouterr().out
    assert "tokens/s" in out
    assert "samples/s" not in out
    assert run(monkeypatch, *SMALL, "--price", "2", "--batch", "16", "--tokens-total", "1M") == 0
    assert " 0.0 " not in capsys.readouterr().out
    assert run(monkeypatch, *SMALL, "--certify", "--fewest") == 1
    assert "--certify cannot be used here. It belongs to a single plan" in capsys.readouterr().err
    assert run(monkeypatch, *SMALL, "--plot", "x.svg") == 1
    assert "--plot: 'x.svg' cannot be used" in capsys.readouterr().err


def test_an_empty_file_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    empty = tmp_path / "empty.yaml"
    empty.touch()
    assert run(monkeypatch, "plan", "--model", "gpt2", "--cluster", str(empty)) == 1
    assert "'nothing' cannot be used" in capsys.readouterr().err


def test_an_interrupt_of_the_estimate_says_so_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("galvatron_lite.api_profile.find_profile", stop)
    assert run(monkeypatch, *SMALL) == 130
    assert capsys.readouterr().err == "galvatron: Interrupted before a first plan was found.\n"


def test_numbers_of_one_type_of_devices_say_that_their_precision_is_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "gpt2", "--seq", "128", "--cluster", "a100-v100", "--fewest", "--batch", "8"]
    assert run(monkeypatch, "plan", *options, "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"]["precision"] == "bf16"
    assert run(monkeypatch, "plan", *options) == 0
    assert "all of one type, in their own best" in capsys.readouterr().out
