"""Plans with branches on devices of their own, by hand: step time, memory, and what cannot be priced."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_lite.cost.plan import evaluate
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Passed, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.describe import branch_rows, headline, stage_rows
from galvatron_lite.plans.io import check_plan
from galvatron_lite.plans.schema import (
    PLAN_VERSION,
    BranchPlacement,
    LayerRun,
    Mode,
    Plan,
    Prediction,
    Schedule,
    Stage,
)
from galvatron_lite.plans.written import plan_from
from galvatron_lite.profiler.schema import BRANCH_HOST, HostOverhead
from tests.branchy import NO_HOST, plain_profile
from tests.factories import make_cluster


def run(first: str, strategy: Strategy, last: str = "", count: int = 1) -> LayerRun:
    return LayerRun(first, last or first, count, strategy)


def apart(*where: tuple[int, int], batch: int = 2, devices: int = 2, mode: Mode = Mode.TRAINING) -> Plan:
    """Tower i on (first device, devices) of its own, sharing the samples there; the rest on shares of samples."""
    placed = tuple(
        BranchPlacement(f"t{tower}", (f"t{tower}",), first, count, (run(f"t{tower}.0", Strategy(data=count)),))
        for tower, (first, count) in enumerate(where)
    )
    trunk = Stage((run("before", Strategy(data=devices), "after", 2),))
    return Plan(
        PLAN_VERSION, "towers", devices, batch, 1, Schedule.ONE_F_ONE_B, "fp32", (trunk,), branches=placed, mode=mode
    )  # fmt: skip


def predicted(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction


def test_two_branches_take_as_long_as_the_longer_one() -> None:
    """3 s and 2 s a sample in forward, twice that in backward; two samples."""
    profile = plain_profile([3.0, 2.0])
    found = evaluate(profile, apart((0, 1), (1, 1)))
    assert predicted(found).step_seconds == pytest.approx(2 * (3 + 6), rel=1e-6)
    assert [one.seconds for one in found.branches] == pytest.approx([18, 12])
    together = evaluate(profile, apart((0, 1), (0, 1)))
    assert predicted(together).step_seconds == pytest.approx(2 * (5 + 10), rel=1e-6)
    running = evaluate(profile, apart((0, 1), (1, 1), mode=Mode.INFERENCE))
    assert predicted(running).step_seconds == pytest.approx(2 * 3, rel=1e-6)


def test_forward_and_backward_wait_for_their_own_slowest_group() -> None:
    """The towers' forwards and backwards are joined: 5 s and 1 s forward, 2 s and 6 s backward take 5 + 6."""
    profile = plain_profile([5.0, 1.0])
    points = tuple(
        replace(one, backward={"t0": 2.0, "t1": 6.0}[one.kind] * one.samples) if one.kind in ("t0", "t1") else one
        for one in profile.layers
    )
    found = evaluate(replace(profile, layers=points), apart((0, 1), (1, 1), batch=2))
    assert predicted(found).step_seconds == pytest.approx(2 * 11, rel=1e-6)


def test_bytes_moved_between_groups_take_time() -> None:
    """Each tower gives 8e6 bytes a sample: of two samples one device lacks one, both ways, at 1e7 bytes a second."""
    profile = plain_profile([3.0, 3.0], cluster=make_cluster(2, bandwidth=1e7, latency=0.0), given=8 * 10**6)
    found = predicted(evaluate(profile, apart((0, 1), (1, 1))))
    assert found.step_seconds == pytest.approx(18 + 2 * 0.8, rel=1e-6)
    assert found.time.communication == pytest.approx(1.6, rel=1e-6)


