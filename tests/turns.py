"""Turns of tests that several processes run at once: a test marked ``alone`` runs while no other one does.

Two files of this folder are locked, and nothing is written: a test passes the gate and enters the room, which ordinary
tests share. A test that wants the room for itself keeps the gate meanwhile, so that no later one gets in before it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

GATE, ROOM = Path(__file__), Path(__file__).with_name("conftest.py")


@contextmanager
def turn(alone: bool, gate: Path = GATE, room: Path = ROOM) -> Iterator[None]:
    """Hold a turn; waits while others hold one that excludes this one."""
    with ExitStack() as inside:
        with ExitStack() as passing:
            passing.enter_context(_locked(gate, fcntl.LOCK_EX))
            inside.enter_context(_locked(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
            if alone:
                inside.push(passing.pop_all())
        yield


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open("rb") as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            # closing would not do where a process that the test forked still has the file
            fcntl.flock(file, fcntl.LOCK_UN)
