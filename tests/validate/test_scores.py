"""Scores against closed forms counted by hand, ranks against numpy, and what the table of scores says."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.cli.accuracy import LEGEND, print_scores
from galvatron_lite.validate.plans import Batch
from galvatron_lite.validate.predict import measured_of
from galvatron_lite.validate.report import unscored_lines, worst_data, worst_lines
from galvatron_lite.validate.results import (
    MeasuredRun,
    ScoredRun,
    SkipError,
    judge,
    macro,
    macros,
    ranks,
    regret,
    score,
    score_families,
    spearman,
)

from .runs import GIB, gpt, judged, outcome_of


def test_errors_and_bias() -> None:
    found = score([judged(1.1, 1.0), judged(0.8, 1.0), judged(1.0, 1.0)])
    assert (found.rows, found.scored, found.timed) == (3, 3, 3)
    assert found.time_mape == pytest.approx(10.0)
    assert found.time_median == pytest.approx(10.0)
    assert found.time_bias == pytest.approx(-10 / 3)
    assert found.memory_mape is None


def test_memory_counts_for_grade_a_mem_and_time_does_not() -> None:
    one = judge(gpt(quality="A-mem"), MeasuredRun(9.0, 4 * GIB), outcome_of(1.0))
    assert (one.time, one.memory) == (None, 0.5)


def test_regret_is_that_of_the_run_predicted_fastest() -> None:
    assert regret([(1.0, 1.2), (2.0, 1.0), (3.0, 5.0)]) == pytest.approx(0.2)
    assert regret([(1.0, 1.0), (2.0, 1.2)]) == 0.0
    assert regret([(1.0, 1.0), (1.0, 2.0)]) == pytest.approx(0.5)


def test_groups_share_model_machine_and_batch() -> None:
    runs = [judged(1.0, 1.5), judged(2.0, 1.0), judged(1.0, 9.0, global_batch=64), judged(1.0, 9.0, seq_len=2048)]
    found = score(runs)
    assert found.groups == 1
    assert found.regret == pytest.approx(50.0)
    assert found.group_spearman is None


def test_skipped_runs_are_counted_by_reason() -> None:
    odd = ScoredRun(gpt(), None, SkipError("architecture not modelled"))
    found = score([odd, odd, judged(1.0, 1.0)])
    assert (found.rows, found.scored, found.skipped) == (3, 1, {"architecture not modelled": 2})


def test_runs_that_ran_but_are_predicted_to_overflow() -> None:
    big = outcome_of(1.0, device=5 * GIB)
    found = score([judge(gpt(), MeasuredRun(1.0, None), big), judge(gpt(oom=True), MeasuredRun(None, None), big)])
    assert (found.overflowing, found.oom, found.oom_foreseen) == (1, 1, 1)


def test_macro_average_is_over_families_not_runs() -> None:
    runs = [judged(1.1, 1.0), judged(1.1, 1.0), judged(1.4, 1.0, family="other")]
    scores = score_families(runs)
    assert list(scores) == ["made-up", "other"]
    mean = macro(scores.values())
    assert mean["time_mape"] == pytest.approx(25.0)
    assert mean["rows"] == 3
    assert mean["memory_mape"] is None
    means = macros([*runs, judged(3.0, 1.0, family="images", seq_len=None)])
    assert means["macro"]["time_mape"] == pytest.approx((10 + 40 + 200) / 3)
    assert means["macro_language"]["time_mape"] == pytest.approx(25.0)


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.5]), min_size=3, max_size=20), st.randoms())
def test_rank_correlation_is_pearsons_of_the_ranks(values: list[float], chance: random.Random) -> None:
    other = [chance.choice([0.5, 1.0, 2.0]) for _ in values]
    found = spearman(list(zip(values, other, strict=True)))
    if len(set(values)) == 1 or len(set(other)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(np.corrcoef(ranks(values), ranks(other))[0, 1], abs=1e-9)
    assert sum(ranks(values)) == pytest.approx(len(values) * (len(values) + 1) / 2)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 0.5),
        ({"iter_time_s": None, "tokens_per_s_per_gpu": 4096.0}, 1.0),  # 32 x 1024 tokens on 8 devices
        ({"iter_time_s": None, "samples_per_s": 16.0}, 2.0),
        ({"iter_time_s": None}, None),
    ],
)
def test_step_time_from_what_is_printed(changes: dict[str, object], seconds: float | None) -> None:
    assert measured_of(gpt(**changes), Batch(32, 4, 8)).step_seconds == seconds


def test_memory_is_in_gib_unless_it_was_converted() -> None:
    batch = Batch(32, 4, 8)
    assert measured_of(gpt(peak_mem_gb=2), batch).peak_memory == 2 * GIB
    assert measured_of(gpt(peak_mem_gb=2, derived="peak_mem GiB->GB"), batch).peak_memory == 2_000_000_000


def test_a_run_without_figures_is_skipped() -> None:
    assert isinstance(judged(1.0, None, iter_time_s=None).outcome, SkipError)


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


def test_one_family_is_printed_once_and_a_small_negative_figure_as_nought(capsys: pytest.CaptureFixture[str]) -> None:
    few = [judged(0.9999, 1.0)]
    print_scores(score_families(few), macros(few), "family")
    printed = capsys.readouterr().out
    assert "macro" not in printed
    assert "-0.0" not in printed


def test_a_worst_run_without_a_model_is_listed_with_what_was_assumed() -> None:
    one = judged(1.0, 2.0, model=None, micro_batch=None, framework="mine")
    lines = worst_lines(one)
    assert "None" not in " ".join(lines)
    assert any("framework 'mine' is not known" in line for line in lines)
    assert worst_data(one)["family"] == "made-up"
    assert "micro_batch not stated: what grad_accum leaves, or 1 under a pipeline" in worst_data(one)["assumed"]
