"""``scripts/oracle_accuracy``: means by strategy over ParaDL's rows and published runs."""

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..docs.pages import ROOT

RUN = {
    "family": "torchgpipe", "run_id": "mine", "framework": "torchgpipe", "model": "resnet50", "arch": "cnn",
    "gpu": "V100-SXM2-16GB", "gpus_per_node": 4, "n_gpus": 2, "dp": 1, "pp": 2, "pp_schedule": "gpipe",
    "micro_batch": 8, "global_batch": 64, "precision": "fp32", "optimizer": "sgd", "iter_time_s": 0.2, "quality": "A",
}  # fmt: skip


def test_means_and_rows(tmp_path: Path) -> None:
    other = RUN | {"family": "elsewhere", "run_id": "not shown"}
    runs = tmp_path / "runs.jsonl"
    runs.write_text("\n".join(json.dumps(run) for run in (RUN, other)) + "\n")
    command = [sys.executable, "scripts/oracle_accuracy.py", "--runs", str(runs), "--rows", "--bounds"]
    told = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    ).stdout
    assert "pipeline, torchgpipe" in told
    assert "data+spatial, report" in told
    assert "97.6 %" in told
    assert "torchgpipe: mine: resnet50, 2 GPUs, fp32" in told
    assert "not shown" not in told
    # What any constants can reach is no less than what ours do, and ParaDL's two networks keep it far from all.
    bounds = re.findall(r"^\| (.+) \| \d+ \| ([\d.]+) % \| ([\d.]+) % \| one set", told, re.MULTILINE)
    assert {name: float(most) < 80 for name, _, most in bounds}["data+spatial, logs"]
    assert all(float(reached) <= float(most) for _, reached, most in bounds)


def test_no_order_of_devices_beats_the_isotonic_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = importlib.import_module("oracle_accuracy")
    measured = [1.0, 0.5, 2.0, 1.6]
    group = [script.Scored("", "data", "", None, measured=each, devices=2**n) for n, each in enumerate(measured)]

    def lost(values: tuple[float, ...]) -> float:
        return sum(abs(value - each) / each for value, each in zip(values, measured, strict=True))

    grid = [step / 20 for step in range(8, 45)]
    best = min(map(lost, itertools.combinations_with_replacement(grid, 4)))
    assert sum(1 - each for each in script.ordered_bound(group)) == pytest.approx(best)
