from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from galvatron_lite import api
from galvatron_lite.calibration import store
from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.cli.plan_output import print_plan
from galvatron_lite.files import from_data
from galvatron_lite.plans.io import check_plan, read_plan
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import OriginKind
from galvatron_lite.profiler.store import last_profile, save_profile
from galvatron_lite.units import parse_bytes
from tests.cli.conftest import Galvatron

SMALL = ["--model", "gpt2", "--cluster", "a100-40gb", "--gpus", "2", "--batch", "16"]


def test_a_plan_is_printed_and_written(galvatron: Galvatron, tmp_path: Path) -> None:
    target = tmp_path / "plan.yaml"
    options = ["--model", "llama2-7b", "--cluster", "a100-80gb", "--gpus", "8", "--mem", "80GB", "--batch", "32"]
    out = galvatron("plan", *options, "-o", target).out
    assert len(out.splitlines()) <= 16
    for word in ("\nmemory ", "\nstep ", "bound by", "samples/s", "MFU", "runner-up", "estimated", str(target)):
        assert word in out
    plan = read_plan(target)
    assert plan.devices == 8
    assert plan.prediction.peak_memory <= 80 * 10**9
    assert 0.2 < plan.prediction.mfu < 0.75


def test_json_is_the_plan(galvatron: Galvatron) -> None:
    plan = check_plan(from_data(Plan, json.loads(galvatron("plan", *SMALL, "--mem", "40GB", "--json").out), "stdout"))
    assert plan.prediction.time.total == pytest.approx(plan.prediction.step_seconds)
    assert max(stage.memory.total for stage in plan.stages) == plan.prediction.peak_memory


def test_one_fix_takes_several_choices(galvatron: Galvatron, tmp_path: Path) -> None:
    apart = galvatron("plan", *SMALL, "--fix", "tp=2", "--fix", "recompute=full", "--mem", "40GB", "--json").out
    assert json.loads(apart)["stages"][0]["runs"][0]["strategy"]["tensor"] == 2
    assert galvatron("plan", *SMALL, "--fix", "tp=2", "recompute=full", "--mem", "40GB", "--json").out == apart
    (script := tmp_path / "train.py").touch()
    launched = galvatron("launch", "--dry-run", "--no-check", "--gpus", "2", script, "--fix", "a=1", "b=2").out
    assert "train.py --fix a=1 b=2" in launched


def test_a_model_can_be_given_by_its_shape(galvatron: Galvatron) -> None:
    shape = ["--layers", "2", "--hidden", "512", "--heads", "8", "--vocab", "1000", "--seq", "128", "--gated"]
    said = galvatron("plan", *shape, "--cluster", "v100", "--gpus", "2", "--mem", "80%", "-v").out
    assert "From the shape given: estimated" in said
    assert "made here" not in said
    assert "fp16, precision chosen automatically" in said
    refused = galvatron("plan", *shape, "--cluster", "v100", "--gpus", "4", "--precision", "bf16").err
    assert "Precisions of V100-SXM2-32GB: fp32, fp16." in refused


def test_a_saved_profile_is_planned_without_torch(tmp_path: Path) -> None:
    def galvatron(*arguments: str) -> str:
        code = f"import sys\nsys.argv = {['galvatron', *arguments]!r}\nfrom galvatron_lite.cli import main\n"
        code += "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        code += "assert 'torch' not in sys.modules, 'torch was imported'"
        return subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    galvatron("profile", "gpt2", "--estimate", "--cluster", "a100-40gb", "--gpus", "8")
    said = galvatron("plan", "--mem", "40GB")
    assert "the last profile made here" in said
    assert "gpt2" in said


@pytest.mark.parametrize(("cluster", "best"), [("a100-40gb", "bf16"), ("v100", "fp16")])
def test_without_a_precision_the_best_of_the_devices_is_taken(galvatron: Galvatron, cluster: str, best: str) -> None:
    options = ["plan", "--model", "gpt2", "--cluster", cluster, "--gpus", "2", "--batch", "16"]
    said = galvatron(*options, "-v").out
    assert f"{best}, precision chosen automatically (--precision overrides it)" in said
    asked = galvatron(*options, "--precision", best, "-v").out
    assert "precision chosen automatically" not in asked
    assert said.splitlines()[2:] == asked.splitlines()[2:]


def accuracy(galvatron: Galvatron, *options: str) -> list[str]:
    """The lines that say how far off the costs are."""
    return [line for line in galvatron("plan", *options).out.splitlines() if "off by" in line or "is unknown" in line]


