"""Fixtures of every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# before anything imports torch: many small processes share few cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """The session's worker processes; see ``tests/pool.py``."""
    workers = WorkerPool()
    yield workers
    workers.close()
