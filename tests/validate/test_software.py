"""What a run says of itself changes the stack it is priced with."""

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.stacks.schema import Stack
from galvatron_lite.validate.checks import stack_of
from galvatron_lite.validate.rows import PublishedRun

from .runs import gpt

CALIBRATION = load_calibration()


def stack(run: PublishedRun) -> Stack:
    return stack_of(run, "bf16", CALIBRATION)


def test_megatron_hides_the_traffic_of_sharded_parameters_only() -> None:
    plain, sharded = stack(gpt(zero_stage=1)), stack(gpt(zero_stage=3))
    assert plain.constants.hidden["zero"] < 0.5 < sharded.constants.hidden["zero"]
    assert plain.name != sharded.name  # prices are remembered by name


def test_dispatchers_and_hidden_exchanges_are_told_by_words() -> None:
    plain, deep = stack(gpt()), stack(gpt(notes="dispatcher DeepEP; 1F1B A2A overlap"))
    assert (plain.kernels.unique_dispatch, deep.kernels.unique_dispatch) == (False, True)
    assert plain.constants.hidden.get("expert", 0.0) < 0.5 < deep.constants.hidden["expert"]
    assert len({plain.name, deep.name, stack(gpt(zero_stage=3)).name}) == 3
