"""Fixtures of every test, and how tests share the machine."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# before anything imports torch: many small processes share few cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.pool import GARBAGE, WorkerPool

# What else a machine does is no property of ours. Every run has the same examples; others where EXPLORE is set.
hypothesis.settings.register_profile("shared", deadline=None, derandomize="EXPLORE" not in os.environ)
hypothesis.settings.load_profile("shared")

LONGEST = (
    "equivalence/test_plans.py", "runtime/test_faults.py", "runtime/test_loss_weight.py", "runtime/test_loops.py",
    "runtime/test_training_form.py", "docs/test_commands.py", "runtime/reshard/test_reshard.py",
    "equivalence/test_experts.py", "test_auto.py", "runtime/test_optimizers.py", "runtime/deepspeed/test_engine.py",
    "runtime/test_engine_use.py", "runtime/checkpoint/test_kinds.py", "runtime/test_engine_pictures.py",
    "verify/test_roles.py", "analysis/test_sweeps.py", "frameworks/test_hugging_face.py", "docs/test_pages_run.py",
    "profiler/test_measure.py", "verify/test_adapters.py", "runtime/branches/test_branches.py",
    "equivalence/test_context.py", "equivalence/test_pictures.py", "search/test_exact.py",
)  # fmt: skip
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


def pytest_collection_finish() -> None:
    """What is there by now stays: looking through all of torch again and again took a twelfth of the time. As much
    again went on looking every few hundred objects for cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE)
