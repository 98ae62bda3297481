import json
from pathlib import Path

import pytest

from galvatron_lite.cluster.catalog import device_named
from galvatron_lite.errors import FileFormatError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.stacks.catalog import DEFAULT, match_stack
from galvatron_lite.validate.checks import (
    FRAMEWORKS,
    assumptions,
    check_understood,
    device_of,
    link_is_specific,
    taken_otherwise,
    unknown_device,
)
from galvatron_lite.validate.plans import argument, compute_precision, integer_argument, recompute_of, schedule_of
from galvatron_lite.validate.rows import INTEGERS, KINDS, REALS, parse_rows, read_runs, run_from_data

from .runs import gpt, predicted, skipped

RUNS = Path(__file__).parents[2] / "profiles" / "published" / "runs.jsonl"
LEAST = {"family": "f", "run_id": "r", "framework": "x"}


def test_absent_fields_are_none_and_unknown_ones_are_passed_over() -> None:
    run = run_from_data(LEAST | {"layers": 4.0, "something_new": [1], "mfu2": None})  # 4.0 counts as an integer
    assert (run.layers, run.hidden, run.oom) == (4, None, None)


@pytest.mark.parametrize(
    ("field", "value"), [("layers", "four"), ("layers", 4.5), ("tp", 0), ("gated_mlp", 1), ("gpu", 3)]
)
def test_a_field_of_the_wrong_type_is_named_with_its_line(field: str, value: object) -> None:
    ((_, run),) = parse_rows(["", json.dumps(LEAST | {field: value})], "runs.jsonl")
    assert run.problem is not None
    assert f"runs.jsonl, line 2, {field}" in run.problem


@pytest.mark.parametrize("line", ["{", "[1]", '{"family": "f"}', "[" * 100_000])
def test_a_line_that_is_no_run_is_counted_with_its_number_and_costs_no_other(line: str) -> None:
    runs = [run for _, run in parse_rows([json.dumps(LEAST), line, json.dumps(LEAST)])]
    assert [run.line for run in runs] == [1, 2, 3]
    assert runs[0].problem is None is runs[2].problem
    assert runs[1].problem is not None
    assert "line 2" in runs[1].problem


def test_a_run_with_a_problem_keeps_its_other_fields() -> None:
    ((_, run),) = parse_rows([json.dumps(LEAST | {"layers": "32", "gpu": "A100", "quality": "A"})])
    assert (run.family, run.run_id, run.gpu, run.quality, run.layers) == ("f", "r", "A100", "A", None)


@pytest.mark.parametrize("field", sorted(INTEGERS))
def test_whole_numbers_have_a_least_and_a_largest_value(field: str) -> None:
    least, largest = INTEGERS[field]
    assert getattr(run_from_data(LEAST | {field: least}), field) == least
    assert getattr(run_from_data(LEAST | {field: largest}), field) == largest
    for value in (least - 1, largest + 1, 10**400, float("inf"), float("nan"), -1):
        with pytest.raises(FileFormatError, match=f"{field}.*{largest:,}"):
            run_from_data(LEAST | {field: value})


@pytest.mark.parametrize("field", sorted(REALS))
def test_numbers_are_positive_and_finite(field: str) -> None:
    assert getattr(run_from_data(LEAST | {field: 0.5}), field) == 0.5
    for value in (0, -1.2, float("inf"), float("nan"), 1e12, 10**400, True, "1"):
        with pytest.raises(FileFormatError, match=field):
            run_from_data(LEAST | {field: value})


def test_every_number_has_a_range() -> None:
    assert {name for name, kind in KINDS.items() if kind == "int"} == set(INTEGERS)
    assert {name for name, kind in KINDS.items() if kind == "float"} == set(REALS)


def test_grades_and_files_that_do_not_exist(tmp_path: Path) -> None:
    assert run_from_data(LEAST | {"quality": "A-mem"}).quality == "A-mem"
    with pytest.raises(FileFormatError, match="A, B, A-mem, C"):
        run_from_data(LEAST | {"quality": "Z"})
    with pytest.raises(FileFormatError, match="no such file"):
        read_runs(tmp_path / "none.jsonl")


