"""Pairs of runs on two devices: which count, and what is scored; and large runs predicted from small ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.cli import app
from galvatron_lite.validate.predict import Predictor
from galvatron_lite.validate.results import Predicted
from galvatron_lite.validate.rows import PublishedRun
from galvatron_lite.validate.transfer import pairs_of, scale_up_scores, score_pairs
from tests.validate.runs import gpt
from tests.validate.test_calibrate import BASE, elsewhere, made_by, written

PRIORS = load_calibration(Path(__file__).parents[2] / "configs" / "calibration" / "priors")


def measured(slower: float = 1.0, **changes: object) -> PublishedRun:
    """A run that took as long as is predicted, or so many times as long."""
    run = gpt(flash_attn=False, precision="fp16", **changes)
    outcome = Predictor(PRIORS).predict(run)
    assert isinstance(outcome, Predicted)
    return replace(run, iter_time_s=slower * outcome.step_seconds)


def test_runs_as_predicted_are_carried_without_error() -> None:
    pairs = pairs_of([measured(), measured(gpu="V100-SXM2-32GB"), measured(gpu="H100-SXM5-80GB")], PRIORS)
    assert [pair.devices for pair in pairs] == [("A100", "V100"), ("A100", "H100"), ("H100", "V100")]
    assert all(pair.error < 1e-3 for pair in pairs)
    assert all(pair.same_batch for pair in pairs)
    assert min(pair.peak_error for pair in pairs) > 0.05


def test_what_a_software_loses_everywhere_is_carried() -> None:
    """A third slower on both than is known of the software; memory-bound kernels weigh more on the quicker device."""
    (pair,) = pairs_of([measured(1.3), measured(1.3, gpu="V100-SXM2-32GB")], PRIORS)
    assert pair.error < 0.15


def test_what_makes_no_pair() -> None:
    run = measured()
    others = [
        measured(gpu="A100-SXM4-40GB"),  # the same type of device
        measured(gpu="V100-SXM2-32GB", layers=6),  # another model
        replace(measured(gpu="V100-SXM2-32GB"), framework="torchtitan"),  # other software
        replace(measured(gpu="V100-SXM2-32GB"), quality="C"),
        replace(measured(gpu="V100-SXM2-32GB"), iter_time_s=1e-5),  # beyond the peak of its devices
    ]
    assert pairs_of([run, *others], PRIORS) == []


def test_what_is_measured_twice_counts_once() -> None:
    first = measured(gpu="V100-SXM2-32GB")
    assert len(pairs_of([measured(), first, replace(first, run_id="again")], PRIORS)) == 1


def test_another_batch_is_another_pair_and_said() -> None:
    runs = [measured(), measured(gpu="V100-SXM2-32GB"), measured(gpu="V100-SXM2-32GB", global_batch=64)]
    pairs = pairs_of(runs, PRIORS)
    assert [pair.same_batch for pair in pairs] == [True, False]
    total = score_pairs(pairs)[-1]
    assert (total.name, total.pairs, total.same) == ("all", 2, 1)


def test_command(tmp_path: Path) -> None:
    runs = [measured(), measured(gpu="V100-SXM2-32GB")]
    path = written(runs, tmp_path / "runs.jsonl")
    done = CliRunner().invoke(app, ["validate", str(path), "--transfer"])
    assert done.exit_code == 0, done.output
    assert "A100 and V100" in done.output
    data = json.loads(CliRunner().invoke(app, ["validate", str(path), "--transfer", "--json"]).output)
    assert data["scores"][-1]["error"] == pytest.approx(100 * data["pairs"][0]["error"])


def test_no_pair_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({"family": "x", "run_id": "x", "framework": "Megatron-LM", "quality": "A"}) + "\n")
    done = CliRunner().invoke(app, ["validate", str(path), "--transfer"])
    assert done.exit_code == 1
    assert "two types of device" in str(done.exception)


SMALL = [(8, 1), (16, 2), (32, 1), (64, 4)]
LARGE = [(256, 1), (512, 4)]


def runs(calibration: Calibration, sizes: list[tuple[int, int]], model: str = "gpt") -> list[PublishedRun]:
    settings: list[dict[str, object]] = [
        {"run_id": f"{devices}-{tp}", "n_gpus": devices, "tp": tp, "pp": 1, "dp": devices // tp, "hidden": 2048,
         "ffn_hidden": 8192, "grad_accum": None, "global_batch": 1024, "framework": "nanotron", "model": model}
        for devices, tp in sizes
    ]  # fmt: skip
    return made_by(calibration, settings)


def test_what_small_runs_tell_holds_for_large_ones() -> None:
    slow = elsewhere(matmul=1.3, memory=1.3, attention=1.3, optimizer=1.3, straggling=4.0)
    family, total = scale_up_scores(runs(slow, SMALL + LARGE), BASE)
    assert (family.small, family.large, family.most) == (4, 2, 512)
    assert family.kind != "unchanged"
    assert family.error < 0.05
    assert family.error < 0.3 * family.prior_error
    assert total.error == family.error == family.seen_error


def test_large_runs_change_nothing_that_is_learnt() -> None:
    """A large run that took twice as long is off by half, and the other stays as it was."""
    every = runs(BASE, SMALL + LARGE)
    odd = replace(every[-1], iter_time_s=2 * (every[-1].iter_time_s or 0.0))
    family, _ = scale_up_scores([*every[:-1], odd], BASE)
    assert family.errors == pytest.approx((0.0, -0.5), abs=0.01)


def test_families_without_both_sizes_are_not_scored() -> None:
    assert scale_up_scores(runs(BASE, SMALL), BASE) == []
    assert scale_up_scores(runs(BASE, SMALL[:2] + LARGE), BASE) == []


def test_another_model_is_told_apart() -> None:
    """Of one model alone, what it takes longer may be that model's."""
    slow = elsewhere(matmul=1.3, memory=1.3, attention=1.3, optimizer=1.3)
    family, _ = scale_up_scores([*runs(slow, SMALL), *runs(slow, LARGE, "another")], BASE)
    assert family.seen == (False, False)
    assert family.seen_error is None
    assert family.errors == family.before
    several = [*runs(slow, SMALL), *runs(slow, SMALL[:2], "a third"), *runs(slow, LARGE, "another")]
    family, _ = scale_up_scores(several, BASE)
    assert family.error < 0.3 * family.prior_error


def test_command_of_large_runs(tmp_path: Path) -> None:
    path = written(runs(BASE, SMALL + LARGE), tmp_path / "runs.jsonl")
    done = CliRunner().invoke(app, ["validate", str(path), "--scale-up"])
    assert done.exit_code == 0, done.output
    assert "mean over families" in done.output
    data = json.loads(CliRunner().invoke(app, ["validate", str(path), "--scale-up", "--json"]).output)
    assert [one["name"] for one in data["scores"]] == ["made-up", "all"]
    none = CliRunner().invoke(app, ["validate", str(written(runs(BASE, SMALL), path)), "--scale-up"])
    assert none.exit_code == 1
