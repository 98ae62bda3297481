"""Large runs predicted from small ones that other constants made."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.cli import app
from galvatron_lite.validate.rows import PublishedRun
from galvatron_lite.validate.transfer import scale_up_scores
from tests.validate.test_calibrate import BASE, elsewhere, made_by, written

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


def test_command(tmp_path: Path) -> None:
    path = written(runs(BASE, SMALL + LARGE), tmp_path / "runs.jsonl")
    done = CliRunner().invoke(app, ["validate", str(path), "--scale-up"])
    assert done.exit_code == 0, done.output
    assert "mean over families" in done.output
    data = json.loads(CliRunner().invoke(app, ["validate", str(path), "--scale-up", "--json"]).output)
    assert [one["name"] for one in data["scores"]] == ["made-up", "all"]
    none = CliRunner().invoke(app, ["validate", str(written(runs(BASE, SMALL), path)), "--scale-up"])
    assert none.exit_code == 1
