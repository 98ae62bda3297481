from __future__ import annotations

import pytest

from galvatron_lite.analysis.setting import device_counts
from galvatron_lite.analysis.sweeps import Goal, Target, fewest_devices
from galvatron_lite.errors import InputError
from tests.analysis.cases import asked, seconds_of, small


@pytest.mark.parametrize("seed", range(3))
def test_the_fewest_of_all_numbers(seed: int) -> None:
    setting = small(seed, devices=4, nodes=2)
    counts = device_counts(setting.profile.cluster)
    steps = {devices: seconds_of(asked(setting, devices, 24)) for devices in counts}
    for share, goal in ((0.99, Goal.STEP), (0.6, Goal.SAMPLES), (0.3, Goal.TOKENS)):
        wanted = steps[1] * share
        value = {Goal.STEP: wanted, Goal.SAMPLES: 24 / wanted, Goal.TOKENS: 24 * 8 / wanted}[goal]
        enough = [devices for devices, seconds in steps.items() if seconds <= 24 / (24 / wanted)]
        answer = fewest_devices(setting, Target(goal, value), 24)
        assert (None if answer.answer is None else answer.answer.devices) == min(enough, default=None)
        assert [point.devices for point in answer.points] == [n for n in counts if n <= min(enough, default=8)]
        assert all(point.plan is None or point.seconds == steps[point.devices] for point in answer.points)


@pytest.mark.parametrize("seed", range(2))
def test_the_fewest_that_fit(seed: int) -> None:
    for budget in (30_000, 60_000, 2**30):
        setting = small(seed, budget=budget)
        fits = [devices for devices in (1, 2, 3, 4) if asked(setting, devices, 24) is not None]
        answer = fewest_devices(setting, Target(Goal.FIT), 24)
        assert (None if answer.answer is None else answer.answer.devices) == min(fits, default=None)


def test_without_a_batch_it_is_eight_a_device() -> None:
    answer = fewest_devices(small(0), Target(Goal.SAMPLES, 1e12))
    assert answer.answer is None
    assert [point.batch for point in answer.points] == [8, 16, 24, 32]


@pytest.mark.parametrize(
    ("target", "batch", "said"),
    [
        (Target(Goal.STEP, 1.0), None, "--batch is missing"),
        (Target(Goal.STEP, 0.0), 8, "above 0"),
        (Target(Goal.SAMPLES, -1.0), 8, "above 0"),
        (Target(Goal.TOKENS, float("nan")), 8, "above 0"),
    ],
)
def test_targets_that_mean_nothing(target: Target, batch: int | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        fewest_devices(small(0), target, batch)
