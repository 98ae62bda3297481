"""Words that are understood, those that leave a run unscored, and what is taken for what a run does not say."""

import json
from pathlib import Path

import pytest

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.stacks.catalog import DEFAULT, match_stack
from galvatron_lite.validate.checks import (
    FRAMEWORKS,
    assumptions,
    check_understood,
    link_is_specific,
    taken_otherwise,
    unknown_device,
)
from galvatron_lite.validate.predict import Predictor
from galvatron_lite.validate.results import Predicted, SkipError
from galvatron_lite.validate.rows import read_runs

from .runs import gpt

RUNS = Path(__file__).parents[2] / "profiles" / "published" / "runs.jsonl"


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("precision", "bf17", "nvfp4"), ("precision", "", "bf16"), ("precision", "int8", "bf16"),
        ("act_ckpt", "sometimes", "selective"), ("act_ckpt", "", "none"), ("act_ckpt", "every 0th layer", "Nth"),
        ("pp_schedule", "dual-pipe", "gpipe"),
    ],
)  # fmt: skip
def test_a_word_that_decides_the_cost_and_is_not_known_leaves_the_run_unscored(
    field: str, value: str, remedy: str
) -> None:
    found = Predictor(load_calibration()).predict(gpt(**{field: value}))
    assert isinstance(found, SkipError)
    assert found.reason == "a value is not understood"
    assert f"{field}: {value!r}" in found.detail
    assert remedy in found.detail


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"tp": 32, "dp": 1, "n_gpus": 64}, "tp"), ({"ep": 2}, "ep"), ({"ep": 3, "n_experts": 8}, "ep")],
)
def test_degrees_that_a_model_cannot_be_split_by(changes: dict[str, int], field: str) -> None:
    found = Predictor(load_calibration()).predict(gpt(**changes))
    assert isinstance(found, SkipError)
    assert found.reason == f"does not fit: {field}"
    assert f"{field}: {changes[field]}" in found.detail


def test_the_schedule_of_no_pipeline_decides_nothing() -> None:
    run = gpt(pp=1, dp=4, pp_schedule="dual-pipe")
    assert isinstance(Predictor(load_calibration()).predict(run), Predicted)
    assert "pp_schedule 'dual-pipe' without a pipeline: passed over" in assumptions(run)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"framework": "Megatrn"}, "framework 'Megatrn' is not known (near it: Megatron-LM"),
        ({"optimizer": "lion9"}, "optimizer 'lion9' is not known"),
        ({"intra_link": "string and tin"}, "intra_link 'string and tin' is not known"),
        ({"inter_net": "Infinibend"}, "inter_net 'Infinibend' is not known"),
        ({"n_gpus": 64, "dp": 16, "gpus_per_node": 7}, "gpus_per_node 7 does not divide n_gpus 64"),
        ({"gpu": "A100"}, "gpu 'A100' is one of A100-SXM4-40GB, A100-SXM4-80GB, A100-PCIE-40GB, A100-PCIE-80GB: "),
        ({"gpu_mem_gb": 40}, "gpu_mem_gb 40 contradicts gpu 'A100-SXM4-80GB'"),
        ({"grad_accum": 5}, "grad_accum 5 contradicts the batch: 8 micro-batches"),
        ({"global_batch": None}, "iter_time_s without global_batch"),
    ],
)
def test_what_is_said_in_vain_is_listed(changes: dict[str, object], said: str) -> None:
    assert not list(taken_otherwise(gpt()))
    assert any(text.startswith(said) for text in taken_otherwise(gpt(**changes)))


@pytest.mark.parametrize("field", ["zero_stage", "act_ckpt", "precision", "micro_batch", "gpus_per_node", "intra_link"])
def test_what_is_not_stated_is_listed(field: str) -> None:
    assert any(text.startswith(f"{field} not stated") for text in assumptions(gpt(**{field: None})))
    stated = gpt(zero_stage=1)
    assert not [text for text in assumptions(stated) if text.startswith(f"{field} not stated")]


def test_a_gpu_read_as_one_of_several_is_listed() -> None:
    assert "gpu 'A100' read as A100-SXM4-80GB" in assumptions(gpt(gpu="A100"))


def test_an_unknown_gpu_is_answered_with_those_near_it_or_all() -> None:
    assert "Near it: H100-" in unknown_device("HH100-SXM5")
    assert "RTX-4090" in unknown_device("abacus")


def test_links_of_published_rows_are_known() -> None:
    rows = [json.loads(line) for line in RUNS.read_text().splitlines()]
    for field, between in (("intra_link", False), ("inter_net", True)):
        assert {row[field] for row in rows if field in row and not link_is_specific(row[field], between)} == set()


def test_published_rows_are_understood_and_of_known_frameworks() -> None:
    runs = read_runs(RUNS)
    for run in runs:
        check_understood(run)
    assert {run.framework for run in runs if match_stack(run.framework) is DEFAULT} == set()


def test_frameworks_that_are_named_are_known() -> None:
    assert [name for name in FRAMEWORKS if match_stack(name) is DEFAULT] == []


def test_a_step_that_would_take_minutes_to_go_through_is_not_priced() -> None:
    found = Predictor(load_calibration()).predict(gpt(global_batch=100_000_000))
    assert isinstance(found, SkipError)
    assert "25,000,000 micro-batches in 2 stages" in found.detail


def test_ends_with_more_layers_than_the_model_has() -> None:
    said = "decoder-first-pipeline-num-layers=99,decoder-last-pipeline-num-layers=9"
    found = Predictor(load_calibration()).predict(gpt(pp=4, tp=1, notes=said))
    assert isinstance(found, SkipError)
    assert found.reason == "more stages than blocks"