def test_the_published_rows_all_read() -> None:
    runs = read_runs(RUNS)
    assert len(runs) == 4229
    assert len({run.family for run in runs}) == 37
    assert not [run.problem for run in runs if run.problem]


@pytest.mark.parametrize(
    ("degrees", "replicas"), [({}, 64), ({"tp": 2, "pp": 4}, 8), ({"spatial": 8}, 8), ({"dp": 3}, 3), ({"tp": 3}, None)]
)
def test_replicas_not_stated_are_what_other_degrees_leave(degrees: dict[str, int], replicas: int | None) -> None:
    assert run_from_data(LEAST | {"n_gpus": 64} | degrees).dp == replicas


@pytest.mark.parametrize(
    ("text", "expected"), [("float16", "fp16"), ("bfloat16", "bf16"), ("Float32", "fp32"), ("amp-fp16", "amp-fp16")]
)
def test_precisions_as_types_of_tensors(text: str, expected: str) -> None:
    assert run_from_data(LEAST | {"precision": text}).precision == expected


A100, V100 = device_named("A100"), device_named("V100")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16", "bf16"), (None, "bf16"), ("BF16", "bf16"), ("amp_bf16/DEFAULT", "bf16"), ("bf16/PURE", "bf16"),
        ("amp-fp16", "fp16"), ("fp16/bf16 mixed", "fp16"), ("bf16 (fp32 grad accumulation)", "bf16"),
        ("bf16 (fp32 grad accum)", "bf16"), ("fp32", "fp32"), ("tf32", "tf32"), ("fp32/tf32", "tf32"),
        ("fp8 (TE) + bf16", "fp8"), ("amp_fp8/DEFAULT", "fp8"), ("MXFP8", "mxfp8"), ("NVFP4", "nvfp4"),
        ("FP8-CS (FP8-MX)", "fp8"), ("fp8 rowwise + AsyncTP", "fp8-rowwise"), ("fp8 tensorwise", "fp8"),
    ],
)  # fmt: skip
def test_precision_of_matmuls(text: str | None, expected: str) -> None:
    assert compute_precision(text, A100) == expected
    if expected == "tf32":  # only where the device has it
        assert compute_precision(text, V100) == "fp32"
    # TensorFlow multiplies fp32 in TF32 by default
    assert compute_precision(text, A100, multiplies_tf32=True) == expected.replace("fp32", "tf32")
    assert compute_precision(text, V100, multiplies_tf32=True) == compute_precision(text, V100)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, Recompute.NONE), ("none stated", Recompute.NONE), ("unknown", Recompute.NONE),
        ("full (uniform, 1 layers)", Recompute.FULL), ("selective (per-op)", Recompute.SELECTIVE),
        ("selective (config default); 0 full layers", Recompute.SELECTIVE),
    ],
)  # fmt: skip
def test_recomputation(text: str | None, expected: Recompute) -> None:
    assert recompute_of(text) is expected


@pytest.mark.parametrize(
    ("text", "virtual", "expected"),
    [
        (None, 1, Schedule.ONE_F_ONE_B), (None, 4, Schedule.INTERLEAVED), ("1f1b", 1, Schedule.ONE_F_ONE_B),
        ("interleaved-1f1b (custom)", 1, Schedule.INTERLEAVED), ("gpipe", 1, Schedule.GPIPE),
        ("zb-1p", 1, Schedule.ZERO_BUBBLE_1P), ("zb-2p", 1, Schedule.ZERO_BUBBLE_2P),
        ("ZB-V", 1, Schedule.ZERO_BUBBLE_V), ("zbv", 2, Schedule.ZERO_BUBBLE_V),
    ],
)  # fmt: skip
def test_schedules(text: str | None, virtual: int, expected: Schedule) -> None:
    assert schedule_of(text, virtual) is expected


