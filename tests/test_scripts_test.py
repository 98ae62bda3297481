"""``scripts/test``: the environment and tests of a version of torch, and how many processes; nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(folder: Path, fakes: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script in this folder, where each of ``fakes`` stands for a program: its path and what it runs."""
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/test", folder / "scripts/test")
    for name, text in fakes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return subprocess.run([folder / "scripts/test", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(("version", "status"), [("2.12.1", 0), ("2.12", 2), ("$(x)", 2), ("", 2)])
def test_a_version_of_torch_has_an_environment_of_its_own(tmp_path: Path, version: str, status: int) -> None:
    fakes = {"scripts/environment": "echo $TORCH $VENV", f".venv-{version}/bin/python": "echo $@"}
    ran = run(tmp_path, {} if status else fakes, "--torch", version, "-x")
    assert ran.returncode == status
    assert status or ran.stdout == "2.12.1 .venv-2.12.1\n-m pytest tests/runtime -x\n"


def test_every_core_has_a_process_and_one_waits(tmp_path: Path) -> None:
    fakes = {"scripts/environment": ":", ".venv/bin/ruff": ":", ".venv/bin/mypy": ":", ".venv/bin/python": "echo $@"}
    ran = run(tmp_path, fakes, "-x")
    assert ran.returncode == 0
    assert f"-m pytest -n {len(os.sched_getaffinity(0)) + 1} --maxprocesses 4 " in ran.stdout
