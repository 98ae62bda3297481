"""The built wheel, used outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the installed wheel; dependencies come from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)], check=True)
    wheel = next(folder.glob("galvatron_lite-*.whl"))
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)], check=True
    )
    return folder / "site"


def _run(installed: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=installed, env=environment, check=True, capture_output=True, text=True).stdout


def test_the_wheel_is_what_is_imported(installed: Path) -> None:
    where = _run(installed, "-c", "import galvatron_lite; print(galvatron_lite.__file__)")
    assert Path(where.strip()).is_relative_to(installed)


def test_it_plans_a_named_model_on_a_named_cluster(installed: Path) -> None:
    options = ["--model", "gpt2", "--cluster", "a100-40gb", "--gpus", "8", "--mem", "40GB", "--batch", "64"]
    out = _run(installed, "-m", "galvatron_lite", "plan", *options, "-o", "plan.yaml")
    assert "samples/s" in out
    assert (installed / "plan.yaml").is_file()


def test_it_carries_its_licence_and_type_marker(installed: Path) -> None:
    assert (installed / "galvatron_lite" / "py.typed").is_file()
    assert list(installed.glob("galvatron_lite-*.dist-info/licenses/LICENSE"))
