"""``scripts/test --torch``: which environment and tests a version means; nothing is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("version", "status"), [("2.12.1", 0), ("2.12", 2), ("$(x)", 2), ("", 2)])
def test_a_version_of_torch_has_an_environment_of_its_own(tmp_path: Path, version: str, status: int) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/test", tmp_path / "scripts/test")
    fakes = {"scripts/environment": "echo $TORCH $VENV", f".venv-{version}/bin/python": "echo $@"}
    for name, text in fakes.items() if not status else ():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    ran = subprocess.run([tmp_path / "scripts/test", "--torch", version, "-x"], capture_output=True, text=True)
    assert ran.returncode == status
    assert status or ran.stdout == "2.12.1 .venv-2.12.1\n-m pytest tests/runtime -x\n"
