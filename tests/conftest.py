"""Fixtures of every test, and how tests share the machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

# before anything imports torch: many small processes share few cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.pool import WorkerPool
from tests.turns import turn

LONGEST = (
    "equivalence/test_plans.py",
    "search/test_exact.py",
    "test_auto.py",
    "docs/test_scores.py",
    "equivalence/test_picture_memory.py",
    "equivalence/test_meta.py",
)
"""Files that take longest: begun first, so that no process is left with one of them when the others have ended."""


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """The session's worker processes; see ``tests/pool.py``."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def no_world_left() -> Iterator[None]:
    """Measuring joins a world of one process; the next test, whichever it is, begins without one."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    folder = Path(__file__).parent
    rank = {folder / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(LONGEST)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Where several processes run tests, one marked ``alone`` waits for the others' to end, and they for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)
