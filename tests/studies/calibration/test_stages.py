"""Two stages on invented rows: seconds = work / (device's share) * stack's factor + stack's fixed time."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from galvatron_lite.calibration.schema import Calibration, DeviceConstants, LinkConstants, StackConstants
from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.folders import config_folder
from studies.calibration.fit import Array, Problem, Task
from studies.calibration.stages import (
    as_default,
    calibrated,
    calibrated_without,
    common_problem,
    common_without,
    entries_fitted,
    setup_of,
)

pytestmark = pytest.mark.study

STACKS = ("one", "two", "three", "four")
FIXED = {"one": 0.02, "two": 0.05, "three": 0.06, "four": 0.12}
"""Seconds a step that the invented measurements have; ``four`` is the odd one."""
PRIORS = Calibration(
    devices={
        "default": DeviceConstants({"bf16": 0.7}, 0.5, 0.5, 0.8),
        "A": DeviceConstants({"bf16": 0.7}, 0.5, 0.5, 0.8),
    },
    links={"default": LinkConstants(0.8, 1e-5)},
    stacks={
        "default": StackConstants(step_host=0.01),
        "galvatron": StackConstants(step_host=0.001),
        **{name: StackConstants(step_host=0.01) for name in STACKS},
        "four": StackConstants(step_host=0.01, attention=0.5, hidden={"zero": 0.9}),
    },
)
NAMES = [STACKS[row % 4] for row in range(80)]
WORK = np.exp(np.random.default_rng(5).uniform(-4, 1, 80))


def _predict(tasks: Sequence[Task]) -> list[Array]:
    return [np.array([_log_seconds(calibration, row) for row in rows]) for calibration, rows in tasks]


def _log_seconds(calibration: Calibration, row: int) -> float:
    return float(np.log(WORK[row] / calibration.devices["A"].matmul["bf16"] + calibration.stacks[NAMES[row]].step_host))


def _truth() -> Array:
    device = replace(PRIORS.devices["A"], matmul={"bf16": 0.6})
    stacks = PRIORS.stacks | {name: StackConstants(step_host=fixed) for name, fixed in FIXED.items()}
    return _predict([(replace(PRIORS, devices=PRIORS.devices | {"A": device}, stacks=stacks), range(80))])[0]


def _problem(measured: Array) -> Problem:
    uses = [frozenset({"devices/A", f"stacks/{name}"}) for name in NAMES]
    return Problem(measured, np.full(80, 20.0), np.full(80, -1), 0.0, uses)


PROBLEM = _problem(_truth())
SETUP = setup_of(PROBLEM, PRIORS)
WHOLE = calibrated(PROBLEM, SETUP, _predict)
FOUR = np.array([name == "four" for name in NAMES])


def test_each_stack_has_its_own_numbers_in_the_end() -> None:
    made = WHOLE.calibration
    assert made.devices["A"].matmul["bf16"] == pytest.approx(0.6, rel=0.06)
    assert {name: made.stacks[name].step_host for name in STACKS} == pytest.approx(FIXED, rel=0.15)


def test_the_default_lies_among_the_stacks() -> None:
    default = WHOLE.common.stacks["default"].step_host
    assert min(FIXED.values()) < default < max(FIXED.values())
    assert WHOLE.calibration.stacks["default"] == WHOLE.common.stacks["default"]


def test_devices_are_held_in_the_second_stage() -> None:
    assert WHOLE.calibration.devices == WHOLE.common.devices
    assert {parameter.kind for parameter in WHOLE.unknowns.parameters} == {"stacks"}


def test_what_is_documented_of_a_stack_stays() -> None:
    changed = replace(PRIORS.stacks["default"], step_host=0.03, attention=1.2)
    made = as_default(PRIORS, replace(PRIORS, stacks=PRIORS.stacks | {"default": changed})).stacks
    assert (made["one"].attention, made["one"].step_host) == pytest.approx((1.2, 0.03))
    assert (made["four"].attention, made["four"].step_host) == pytest.approx((0.6, 0.03))
    assert made["four"].hidden == {"zero": 0.9}
    assert made["galvatron"].step_host == pytest.approx(0.003)  # a tenth of the default's, before and after


def test_a_stack_that_was_never_seen_has_no_numbers_of_its_own() -> None:
    made = common_without(FOUR, PROBLEM, SETUP, WHOLE, _predict)
    assert made.stacks["four"].step_host == made.stacks["one"].step_host == made.stacks["default"].step_host
    assert made.stacks["default"].step_host < WHOLE.common.stacks["default"].step_host  # the slowest is left out


@pytest.mark.parametrize("without", [common_without, calibrated_without])
def test_measurements_left_out_do_not_enter(without: object) -> None:
    poisoned = _problem(np.where(FOUR, PROBLEM.measured + 2.0, PROBLEM.measured))
    clean, other = (without(FOUR, problem, SETUP, WHOLE, _predict) for problem in (PROBLEM, poisoned))  # type: ignore[operator]
    assert other == clean
    kept_in = without(np.zeros(80, dtype=bool), poisoned, SETUP, WHOLE, _predict)  # type: ignore[operator]
    assert kept_in != clean


def test_a_stack_all_of_whose_rows_are_left_out_is_the_default() -> None:
    made = calibrated_without(FOUR, PROBLEM, SETUP, WHOLE, _predict).stacks
    assert made["four"].step_host == pytest.approx(made["default"].step_host)
    assert made["two"].step_host == pytest.approx(FIXED["two"], rel=0.15)


def test_the_first_stage_knows_one_stack() -> None:
    assert entries_fitted(common_problem(PROBLEM)) == {"devices/A", "stacks/default"}


def test_entries_of_few_rows_are_not_fitted() -> None:
    few = PROBLEM.without(FOUR & (np.cumsum(FOUR) > 2))
    assert entries_fitted(few) == {"devices/A", "stacks/one", "stacks/two", "stacks/three"}


def test_shipped_priors_are_the_same_of_all_stacks_but_for_what_is_documented() -> None:
    priors = load_calibration(config_folder("calibration") / "priors")
    for name, constants in priors.stacks.items():
        if name != "galvatron":
            bare = replace(constants, hidden={}, attention=1.0)
            assert bare == replace(priors.stacks["default"], hidden={}), name
        assert constants.attention == 1.0 or "; attention: " in priors.origins[f"stacks/{name}"].source
