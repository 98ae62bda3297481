"""What runs leave open is filled in with the least that fits."""

from dataclasses import replace

import pytest

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.shapes import DecoderShape, build_graph
from galvatron_lite.plans.schema import Plan, Prediction, Stage, TimeBreakdown
from galvatron_lite.stacks.catalog import match_stack
from galvatron_lite.validate.checks import folds_experts
from galvatron_lite.validate.model import shape_of
from galvatron_lite.validate.plans import fitting, leaves_recompute_open, plan_of, recomputing
from galvatron_lite.validate.rows import PublishedRun

from .runs import gpt, predicted

CALIBRATION = load_calibration()
BIG = {"layers": 24, "hidden": 4096, "heads": 32, "ffn_hidden": 16384, "gpu": "V100-SXM2-16GB"}


def planned(run: PublishedRun) -> tuple[Plan, DecoderShape]:
    stack = match_stack(run.framework)
    shape = shape_of(run, stack)
    assert isinstance(shape, DecoderShape)
    plan = plan_of(run, build_graph(shape, kernels=stack.kernels), stack, "bf16")
    return plan, shape


@pytest.mark.parametrize(
    ("said", "left_open"),
    [(None, True), ("unknown", True), ("none (per recipe; none stated)", True), ("none", False), ("full", False),
     ("selective (config default)", False)],
)  # fmt: skip
def test_what_is_left_open(said: str | None, left_open: bool) -> None:
    assert leaves_recompute_open(said) is left_open


def test_what_a_run_says_is_not_changed() -> None:
    told = predicted(gpt(**BIG, micro_batch=8, zero_stage=0, act_ckpt="none"))
    assert told.device_memory > told.capacity
    fits = predicted(gpt(act_ckpt=None, zero_stage=None))
    assert fits == predicted(gpt(act_ckpt="none", zero_stage=0))


def test_states_are_shared_before_anything_runs_again() -> None:
    small = {**BIG, "layers": 14, "micro_batch": 4, "act_ckpt": None}
    whole, shared = (predicted(gpt(**small, zero_stage=stage)) for stage in (0, None))
    assert whole.memory.activations < shared.memory.activations
    assert shared.memory.optimizer == pytest.approx(whole.memory.optimizer / 2, rel=0.1)
    assert shared.step_seconds < whole.step_seconds


def test_no_more_blocks_run_again_than_it_takes() -> None:
    """Against trying every number of blocks, with a price that counts them."""
    run = gpt(act_ckpt=None, zero_stage=0)
    plan, shape = planned(run)
    graph = build_graph(shape, kernels=match_stack(run.framework).kernels)
    for capacity in range(-1, 9):
        tried: list[int] = []

        def price(candidate: Plan, tried: list[int] = tried) -> Plan:
            full = [full_blocks(stage) for stage in candidate.stages]
            tried.append(max(full))
            return with_peak(candidate, 8 - 2 * max(full))

        chosen = fitting(run, plan, graph, price, capacity)
        needed = max(-((capacity - 8) // 2), 0)
        blocks = max(full_blocks(stage) for stage in chosen.stages)
        assert blocks == (needed if needed <= 4 else 0)
        assert len(tried) <= 6


def full_blocks(stage: Stage) -> int:
    return sum(run.count for run in stage.runs if run.strategy.recompute is Recompute.FULL)


def with_peak(plan: Plan, peak: int) -> Plan:
    return replace(plan, prediction=Prediction(1.0, TimeBreakdown(), 1.0, 1.0, 0.5, peak))


def test_only_the_first_blocks_of_each_stage_run_again() -> None:
    plan, shape = planned(gpt())
    changed = recomputing(plan, build_graph(shape, kernels=match_stack("Megatron-LM").kernels), Recompute.FULL, 3)
    assert [full_blocks(stage) for stage in changed.stages] == [3, 3]
    assert [sum(run.count for run in stage.runs) for stage in changed.stages] == [5, 5]
    # The embedding stands before the blocks of the first stage and never runs again.
    assert changed.stages[0].runs[0].strategy.recompute is Recompute.NONE
    assert changed.stages[1].runs[0].strategy.recompute is Recompute.FULL


@pytest.mark.parametrize(
    ("changes", "folded"),
    [
        ({"tp": 2, "ep": 4}, False),
        ({"tp": 2, "ep": 4, "notes": "special args: expert-tensor-parallel-size=1"}, True),
        ({"tp": 2, "ep": 8}, True),  # each expert has one device only
        ({"tp": 1, "ep": 4}, False),
    ],
)
def test_experts_are_whole_where_said_or_where_nothing_else_is_left(changes: dict[str, object], folded: bool) -> None:
    assert folds_experts(gpt(n_gpus=16, pp=2, n_experts=8, **changes)) is folded
