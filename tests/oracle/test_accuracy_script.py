"""``scripts/oracle_accuracy``: means by strategy over ParaDL's rows and published runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

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
    command = [sys.executable, "scripts/oracle_accuracy.py", "--runs", str(runs), "--rows"]
    told = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    ).stdout
    assert "pipeline, torchgpipe" in told
    assert "data+spatial, report" in told
    assert "97.6 %" in told
    assert "torchgpipe: mine: resnet50, 2 GPUs, fp32" in told
    assert "not shown" not in told
