"""Constants learnt from runs that other constants made, which are thus known."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from galvatron_lite.api import find_profile, plan
from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.calibration.store import chosen_calibration, load_calibration, write_calibration
from galvatron_lite.cli import app
from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import write_value
from galvatron_lite.runs.schema import PROFILE, RunHeader, StepRecord
from galvatron_lite.validate.calibrate import CalibrationResult, calibrate, read_observations
from galvatron_lite.validate.predict import Predictor
from galvatron_lite.validate.results import Predicted
from galvatron_lite.validate.rows import PublishedRun
from tests.runs.lines import write
from tests.validate.runs import gpt

BASE = load_calibration()
SETTINGS = [
    {"run_id": f"{tp}-{pp}-{hidden}", "tp": tp, "pp": pp, "dp": 8 // (tp * pp), "hidden": hidden,
     "ffn_hidden": 4 * hidden, "grad_accum": None, "global_batch": 32, "framework": "nanotron"}
    for tp, pp, hidden in ((1, 1, 2048), (2, 2, 1024), (4, 1, 2048), (1, 1, 1024), (8, 1, 4096), (2, 1, 2048))
]  # fmt: skip


def elsewhere(**factors: float) -> Calibration:
    """Constants of software whose classes of kernels take so many times as long."""
    known = BASE.stacks["nanotron"]
    changed = {name: getattr(known, name) * factor for name, factor in factors.items()}
    return replace(BASE, stacks={**BASE.stacks, "nanotron": replace(known, **changed)})


def made_by(calibration: Calibration, settings: Sequence[dict[str, object]] = SETTINGS) -> list[PublishedRun]:
    runs, predictor = [], Predictor(calibration)
    for setting in settings:
        outcome = predictor.predict(gpt(**setting))
        assert isinstance(outcome, Predicted), outcome
        runs.append(gpt(**setting, iter_time_s=outcome.step_seconds))
    return runs


def written(runs: Sequence[PublishedRun], path: Path) -> Path:
    path.write_text("\n".join(json.dumps(asdict(run)) for run in runs) + "\n")
    return path


def learnt(runs: Sequence[PublishedRun], folder: Path) -> CalibrationResult:
    found, skipped = read_observations([written(runs, folder / "runs.jsonl")], BASE)
    return calibrate(found, BASE, skipped=skipped)


def error(calibration: Calibration, runs: Sequence[PublishedRun]) -> float:
    predictor = Predictor(calibration)
    return fmean(abs((predictor.judge(run).time or 0.0) - 1) for run in runs)


def test_slow_kernels_are_learnt_and_runs_that_were_not_seen_gain(tmp_path: Path) -> None:
    truth = elsewhere(matmul=0.85, memory=2.0)
    runs = made_by(truth)
    found = learnt(runs[:5], tmp_path)
    assert found.kind == "constants"
    assert found.left_out["constants"] < 0.5 * found.left_out["unchanged"]
    assert error(found.calibration, runs[5:]) < 0.5 * error(BASE, runs[5:])
    assert all(one.low < one.value < one.high for one in found.constants)
    assert [one.told for one in found.constants] == sorted((one.told for one in found.constants), reverse=True)
    assert "stacks/nanotron/matmul" in {one.name for one in found.constants}
    assert found.calibration.origins["stacks/nanotron"].rows == 5


def test_runs_as_predicted_leave_the_constants(tmp_path: Path) -> None:
    found = learnt(made_by(BASE), tmp_path)
    assert found.kind == "unchanged"
    assert found.calibration == BASE
    assert not found.constants


def test_noise_does_not_make_runs_that_were_not_seen_worse(tmp_path: Path) -> None:
    runs = [
        replace(run, iter_time_s=(run.iter_time_s or 1) * factor)
        for run, factor in zip(made_by(BASE), (1.3, 0.75, 1.1, 0.8, 1.25, 0.95), strict=True)
    ]
    found = learnt(runs, tmp_path)
    assert found.left_out[found.kind] <= found.left_out["unchanged"]
    assert found.left_out["unchanged"] == pytest.approx(error(BASE, runs))


def test_leaving_out_is_what_a_fit_without_the_run_gives(tmp_path: Path) -> None:
    """The straight-line formula against fits that really begin anew."""
    runs = made_by(elsewhere(matmul=1.2, memory=1.4), SETTINGS[:4])
    found, _ = read_observations([written(runs, tmp_path / "runs.jsonl")], BASE)
    anew = []
    for place, run in enumerate(runs):
        rest = calibrate([one for number, one in enumerate(found) if number != place], BASE)
        anew.append(error(rest.calibration, [run]))
    whole = calibrate(found, BASE)
    assert whole.left_out[whole.kind] == pytest.approx(fmean(anew), abs=0.005)


def test_one_factor_and_runs_that_repeat_one_another(tmp_path: Path) -> None:
    """One factor is enough where it is the truth; runs of one setting are left out together."""
    names = ("matmul", "attention", "memory", "optimizer")
    runs = made_by(elsewhere(**dict.fromkeys(names, 1.3)), SETTINGS[:3])
    found = learnt([*runs, *(replace(run, run_id="again") for run in runs)], tmp_path)
    assert (found.runs, found.settings, found.models) == (6, 3, {"gpt"})
    assert found.left_out["common factor"] < 0.4 * found.left_out["unchanged"]


def test_too_few_and_what_is_not_priced(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="3 settings"):
        learnt(made_by(BASE, SETTINGS[:2]), tmp_path)
    odd = [*made_by(BASE, SETTINGS[:3]), gpt(gpu="unknown"), gpt(iter_time_s=None)]
    found = learnt(odd, tmp_path)
    assert sum(found.skipped.values()) == 2
    assert "GPU not stated" in found.skipped


def test_logs_of_runs_are_runs(tmp_path: Path) -> None:
    """Plans of one model, whose steps took twice as long as is predicted."""
    folders = []
    for batch in (8, 16, 32):
        profile = find_profile(model="gpt2", cluster="a100-40gb", gpus=4, sequence=512)
        priced = plan(profile, batch=batch, tolerance=0)
        seconds = 2 * priced.prediction.step_seconds
        steps = [StepRecord(number, 1000.0 + number, seconds, samples=batch) for number in range(4)]
        folder = tmp_path / str(batch)
        write(folder, "steps-00001.jsonl", [RunHeader(1, priced, "abc", 1000.0), *steps])
        write_value(folder / PROFILE, profile)
        folders.append(folder)
    found, _ = read_observations(folders, BASE)
    made = calibrate(found, BASE)
    assert made.before == pytest.approx(0.5, abs=0.02)
    assert made.left_out[made.kind] < 0.4
    (folders[0] / PROFILE).unlink()
    with pytest.raises(InputError, match="profile"):
        read_observations(folders, BASE)


def test_command_and_what_plans_make_of_its_folder(tmp_path: Path) -> None:
    runs = written(made_by(elsewhere(matmul=0.85, memory=2.0)), tmp_path / "runs.jsonl")
    words = ["calibrate", str(runs), "-o", str(tmp_path / "constants")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "constants (taken)" in done.output
    data = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert data["left_out"]["constants"] < data["left_out"]["unchanged"]
    # Of another software's plans: those constants made slower by hand.
    slow = replace(BASE.stacks["galvatron"], matmul=2 * BASE.stacks["galvatron"].matmul)
    write_calibration(replace(BASE, stacks={**BASE.stacks, "galvatron": slow}), tmp_path / "slow")
    ask = ["--model", "gpt2", "--cluster", "a100-40gb", "--gpus", "4"]
    seconds = []
    for more in ([], ["--calibration", str(tmp_path / "slow")], []):
        target = tmp_path / "plan.json"
        assert CliRunner().invoke(app, ["plan", *ask, "--batch", "32", "-o", str(target), *more]).exit_code == 0
        priced = CliRunner().invoke(app, ["evaluate", str(target), *ask, "--json", *more])
        planned = json.loads(target.read_text())["prediction"]["step_seconds"]
        assert json.loads(priced.output)["prediction"]["step_seconds"] == pytest.approx(planned)
        seconds.append(planned)
    assert seconds[1] > 1.2 * seconds[0]
    assert seconds[2] == seconds[0]


def test_constants_are_chosen_for_a_block_alone(tmp_path: Path) -> None:
    write_calibration(elsewhere(matmul=3.0), tmp_path / "c")
    with chosen_calibration(tmp_path / "c") as constants:
        assert load_calibration() == constants
    assert load_calibration() == BASE
    with pytest.raises(FileFormatError), chosen_calibration(tmp_path / "none"):
        pass
