"""What becomes of a command whose reader leaves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PLAN = ["plan", "--model", "gpt2", "--cluster", "a100-40gb", "--gpus", "2"]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], PLAN, [*PLAN, "--json"]])
def test_a_closed_pipe_ends_quietly(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "galvatron_lite", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        started.stdout.close()
        said = started.stderr.read().decode()
        assert (started.wait(), said) == (141, "")


def test_an_error_keeps_its_status_where_the_pipe_is_open() -> None:
    command = [sys.executable, "-m", "galvatron_lite", *PLAN, "--mem", "40"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("galvatron: --mem")


def test_any_encoding_is_written_to() -> None:
    command = [sys.executable, "-m", "galvatron_lite", *PLAN]
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=plain)
    assert (done.returncode, done.stderr) == (0, "")
    assert "stage" in done.stdout
