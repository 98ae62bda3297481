from __future__ import annotations

import pytest

from galvatron_lite.analysis.sweeps import batches, best_batch, ceiling
from galvatron_lite.errors import InfeasibleError, InputError
from tests.analysis.cases import asked, seconds_of, small


@pytest.mark.parametrize("seed", range(4))
def test_the_best_of_all_batches(seed: int) -> None:
    setting = small(seed, budget=2**30 if seed % 2 else 60_000)
    every = batches(4, 24)
    rates = {batch: batch / seconds_of(asked(setting, 4, batch)) for batch in every}
    if not any(rates.values()):
        with pytest.raises(InfeasibleError):
            best_batch(setting, 24)
        return
    answer = best_batch(setting, 24)
    top = max(rates.values())
    assert answer.best is not None
    assert answer.best.rate == top
    assert answer.best.batch == min(batch for batch, rate in rates.items() if rate == top)
    assert answer.saturated is not None
    assert answer.saturated.batch == min(batch for batch, rate in rates.items() if rate >= 0.99 * top)
    assert [point.batch for point in answer.points] == list(every)
    assert all(point.rate in (0.0, rates[point.batch]) for point in answer.points)
    assert top <= answer.ceiling
    assert answer.complete


def test_batches_that_divide_well() -> None:
    assert batches(8, 100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)
    assert batches(6, 40) == (1, 2, 3, 6, 12, 18, 24, 36)
    assert batches(8, 3) == (1, 2)
    with pytest.raises(InputError, match="--max-batch"):
        batches(8, 0)


def test_a_batch_that_cannot_win_is_not_searched() -> None:
    """Layers that take a fixed time whatever the samples: few samples cannot beat many."""
    skipped = 0
    for seed in (0, 3):
        setting = small(seed)
        answer = best_batch(setting, 32)
        assert answer.best is not None
        left = [point for point in answer.points if "cannot beat" in point.reason]
        assert all(ceiling(setting, point.batch) <= answer.best.rate for point in left)
        skipped += len(left)
    assert skipped


def test_an_interrupt_leaves_what_was_found() -> None:
    def stop(done: int, total: int, label: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    answer = best_batch(small(1), 12, stop)
    assert not answer.complete
    assert len(answer.points) == 3
    assert answer.best is not None
