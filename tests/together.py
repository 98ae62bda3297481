"""Cases of one job that the same processes run one after another: what a process does first, it does once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import pytest

from tests.pool import JobError, WorkerPool

MOST = 16
"""Cases that the same processes run."""


class Together:
    """What a job returns for each of several cases, by case then rank. When one is asked for, those of its world beside
    it are run too; where that fails, each case is run by itself, so that only those that are wrong fail.

    Args:
        pool: runs them.
        job: called with ``case=``, on every rank.
        cases: by name.
        world: how many ranks a case takes.
    """

    def __init__(
        self, pool: WorkerPool, job: Callable[..., Any], cases: Mapping[Any, Any], world: Callable[[Any], int]
    ) -> None:
        self._pool, self._job, self._cases, self._world = pool, job, cases, world
        self._found: dict[Hashable, list[Any]] = {}
        self._alone: set[Hashable] = set()

    def __getitem__(self, name: Hashable) -> list[Any]:
        if name not in self._found and name not in self._alone:
            self._run(self._beside(name))
        if name not in self._found:
            case = self._cases[name]
            self._found[name] = self._pool.run(self._world(case), self._job, case=case)
        return self._found[name]

    def _beside(self, name: Hashable) -> list[Hashable]:
        world = self._world(self._cases[name])
        alike = [other for other, case in self._cases.items() if self._world(case) == world]
        start = alike.index(name) // MOST * MOST
        return alike[start : start + MOST]

    def _run(self, names: list[Hashable]) -> None:
        cases = [self._cases[name] for name in names]
        try:
            ranks = self._pool.run(self._world(cases[0]), one_by_one, timeout=400.0, job=self._job, cases=cases)
        except JobError:
            self._alone |= set(names)
            return
        self._found |= {name: [rank[place] for rank in ranks] for place, name in enumerate(names)}


def together(
    job: Callable[..., Any], cases: Mapping[Any, Any], world: Callable[[Any], int] = lambda case: case.world
) -> Any:
    """A module's fixture of what a job returns for each of some cases, by case then rank."""

    @pytest.fixture(scope="module")
    def runs(pool: WorkerPool) -> Together:
        return Together(pool, job, cases, world)

    return runs


def one_by_one(job: Callable[..., Any], cases: list[Any]) -> list[Any]:
    """The job's result for each case; run on every rank."""
    return [job(case=case) for case in cases]
