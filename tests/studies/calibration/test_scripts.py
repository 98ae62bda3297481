"""scripts/calibrate on a few published runs, and how it forms the folds."""

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.validate.rows import PublishedRun, read_runs

pytestmark = pytest.mark.study

ROOT = Path(__file__).parents[3]
RUNS = ROOT / "profiles" / "published" / "runs.jsonl"
FAMILIES = ("torchtitan-a100", "dlperf-gpt")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from studies.calibration import rows as calibrate_rows

    return calibrate_rows


def _run(family: str, model: str) -> PublishedRun:
    return PublishedRun(family=family, run_id=model, framework="f", model=model)


def test_a_model_is_known_by_its_name_however_spelled_or_cut(rows: ModuleType) -> None:
    names = ["Llama3-405B", "llama3-405b-L21", "llama3 405b"]
    assert {rows.model_of(_run("f", name)) for name in names} == {"llama3405b"}
    assert rows.model_of(_run("f", "gpt-12L-1024h")) != rows.model_of(_run("f", "gpt-16L-1024h"))


def test_every_model_is_left_out_once_and_apart_from_its_family(rows: ModuleType) -> None:
    runs = [run for run in read_runs(RUNS) if run.seq_len is not None and run.quality in ("A", "B")]
    folds = rows.model_folds(runs, 12)
    assert 1 < len(folds) <= 12
    assert sorted(model for fold in folds for model in fold) == sorted({rows.model_of(run) for run in runs})
    together = {
        (family, number)
        for number, fold in enumerate(folds)
        for family in {run.family for run in runs}
        if len({rows.model_of(run) for run in runs if run.family == family} & set(fold)) > 1
    }
    assert not together


def test_rows_are_spread_over_large_families(rows: ModuleType) -> None:
    chosen = rows.spread(["large"] * 400 + ["small"] * 5, 25)
    assert len([row for row in chosen if row < 400]) == 100  # the root of 400 times 25
    assert chosen[-5:] == [400, 401, 402, 403, 404]
    assert max(b - a for a, b in pairwise(chosen)) == 4


def test_a_small_calibration_from_priors_to_files(tmp_path: Path) -> None:
    sample = tmp_path / "runs.jsonl"
    lines = [line for line in RUNS.read_text().splitlines() if json.loads(line)["family"] in FAMILIES]
    sample.write_text("\n".join(lines[::3]) + "\n")
    scores, made = tmp_path / "scores.json", tmp_path / "made"
    made.mkdir()
    command = [
        sys.executable, "scripts/calibrate.py", "--rows", str(sample), "--most", "4", "--steps", "2",
        "--processes", "1", "--cross-validate", "--json", str(scores), "--output", str(made),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found = json.loads(scores.read_text())
    assert set(found["families"]) == set(FAMILIES)
    for family in found["families"].values():
        assert family["in sample"]["time_mape"] < 25
        assert {"without model", "without family"} <= set(family)
    fitted, shipped = load_calibration(made), load_calibration()
    assert set(fitted.stacks) == set(shipped.stacks)
    assert fitted.stacks["galvatron"].matmul == fitted.stacks["default"].matmul  # no row ran it
    assert fitted.devices["A100"].convolution == shipped.devices["A100"].convolution
    assert fitted.origins["devices/A100"].rows > 0
    assert "priors" not in fitted.stacks
    left_out = found["macro"]["grade A"]
    assert fitted.expected_error == {
        "without_model": pytest.approx(left_out["without model"] / 100, abs=1e-4),
        "without_family": pytest.approx(left_out["without family"] / 100, abs=1e-4),
    }


def test_the_shipped_constants_tell_the_error_of_the_shipped_scores() -> None:
    macro = json.loads((RUNS.parent / "scores.json").read_text())["macro"]["grade A"]
    told = load_calibration().expected_error
    assert told["without_model"] == pytest.approx(macro["without model"] / 100, abs=1e-4)
    assert told["without_family"] == pytest.approx(macro["without family"] / 100, abs=1e-4)


def calibrate(*options: str) -> subprocess.CompletedProcess[str]:
    """The script with these options, wherever they lead."""
    return subprocess.run(
        [sys.executable, "scripts/calibrate.py", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )


UNSCORED = '{"family": "f", "run_id": "r", "framework": "x", "quality": "A", "seq_len": 512}\n'


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("", (), "no language model's run"),
        (UNSCORED, (), "None has a time that can be scored"),
        (UNSCORED, ("--families", "nosuch"), "'nosuch' cannot be used. Families of"),
        (UNSCORED, ("--without", "nosuch"), ": f."),
        (UNSCORED, ("--keep", "stacks/nosuch"), "stacks/default"),
        (UNSCORED, ("--output", "/nonexistent"), "There is no such folder"),
        (UNSCORED, ("--json", "/nonexistent/scores.json"), "There is no such folder"),
        (UNSCORED, ("--priors", "/nonexistent"), "There is no such file"),
        (None, (), "There is no such file"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_in_one_line(
    tmp_path: Path, text: str | None, options: tuple[str, ...], said: str
) -> None:
    sample = tmp_path / "runs.jsonl"
    if text is not None:
        sample.write_text(text)
    done = calibrate("--rows", str(sample), *options)
    assert done.returncode == 1
    assert done.stderr.startswith("calibrate: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_every_option_has_its_text_and_its_default() -> None:
    text = calibrate("--help").stdout
    options = re.findall(r"^  (--[a-z-]+)(.*?)(?=^  --|\Z)", text.partition("options:")[2], re.MULTILINE | re.DOTALL)
    assert len(options) == 13
    for option, said in options:
        assert "default:" in " ".join(said.split()), option


@pytest.mark.parametrize("option", ["--steps", "--most", "--processes"])
def test_counts_are_whole_and_positive(option: str) -> None:
    for given in ("0", "-1", "two"):
        done = calibrate(f"{option}={given}")
        assert done.returncode == 2
        assert "Give a whole number" in done.stderr