@settings(max_examples=10, deadline=None)
@given(branch=st.floats(1e-4, 1e-1), pipeline=st.floats(0, 1e-2), towers=st.integers(2, 4), training=st.booleans())
def test_every_layer_call_costs_host_time(branch: float, pipeline: float, towers: int, training: bool) -> None:
    """Of every micro-batch, on every device: half as much without backward; and each further message its own."""
    mode = Mode.TRAINING if training else Mode.INFERENCE
    where, passes = [(tower % 2, 1) for tower in range(towers)], 2 if training else 1
    overhead = HostOverhead(branch=branch, pipeline=pipeline)
    for read in (0, 8):
        plan = apart(*where, batch=4, mode=mode)
        taken = []
        for host in (NO_HOST, overhead):
            profile = plain_profile([3.0] * towers, read=read, overhead=host)
            taken += [predicted(evaluate(profile, replace(plan, microbatches=count))).step_seconds for count in (1, 2)]
        calls, further = towers * branch / 2, (read > 0) * pipeline * ((towers + 1) // 2)
        assert taken[2] - taken[0] == pytest.approx(passes * (calls + further), rel=1e-6, abs=1e-9)
        assert taken[3] - taken[1] == pytest.approx(2 * (taken[2] - taken[0]), rel=1e-6, abs=1e-9)


def test_what_was_not_measured_is_estimated() -> None:
    """Profiles of one process, and older ones."""
    found = predicted(evaluate(plain_profile([3.0, 3.0], overhead=HostOverhead()), apart((0, 1), (1, 1))))
    assert found.step_seconds == pytest.approx(18 + 2 * BRANCH_HOST, rel=1e-9)
    assert found.time.other == pytest.approx(2 * BRANCH_HOST, rel=1e-6)


def test_a_device_holds_the_branches_that_live_there() -> None:
    """16 bytes for a parameter at fp32 with AdamW: values, gradients, two moments; a gradient beside the buffer."""
    profile = plain_profile([3.0, 2.0], parameters=[1000, 10])
    found = evaluate(profile, apart((0, 1), (1, 1)))
    assert found.branches[0].memory.parameters == 4000
    assert found.branches[0].memory.optimizer == 8000
    assert found.branches[1].memory.parameters == 40
    large = predicted(found).peak_memory
    assert 20_000 <= large < 20_000 + 200
    both = predicted(evaluate(profile, apart((0, 1), (0, 1)))).peak_memory
    assert both - large == pytest.approx(160 + 5 * 2, abs=40)  # the other's states, and what it keeps of two samples
    running = evaluate(profile, apart((0, 1), (1, 1), mode=Mode.INFERENCE))
    assert 4000 <= predicted(running).peak_memory < 4000 + 200


def test_a_group_of_two_shares_the_samples_and_sums_gradients() -> None:
    profile = plain_profile([4.0, 1.0, 1.0], cluster=make_cluster(4, bandwidth=1e12, latency=0.0))
    found = evaluate(profile, apart((0, 2), (2, 1), (3, 1), batch=4, devices=4))
    assert predicted(found).step_seconds == pytest.approx(4 * 12 / 2, rel=1e-6)


def test_samples_that_do_not_divide_are_all_on_every_device() -> None:
    profile = plain_profile([3.0, 2.0])
    odd = apart((0, 1), (1, 1), batch=3)
    with pytest.raises(InputError, match="share 3 samples"):
        evaluate(profile, odd)
    whole = replace(odd, stages=(Stage((run("before", Strategy(), "after", 2),)),))
    assert check_plan(whole) is whole
    assert predicted(evaluate(profile, whole)).step_seconds == pytest.approx(3 * 9, rel=1e-6)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda plan: replace(plan, branches=(replace(plan.branches[0], name="before"),)), "has t0, t1"),
        (lambda plan: replace(plan, branches=(plan.branches[0],) * 2), "placed already"),
        (lambda plan: replace(plan, branches=(replace(plan.branches[0], first=2), plan.branches[1])), "devices 0 to 1"),
        (lambda plan: replace(plan, stages=plan.stages * 2), "one stage"),
        (lambda plan: replace(plan, stages=(Stage((run("before", Strategy(zero=2, zero_stage=3), "after", 2),)),)),
         "outside branches"),
        (lambda plan: replace(plan, stages=(Stage((run("before", Strategy(data=2)),)),)), "2 layers"),
    ],
)  # fmt: skip
def test_what_cannot_be_priced(wrong: object, said: str) -> None:
    plan = apart((0, 1), (1, 1))
    with pytest.raises(InputError, match=said):
        evaluate(plain_profile([3.0, 2.0]), wrong(plan))  # type: ignore[operator]


def test_groups_beside_each_other_do_not_overlap() -> None:
    profile = plain_profile([4.0, 1.0], cluster=make_cluster(4, bandwidth=1e12, latency=0.0))
    with pytest.raises(InputError, match="none in common"):
        evaluate(profile, apart((0, 2), (1, 2), batch=4, devices=4))


def test_a_plan_written_by_hand() -> None:
    profile = plain_profile([3.0, 2.0])
    data = {
        "devices": 2, "global_batch": 2, "microbatches": 1,
        "runs": [{"layers": "before..after", "strategy": "data2"}],
        "branches": [
            {"name": "t0", "first": 0, "devices": 1, "runs": [{"layers": "t0.*", "strategy": "whole"}]},
            {"name": "t1", "first": 1, "devices": 1, "runs": [{"layers": "t1.*", "strategy": "whole"}]},
        ],
    }  # fmt: skip
    plan = plan_from(data, profile.graph, "file")
    assert plan == apart((0, 1), (1, 1))
    found = evaluate(profile, plan)
    assert "2 branches on devices of their own" in headline(found)
    assert [row.strategy for row in stage_rows(found)] == ["data2"]
    assert branch_rows(found)[0].stage.startswith("t0: device 0, 18")
    for key, value, said in (("first", 2, "2 devices"), ("name", "t2", "It has t0, t1"), ("devices", 0, "0")):
        wrong = {**data, "branches": [{**data["branches"][0], key: value}]}  # type: ignore[dict-item, index]
        with pytest.raises(InputError, match=said):
            plan_from(wrong, profile.graph, "file")


def test_a_model_of_branches_alone() -> None:
    """Without a trunk the results go to every device; towers of two layers, as lone layers are taken for a chain."""
    profile = plain_profile([3.0, 2.0])
    layers = tuple(
        Layer(f"t{tower}.{place}", f"t{tower}", Role.BLOCK, (f"t{tower}.{place}",))
        for tower in range(2)
        for place in range(2)
    )
    tensors = (Passed("t0.0", ("t0.1",), 10), Passed("t1.0", ("t1.1",), 10))
    lone = replace(profile, graph=replace(profile.graph, layers=layers, tensors=tensors))
    placed = tuple(
        BranchPlacement(f"t{one}", (f"t{one}",), one, 1, (run(f"t{one}.0", Strategy(), f"t{one}.1", 2),))
        for one in range(2)
    )
    plan = replace(apart(), stages=(Stage(()),), branches=placed)
    assert check_plan(plan) is plan
    assert predicted(evaluate(lone, plan)).step_seconds == pytest.approx(2 * 2 * 9, rel=1e-6)
    assert stage_rows(plan) == []
