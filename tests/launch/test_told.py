"""What ranks say last, and how it is gathered."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from galvatron_lite.errors import GalvatronError, InputError, PeerError
from galvatron_lite.launch.error_reports import FOLDER_VARIABLE, last_words, listen

PEER = PeerError("Rank 0 waited in vain.", ranks=(1,), operation="forward")
WRONG = InputError("mem", "lots", "Give 40GB.")


def end(rank: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rank ends by an error that nothing catches."""
    monkeypatch.setenv("RANK", str(rank))
    sys.excepthook(type(error), error, None)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ({}, ""),
        ({0: ValueError("the user's")}, ""),
        ({0: PEER, 1: WRONG}, f"Rank 1: InputError: {WRONG}"),
        ({0: PEER}, f"Rank 0: PeerError: {PEER}"),
        (dict.fromkeys(range(3), WRONG), f"Rank 0, 1, 2: InputError: {WRONG}"),
        (dict.fromkeys(range(12), WRONG), f"Rank 0, 1, 2, 3 and 8 others: InputError: {WRONG}"),
    ],
)
def test_each_thing_is_said_once_and_waiting_only_where_nothing_else_is(
    ends: dict[int, Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    listen()
    listen()
    for rank, error in ends.items():
        end(rank, error, monkeypatch)
    assert shown == list(ends.values())
    assert last_words(tmp_path) == said


def test_nothing_is_kept_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.excepthook
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    listen()
    assert sys.excepthook is before
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: None)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "of another machine"))
    listen()
    end(0, GalvatronError("x"), monkeypatch)
    assert list(tmp_path.iterdir()) == []
