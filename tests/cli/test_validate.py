"""The command on a few published rows, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from galvatron_lite.cli.validate import _chosen, _grouping
from galvatron_lite.errors import InputError
from galvatron_lite.validate.rows import read_runs

RUNS = Path(__file__).parents[2] / "profiles" / "published" / "runs.jsonl"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "few.jsonl"
    path.write_text("\n".join(RUNS.read_text().splitlines()[::60]) + "\n")
    return path


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "galvatron_lite", "validate", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_json_and_plot(few: Path, tmp_path: Path) -> None:
    done = command(str(few), "--json", "--plot", str(tmp_path / "out.svg"))
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    rows = sum(family["rows"] for family in data["families"].values())
    assert rows == len(few.read_text().splitlines())
    assert all(f["rows"] == f["scored"] + sum(f["skipped"].values()) + f["oom"] for f in data["families"].values())
    assert data["macro"]["time_mape"] > 0
    assert (tmp_path / "out.svg").read_text().startswith("<svg")


def test_table_and_worst(few: Path) -> None:
    done = command(str(few), "--worst", "2", "--family", "vtrain-single", "--family", "dgxc")
    assert done.returncode == 0, done.stderr
    assert "macro language" in done.stdout
    assert done.stdout.count(" s, measured ") == 2
    assert "llmfoundry" not in done.stdout


def test_mistakes_are_named() -> None:
    runs = read_runs(RUNS)
    with pytest.raises(InputError, match="--family"):
        _chosen(runs, ["nobody"], None)
    with pytest.raises(InputError, match="--quality"):
        _chosen(runs, [], "D")
    with pytest.raises(InputError, match="--by"):
        _grouping("colour")
    assert {run.quality for run in _chosen(runs, [], "A")} == {"A", "A-mem"}


def test_a_file_that_is_not_there() -> None:
    done = command("nowhere.jsonl")
    assert done.returncode == 1
    assert "There is no such file" in done.stderr
