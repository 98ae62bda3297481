"""A test that wants to be alone is, and need not wait for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from tests.turns import turn

MOMENT = 0.2


class Visitor:
    """Takes a turn in a thread of its own, and keeps it until it is told to leave."""

    def __init__(self, threads: ThreadPoolExecutor, folder: Path, alone: bool) -> None:
        self.inside, self.leave = Event(), Event()
        self.done = threads.submit(self._run, folder, alone)

    def _run(self, folder: Path, alone: bool) -> None:
        with turn(alone, folder / "gate", folder / "room"):
            self.inside.set()
            assert self.leave.wait(10)

    def end(self) -> None:
        assert self.inside.wait(10)
        self.leave.set()
        self.done.result(10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("gate", "room"):
        (tmp_path / name).touch()
    return tmp_path


def test_ordinary_tests_run_together(folder: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        both = [Visitor(threads, folder, alone=False) for _ in range(2)]
        assert all(one.inside.wait(10) for one in both)
        for one in both:
            one.end()


def test_one_alone_waits_for_others_and_goes_before_later_ones(folder: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        first = Visitor(threads, folder, alone=False)
        assert first.inside.wait(10)
        alone = Visitor(threads, folder, alone=True)
        assert not alone.inside.wait(MOMENT)
        later = Visitor(threads, folder, alone=False)
        assert not later.inside.wait(MOMENT)
        first.end()
        assert alone.inside.wait(10)
        assert not later.inside.wait(MOMENT)
        alone.end()
        later.end()


def test_a_failing_test_gives_its_turn_back(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), turn(True, folder / "gate", folder / "room"):
        raise ZeroDivisionError
    with turn(True, folder / "gate", folder / "room"):
        pass
