"""What the scores' table says, against counts by hand."""

import pytest

from galvatron_lite.cli.accuracy import LEGEND, print_scores
from galvatron_lite.plans.schema import MemoryBreakdown, TimeBreakdown
from galvatron_lite.validate.report import unscored_lines, worst_data, worst_lines
from galvatron_lite.validate.results import (
    MeasuredRun,
    Predicted,
    ScoredRun,
    SkipError,
    judge,
    macros,
    score_families,
)

from .runs import gpt


def judged(predicted: float, measured: float | None, **changes: object) -> ScoredRun:
    outcome = Predicted(predicted, 0, 0, 1, TimeBreakdown(), MemoryBreakdown())
    return judge(gpt(**changes), MeasuredRun(measured, None), outcome)


RUNS = [
    judged(1.0, 1.001),
    judged(1.3, 1.0, global_batch=64),
    judged(1.0, None, oom=True, iter_time_s=None),
    ScoredRun(gpt(), None, SkipError("architecture not modelled")),
    ScoredRun(gpt(), None, SkipError("architecture not modelled")),
    ScoredRun(gpt(), None, SkipError("GPU not stated")),
    judged(0.9, 1.0, family="whole"),
]


def test_every_row_that_is_not_scored_has_a_reason() -> None:
    lines = unscored_lines(score_families(RUNS))
    assert lines == [
        "made-up: 4 of 6 not scored: architecture not modelled (2); GPU not stated (1); "
        "ran out of memory, so that there is no figure (1)"
    ]


def test_the_table_has_a_row_a_family_and_says_what_its_columns_mean(capsys: pytest.CaptureFixture[str]) -> None:
    print_scores(score_families(RUNS), macros(RUNS), "family")
    lines = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in lines if line.startswith("whole"))
    assert row[:6] == ["whole", "1", "1", "10.0", "10.0", "-10.0"]
    made_up = next(line.split() for line in lines if line.startswith("made-up "))
    # Errors of -0.1 and +30 %.
    assert made_up[1:6] == ["6", "2", "15.0", "15.0", "15.0"]
    heading = lines[0]
    for title in ("time %", "median", "bias", "memory %", "rank", "in groups", "regret %", "worst", "over"):
        assert title in heading
        assert any(line.startswith(title) or f" {title}:" in line or f"{title}," in line for line in LEGEND), title
    assert "--help" in lines[-1]


def test_one_family_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    few = [judged(1.0, 1.1)]
    print_scores(score_families(few), macros(few), "family")
    assert "macro" not in capsys.readouterr().out


def test_a_worst_run_without_a_model_is_said_so_with_what_was_assumed() -> None:
    one = judged(1.0, 2.0, model=None, micro_batch=None, framework="mine")
    lines = worst_lines(one)
    assert "None" not in " ".join(lines)
    assert any("framework 'mine' is not known" in line for line in lines)
    assert worst_data(one)["family"] == "made-up"
    assert "micro_batch not stated: what grad_accum leaves, or 1 under a pipeline" in worst_data(one)["assumed"]


def test_a_small_negative_figure_is_nought(capsys: pytest.CaptureFixture[str]) -> None:
    few = [judged(0.9999, 1.0)]
    print_scores(score_families(few), macros(few), "family")
    assert "-0.0" not in capsys.readouterr().out
