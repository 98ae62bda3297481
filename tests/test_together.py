"""Cases run together give what each gives by itself; a wrong one fails alone."""

from __future__ import annotations

import os

import pytest

from tests.pool import JobError, WorkerPool
from tests.together import Together


def told(case: int) -> tuple[int, int]:
    if case == 2:
        raise ValueError("two is wrong")
    return case, os.getpid()


def test_cases_of_a_world_share_processes(pool: WorkerPool) -> None:
    found = Together(pool, told, {"a": 1, "b": 3, "c": 4}, lambda case: 1 if case % 2 else 2)
    ((first, process),) = found["a"]
    assert found["b"] == [(3, process)]
    assert first == 1
    assert [case for case, _ in found["c"]] == [4, 4]


def test_a_wrong_case_fails_alone(pool: WorkerPool) -> None:
    found = Together(pool, told, {"a": 1, "b": 2}, lambda _: 1)
    assert found["a"][0][0] == 1
    with pytest.raises(JobError, match="two is wrong"):
        _ = found["b"]
