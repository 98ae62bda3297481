"""The study of host time runs, and names what it measured."""

from __future__ import annotations

import pytest

from studies import sharded_host_time


def test_each_function_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sharded_host_time, "ROUNDS", 1)
    monkeypatch.setattr(sharded_host_time, "CALLS", 1)
    sharded_host_time.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert all("us plain" in line and "us on shards" in line for line in lines)
