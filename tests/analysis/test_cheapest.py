from __future__ import annotations

import pytest

from galvatron_lite.analysis.sweeps import TrainingAmount, cheapest
from galvatron_lite.errors import InfeasibleError, InputError
from tests.analysis.cases import asked, seconds_of, small


@pytest.mark.parametrize("seed", range(2))
def test_the_cheapest_of_all_numbers(seed: int) -> None:
    setting = small(seed, devices=4, nodes=2)
    steps = {devices: seconds_of(asked(setting, devices, 24)) for devices in (1, 2, 3, 4, 8)}
    cost = {devices: 2.5 * devices * 1000 * seconds / 3600 for devices, seconds in steps.items()}
    answer = cheapest(setting, TrainingAmount(steps=1000.0), 2.5, batch=24)
    assert answer.answer is not None
    assert answer.answer.cost == pytest.approx(min(cost.values()), rel=1e-12)
    assert [one.point.devices for one in answer.costs] == [1, 2, 3, 4, 8]
    for one in answer.costs:
        assert one.cost == pytest.approx(cost[one.point.devices], rel=1e-12)
        assert one.seconds == pytest.approx(1000 * steps[one.point.devices], rel=1e-12)
        assert one.device_hours == pytest.approx(one.cost / 2.5, rel=1e-12)
    beaten = {
        one.point.devices
        for one in answer.costs
        if any(other.cost <= one.cost and other.seconds < one.seconds for other in answer.costs)
    }
    assert {one.point.devices for one in answer.frontier} == set(steps) - beaten
    for deadline in (1000 * steps[8] * 1.001, 1000 * steps[2] * 1.001):
        within = {devices: cost[devices] for devices in cost if 1000 * steps[devices] <= deadline}
        bounded = cheapest(setting, TrainingAmount(steps=1000.0), 2.5, batch=24, deadline=deadline)
        assert bounded.answer is not None
        assert bounded.answer.cost == pytest.approx(min(within.values()), rel=1e-12)


def test_a_run_in_samples_tokens_or_steps() -> None:
    """Samples are of 8 tokens in these models."""
    setting = small(3)
    runs = [TrainingAmount(steps=50.0), TrainingAmount(samples=1200.0), TrainingAmount(tokens=9600.0)]
    costs = {round(one.cost, 12) for run in runs for one in [cheapest(setting, run, 1.0, batch=24).costs[0]]}
    assert len(costs) == 1


def test_a_deadline_that_none_meets() -> None:
    answer = cheapest(small(3), TrainingAmount(samples=1e9), 1.0, deadline=1e-3)
    assert answer.answer is None
    assert answer.frontier


def test_nothing_fits() -> None:
    with pytest.raises(InfeasibleError, match="smallest budget"):
        cheapest(small(3, budget=100), TrainingAmount(samples=1e9), 1.0)


@pytest.mark.parametrize(
    ("run", "price", "batch", "deadline", "said"),
    [
        (TrainingAmount(), 1.0, 8, None, "just one"),
        (TrainingAmount(samples=1.0, tokens=1.0), 1.0, 8, None, "just one"),
        (TrainingAmount(steps=10.0), 1.0, None, None, "--batch is missing"),
        (TrainingAmount(samples=10.0), 0.0, 8, None, "--price"),
        (TrainingAmount(samples=-1.0), 1.0, 8, None, "samples"),
        (TrainingAmount(samples=1.0), 1.0, 8, -5.0, "--within"),
    ],
)
def test_runs_that_mean_nothing(
    run: TrainingAmount, price: float, batch: int | None, deadline: float | None, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        cheapest(small(0), run, price, batch=batch, deadline=deadline)
