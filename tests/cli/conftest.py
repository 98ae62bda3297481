"""The command line in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from galvatron_lite.cli import main


class Ended(NamedTuple):
    status: int
    out: str
    err: str


Galvatron = Callable[..., Ended]


@pytest.fixture
def galvatron(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Galvatron:
    """Runs a command: its exit status, and what it printed."""

    def run(*words: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["galvatron", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run
