"""``auto_parallelize`` measures, plans and trains models as their users make them, also where memory is scarce."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pool import WorkerPool
from tests.runtime.untouched import automatic


@pytest.mark.parametrize(("family", "world"), [("T5", 2), ("Bart", 1), ("Whisper", 1)])
def test_encoder_decoders_are_measured(pool: WorkerPool, tmp_path: Path, family: str, world: int) -> None:
    assert [wrong for _, wrong in pool.run(world, automatic, family=family, folder=str(tmp_path))] == [""] * world


@pytest.mark.parametrize(
    ("family", "world"),
    [("OPT", 1), ("Adapted", 2)]
    + [
        pytest.param(family, 2, marks=pytest.mark.study) for family in ("Llama", "OPT", "Phi3", "Gemma2", "Qwen3", "T5")
    ],
)
def test_where_memory_is_scarce(pool: WorkerPool, tmp_path: Path, family: str, world: int) -> None:
    for recomputed, wrong in pool.run(world, automatic, family=family, folder=str(tmp_path), tight=True):
        assert recomputed != ["none"]
        assert not wrong
