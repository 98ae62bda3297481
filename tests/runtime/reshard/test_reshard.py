"""A plan that changes while training runs: nothing is lost, and the losses go on as if it had not."""

from __future__ import annotations

import pytest

from tests.equivalence.training import curve_alone
from tests.pool import WorkerPool
from tests.runtime.reshard.training import (
    CHAIN,
    FAULTS,
    LLAMA,
    TIGHT,
    faulty_run,
    mixture_run,
    pictures_run,
    switched_run,
    user_run,
)
from tests.runtime.training import train_alone


def test_losses_and_states_are_not_changed_by_a_switch(pool: WorkerPool) -> None:
    wanted = train_alone(CHAIN[0], steps=len(CHAIN)).losses
    for losses in pool.run(4, switched_run, cases=CHAIN):
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_experts_train_on_after_a_switch(pool: WorkerPool) -> None:
    wanted = curve_alone("mixtral", steps=4)
    for losses in pool.run(4, mixture_run):
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_tied_weights_and_old_tensors_given_up_as_new_ones_arrive(pool: WorkerPool) -> None:
    wanted = train_alone(LLAMA[0], steps=len(LLAMA)).losses
    for losses in pool.run(4, switched_run, cases=LLAMA, memory=TIGHT):
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_a_failure_on_one_rank_leaves_all_on_the_old_plan(pool: WorkerPool) -> None:
    """What a failed switch leaves behind trains on bit by bit as if it had never been tried."""
    for told, losses, untouched in pool.run(2, faulty_run):
        assert losses == untouched
        assert [phase for phase, _, _ in told] == [*FAULTS, "carry: allocate", "carry: verify"]
        for phase, kind, text in told:
            assert kind == "SwitchError", text
            assert "rank 1" in text
            assert phase in text
            assert "RuntimeError: injected" in text


def test_objects_of_the_user_stay_valid(pool: WorkerPool) -> None:
    pool.run(2, user_run)


def test_pictures_and_running_statistics(pool: WorkerPool) -> None:
    for losses, wanted in pool.run(2, pictures_run):
        assert losses == pytest.approx(wanted, rel=1e-5)
