"""The built wheel, used outside the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
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
    _run(installed, "-m", "galvatron_lite", "report", "plan.yaml", "--search", "0")
    assert "</html>" in (installed / "report.html").read_text(encoding="utf-8")


def test_its_version_is_everywhere_the_same(installed: Path) -> None:
    code = "import galvatron_lite as g, importlib.metadata as m; print(m.version(g.__name__), g.__version__)"
    built, imported = _run(installed, "-c", code).split()
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert built == imported
    assert cited == [built]
    assert f"\n## {built}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_it_carries_its_licence_and_type_marker(installed: Path) -> None:
    assert (installed / "galvatron_lite" / "py.typed").is_file()
    assert list(installed.glob("galvatron_lite-*.dist-info/licenses/LICENSE"))


def test_it_carries_the_calibrated_constants(installed: Path) -> None:
    code = (
        "from galvatron_lite.calibration.store import load_calibration\n"
        "from galvatron_lite.folders import config_folder\n"
        "calibration = load_calibration()\n"
        "print(config_folder('calibration'))\n"
        "print(sorted(calibration.devices), sorted(calibration.links), sorted(calibration.stacks))"
    )
    where, entries = _run(installed, "-c", code).splitlines()
    assert Path(where).is_relative_to(installed)
    source = json.loads((ROOT / "configs" / "calibration" / "stacks.json").read_text(encoding="utf-8"))
    own = [name for name, entry in source["entries"].items() if "constants" in entry]
    assert all(f"'{name}'" in entries for name in own)
    assert "'A100'" in entries
    assert "'nvlink3'" in entries


def test_it_validates_published_runs(installed: Path) -> None:
    assert "Usage" in _run(installed, "-m", "galvatron_lite", "validate", "--help")
    runs = (ROOT / "profiles" / "published" / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    (installed / "few.jsonl").write_text("\n".join(runs[::400]) + "\n", encoding="utf-8")
    data = json.loads(_run(installed, "-m", "galvatron_lite", "validate", "few.jsonl", "--json"))
    assert data["macro"]["rows"] == len(runs[::400])
    assert data["macro"]["scored"] > 0


def test_the_source_distribution_carries_the_constants(tmp_path: Path) -> None:
    """A wheel built from it has all that the checkout's has."""
    code = f"import hatchling.build; print(hatchling.build.build_sdist({str(tmp_path)!r}))"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tarfile.open(tmp_path / made.split()[-1]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    folder = ROOT / "configs" / "calibration"
    wanted = {str(path.relative_to(ROOT)) for path in folder.rglob("*.json")}
    assert len(wanted) >= 3
    assert wanted | {"pyproject.toml", "README.md", "LICENSE"} <= inside