def test_estimates_say_how_far_off_they_are(
    galvatron: Galvatron, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scores = json.loads((Path(__file__).parents[2] / "profiles" / "published" / "scores.json").read_text())
    error = scores["macro"]["grade A"]["without family"]
    (said,) = accuracy(galvatron, *SMALL)
    assert f"estimated step times of language models are off by {error:.0f}% on average" in said

    shipped = load_calibration()
    monkeypatch.setattr(store, "load_calibration", lambda path=None: replace(shipped, expected_error={}))
    (said,) = accuracy(galvatron, *SMALL)
    assert said.strip().endswith("the error of estimated step times is unknown for language models")

    measured = api.find_profile(model="gpt2", cluster="a100-40gb", gpus=2)
    measured = replace(measured, origin=replace(measured.origin, kind=OriginKind.MEASURED))
    save_profile(measured, tmp_path, "here")
    assert accuracy(galvatron, "--profile", str(last_profile(tmp_path))) == []


def test_a_budget_too_small_names_the_smallest_that_fits(galvatron: Galvatron) -> None:
    question = ["plan", "--layers", "2", "--hidden", "512", "--heads", "8", "--vocab", "1000", "--seq", "128",
                "--cluster", "a100-40gb", "--gpus", "1", "--batch", "8"]  # fmt: skip
    error = galvatron(*question, "--mem", "100MB").err
    assert error.startswith("galvatron: --mem 95.36MiB: no plan of flags fits on 1 device; ")
    assert len(error) < 2 * 100
    smallest = parse_bytes(re.search(r"the smallest budget is (\S+B)[ .]", error)[1])  # type: ignore[index]
    assert galvatron(*question, "--mem", f"{smallest}B").status == 0
    assert galvatron(*question, "--mem", f"{round(0.98 * smallest)}B").status == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "gpt22", *SMALL[2:]], "gpt2"),
        ([*SMALL, "--image", "224"], "no pictures"),
        (["--model", "resnet50", *SMALL[2:], "--image", "512x1024"], "square pictures: give 512, or trace your own"),
        (["--model", "convnext-t", *SMALL[2:], "--image", "wide"], "512x1024"),
        ([*SMALL[2:], "--image", "224"], "Name the model"),
        (["--model", "gpt2", "--cluster", "a100", "--gpus", "8"], "a100-40gb"),
        (["--model", "gpt2"], "--cluster"),
        ([*SMALL, "--mem", "40"], "40GiB"),
        ([*SMALL, "--mem", "40 parsecs"], "40GiB"),
        ([*SMALL, "--batch", "0"], "batch"),
        (["--profile", "none.yaml"], "no such file"),
        (["--layers", "4", "--hidden", "64", *SMALL[2:]], "--heads, --vocab, --seq is missing"),
        (["--layers", "4", *SMALL], "not both"),
        ([*SMALL, "--mem", "200GB"], "A100-SXM4-40GB has 39.37GiB"),
        ([*SMALL, "--precision", "fp8"], "--precision: 'fp8' cannot be used. Precisions of A100-SXM4-40GB: fp32, tf32"),
        ([*SMALL, "--precision", "int4"], "Precisions of A100-SXM4-40GB"),
        ([*SMALL, "--mem", "40GB", "-o", "/dev/null/plan.yaml"], "/dev/null"),
        (["--model", "gpt2", "--profile", "none.yaml", *SMALL[2:]], "not both"),
        (["--layers", "4", "--hidden", "100", "--heads", "7", "--vocab", "90", "--seq", "64", *SMALL[2:]], "heads"),
    ],
)
def test_bad_input_is_named_in_one_line(galvatron: Galvatron, options: list[str], said: str) -> None:
    ended = galvatron("plan", *options)
    assert ended.status == 1
    assert ended.err.startswith("galvatron: ")
    assert said in ended.err


def test_pictures_of_a_size(galvatron: Galvatron) -> None:
    """Twice the width is twice the work: the step takes longer, as far as the device is busy."""
    common = ["--cluster", "a100-40gb", "--gpus", "1", "--batch", "32", "--json"]
    seconds = []
    for image in ("256x256", "256x512"):
        plan = json.loads(galvatron("plan", "--model", "convnext-t", "--image", image, *common).out)
        seconds.append(plan["prediction"]["step_seconds"])
    assert 1.7 < seconds[1] / seconds[0] < 2.2


def test_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    found = api.plan(model="gpt2", cluster="a100-40gb", gpus=1, batch=8, runners_up=0)
    assert found.provenance is not None
    provenance = replace(found.provenance, notes=("its states are [batch, tokens]",))
    runs = tuple(replace(run, first="[bold]", last="[red]") for run in found.stages[0].runs)
    odd = replace(found, stages=(replace(found.stages[0], runs=runs),), left_out=("[a] is",), provenance=provenance)
    print_plan(odd, "[file]", verbose=True)
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("are [batch, tokens].", "[a] is", "From [file].", "[bold] … [red]"))