def test_arguments_quoted_in_notes() -> None:
    said = "special args: kv-channels=128, moe-layer-freq=([0]*3+[1]*12), x-kv-channels=3"
    assert integer_argument(said, "kv-channels") == 128
    assert argument(said, "moe-layer-freq") == "([0]*3+[1]*12)"
    assert integer_argument(said, "moe-layer-freq") is None
    assert argument(said, "channels") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('A100 ("NVIDIA Ampere")', "A100-SXM4-80GB"), ("LambdaCloud A100 40GB PCIe", "A100-PCIE-40GB"),
        ("Dell 8x H100 80GB SXM5", "H100-SXM5-80GB"), ("2x H100 80GB PCIe Gen5", "H100-PCIE-80GB"),
        ("H100-SXM 96GB HBM2e 500W (Grand Teton)", "H100-SXM-96GB"), ("LambdaCloud 4xV100 16GB", "V100-SXM2-16GB"),
        ("V100-SXM3-32GB (450W, DGX-2H)", "V100-SXM2-32GB"), ("GB200-192GB", "GB200-186GB"), ("Tesla P40-24GB", "P40"),
        ("GB300", "GB300-288GB"), ("B200-SXM", "B200-SXM6-180GB"), ("RTX 6000 Ada", "RTX-6000-Ada"),
    ],
)  # fmt: skip
def test_devices_by_what_publications_call_them(text: str, expected: str) -> None:
    assert device_of(text).name == expected


@pytest.mark.parametrize(
    "text", [None, "unknown (32GB-class; rates consistent with V100-32GB or A100-40)", "TPU v4", "H1000", "A1000"]
)
def test_devices_that_are_not_known(text: str | None) -> None:
    assert device_of(text) is None


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
    found = skipped(gpt(**{field: value}))
    assert found.reason == "a value is not understood"
    assert f"{field}: {value!r}" in found.detail
    assert remedy in found.detail


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"tp": 32, "dp": 1, "n_gpus": 64}, "tp"), ({"ep": 2}, "ep"), ({"ep": 3, "n_experts": 8}, "ep")],
)
def test_degrees_that_a_model_cannot_be_split_by(changes: dict[str, int], field: str) -> None:
    found = skipped(gpt(**changes))
    assert found.reason == f"does not fit: {field}"
    assert f"{field}: {changes[field]}" in found.detail


def test_the_schedule_of_no_pipeline_decides_nothing() -> None:
    run = gpt(pp=1, dp=4, pp_schedule="dual-pipe")
    assert predicted(run).step_seconds > 0
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
def test_fields_that_are_not_used_are_listed(changes: dict[str, object], said: str) -> None:
    assert not list(taken_otherwise(gpt()))
    assert any(text.startswith(said) for text in taken_otherwise(gpt(**changes)))


@pytest.mark.parametrize("field", ["zero_stage", "act_ckpt", "precision", "micro_batch", "gpus_per_node", "intra_link"])
def test_assumed_fields_are_listed(field: str) -> None:
    assert any(text.startswith(f"{field} not stated") for text in assumptions(gpt(**{field: None})))
    stated = gpt(zero_stage=1)
    assert not [text for text in assumptions(stated) if text.startswith(f"{field} not stated")]


def test_a_gpu_read_as_one_of_several_is_listed_and_an_unknown_one_answered_with_those_near_it_or_all() -> None:
    assert "gpu 'A100' read as A100-SXM4-80GB" in assumptions(gpt(gpu="A100"))
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
    named = {run.framework for run in runs} | set(FRAMEWORKS)
    assert {name for name in named if match_stack(name) is DEFAULT} == set()


def test_steps_and_stages_that_cannot_be_priced() -> None:
    assert "25,000,000 micro-batches in 2 stages" in skipped(gpt(global_batch=100_000_000)).detail
    said = "decoder-first-pipeline-num-layers=99,decoder-last-pipeline-num-layers=9"
    assert skipped(gpt(pp=4, tp=1, notes=said)).reason == "more stages than blocks"
