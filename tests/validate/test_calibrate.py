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
from galvatron_lite.validate.transfer import pairs_of, scale_up_scores, score_pairs
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


def test_too_few_runs_and_runs_that_cannot_be_priced(tmp_path: Path) -> None:
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


def test_the_command_writes_constants_that_plans_use(tmp_path: Path) -> None:
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


def test_runs_that_form_no_pair() -> None:
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


def test_another_batch_is_another_pair_and_reported() -> None:
    runs = [measured(), measured(gpu="V100-SXM2-32GB"), measured(gpu="V100-SXM2-32GB", global_batch=64)]
    pairs = pairs_of(runs, PRIORS)
    assert [pair.same_batch for pair in pairs] == [True, False]
    total = score_pairs(pairs)[-1]
    assert (total.name, total.pairs, total.same) == ("all", 2, 1)


def test_the_transfer_command(tmp_path: Path) -> None:
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


def test_another_model_is_scored_separately() -> None:
    """Of one model alone, what it takes longer may be that model's."""
    slow = elsewhere(matmul=1.3, memory=1.3, attention=1.3, optimizer=1.3)
    family, _ = scale_up_scores([*runs(slow, SMALL), *runs(slow, LARGE, "another")], BASE)
    assert family.seen == (False, False)
    assert family.seen_error is None
    assert family.errors == family.before
    several = [*runs(slow, SMALL), *runs(slow, SMALL[:2], "a third"), *runs(slow, LARGE, "another")]
    family, _ = scale_up_scores(several, BASE)
    assert family.error < 0.3 * family.prior_error


def test_the_scale_up_command(tmp_path: Path) -> None:
    path = written(runs(BASE, SMALL + LARGE), tmp_path / "runs.jsonl")
    done = CliRunner().invoke(app, ["validate", str(path), "--scale-up"])
    assert done.exit_code == 0, done.output
    assert "mean over families" in done.output
    data = json.loads(CliRunner().invoke(app, ["validate", str(path), "--scale-up", "--json"]).output)
    assert [one["name"] for one in data["scores"]] == ["made-up", "all"]
    none = CliRunner().invoke(app, ["validate", str(written(runs(BASE, SMALL), path)), "--scale-up"])
    assert none.exit_code == 1
