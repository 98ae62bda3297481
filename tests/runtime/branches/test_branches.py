"""Models with branches on separate devices train like one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from galvatron_lite import auto_parallelize
from galvatron_lite.errors import LaunchError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Mode, Schedule
from galvatron_lite.profiler.schema import HostOverhead
from galvatron_lite.profiler.timing import TimingRule
from galvatron_lite.runtime.branches.engine import branch_seconds
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.search.families.family import seconds_of
from galvatron_lite.search.planner import find_plan
from tests.branchy import plain_profile
from tests.patience import patiently
from tests.pool import WorkerPool
from tests.runtime.branches import jobs
from tests.runtime.branches.jobs import ONE, Case, layers_of, make_batch, make_model, train_alone, train_each
from tests.runtime.plans import losses_alone
from tests.runtime.plans import make_plan as plain_plan
from tests.runtime.training import Trained, assert_same

DATA, FOUR = Strategy(data=2), Strategy(data=4)
TWO = {"a": (("coders.0",), 0, 1, ONE), "b": (("coders.1",), 1, 1, ONE)}
TOWERS = {"text": (("text",), 1, 1, ONE), "picture": (("picture", "project"), 0, 1, ONE)}
CAPTIONS = {"picture": (("picture",), 0, 1, ONE), "text": (("words", "text"), 1, 1, ONE)}
HEADS = {"first": (("first",), 0, 1, ONE), "second": (("second",), 1, 1, ONE)}
CHAINS = {"one": (("up.0", "down.0"), 0, 1, ONE), "two": (("up.1", "down.1"), 1, 1, ONE)}


TWO_PROCESSES = {
    "coders": Case("Coders", TWO, ONE, 2, max_grad_norm=0.05),
    "coders-shared-trunk": Case("Coders", TWO, DATA, 2, samples=8),
    "coders-other-order": Case("Coders", TWO, ONE, 2, arguments={"order": (1, 0)}),
    "coders-one-sample": Case("Coders", TWO, ONE, 2, samples=1),
    "used-twice": Case("Coders", TWO, DATA, 2, arguments={"use": "twice"}),
    "told-only": Case("Coders", TWO, DATA, 2, arguments={"order": (0,), "use": "told"}),
    "changed-in-place": Case("Coders", TWO, DATA, 2, arguments={"use": "changed"}),
    "looked-at-first-under-no-grad": Case("Coders", TWO, DATA, 2, arguments={"use": "weighed"}),
    "no-gradient": Case("Coders", TWO, ONE, 2, arguments={"use": "reduced"}),
    "three-on-two": Case(
        "Coders", {**TWO, "c": (("coders.2",), 1, 1, ONE)}, ONE, 2, arguments={"count": 3, "order": (2, 0, 1)}
    ),
    "towers": Case("Towers", TOWERS, ONE, 2, max_grad_norm=0.05),
    "towers-shared-trunk": Case("Towers", TOWERS, DATA, 2, arguments={"contrastive": False}),
    "captions": Case("Captions", CAPTIONS, ONE, 2),
    "captions-shared-trunk": Case("Captions", CAPTIONS, DATA, 2),
    "heads": Case("Heads", HEADS, DATA, 2, samples=8, microbatches=2),
    "heads-one-trunk": Case("Heads", HEADS, ONE, 2, max_grad_norm=0.05, samples=1),
    "chains": Case("Chains", CHAINS, ONE, 2),
    "chains-shared-trunk": Case("Chains", CHAINS, DATA, 2),
    "chains-detached": Case("Chains", CHAINS, DATA, 2, microbatches=2, arguments={"detached": True}),
}
# fmt: off
FOUR_PROCESSES = {
    "tensor-inside": Case("Towers", {
        "text": (("text",), 0, 2, Strategy(tensor=2)), "picture": (("picture", "project"), 2, 1, ONE),
    }, FOUR, 4, samples=8, arguments={"contrastive": False}, max_grad_norm=0.05),
    "zero-inside": Case("Towers", {
        "text": (("text",), 1, 2, Strategy(zero=2, zero_stage=3)), "picture": (("picture", "project"), 0, 1, ONE),
    }, ONE, 4, samples=8, max_grad_norm=0.05),
    "spatial-inside": Case("Heads", {
        "first": (("first",), 0, 3, Strategy(height=3)), "second": (("second",), 3, 1, ONE),
    }, ONE, 4),
    "recompute-inside": Case("Heads", {
        "first": (("first",), 0, 2, Strategy(width=2)),
        "second": (("second",), 2, 2, Strategy(data=2, recompute=Recompute.FULL)),
    }, FOUR, 4, samples=8, microbatches=2),
}
# fmt: on


@pytest.fixture(scope="module")
def on_two(pool: WorkerPool) -> list[dict[str, Trained]]:
    return pool.run(2, train_each, cases=TWO_PROCESSES)


@pytest.fixture(scope="module")
def on_four(pool: WorkerPool) -> list[dict[str, Trained]]:
    return pool.run(4, train_each, cases=FOUR_PROCESSES)


@pytest.mark.parametrize("name", list(TWO_PROCESSES))
def test_like_one_process(on_two: list[dict[str, Trained]], name: str) -> None:
    wanted = train_alone(TWO_PROCESSES[name])
    for found in on_two:
        assert_same(found[name], wanted)


@pytest.mark.parametrize("name", list(FOUR_PROCESSES))
def test_four_processes(on_four: list[dict[str, Trained]], name: str) -> None:
    wanted = train_alone(FOUR_PROCESSES[name])
    for found in on_four:
        assert_same(found[name], wanted)


ORDER = (Schedule.ONE_F_ONE_B,)
QUICK = TimingRule(warmup=1, least=3, most=5, seconds=0.05)


def measure() -> tuple[float, bool]:
    """The figure, and whether random numbers go on as if nothing had been measured."""
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    found = branch_seconds(torch.device("cpu"), QUICK)
    return found, torch.equal(before, torch.random.get_rng_state())


def test_a_small_pair_is_not_split_and_a_large_one_is(pool: WorkerPool) -> None:
    """Around one measured figure: layers of a fiftieth of a call, and of a thousand calls.

    Beside stages under 1F1B, which gain nothing on one sample; zero-bubble stages would.
    """
    ranks = pool.run(2, measure)
    assert ranks[0] == ranks[1]
    branch, unchanged = ranks[0]
    assert unchanged
    assert 0 < branch < 5
    for work, worth in ((branch / 50, False), (branch * 1000, True)):
        profile = plain_profile([work, work], overhead=HostOverhead(branch=branch))
        plan, alone = (
            find_plan(profile, devices=count, global_batch=1, budget=2**29, schedules=ORDER) for count in (2, 1)
        )
        assert bool(plan.branches) is worth
        assert not worth or seconds_of(plan) < seconds_of(alone)


def test_perception_network_trains_like_one_process(pool: WorkerPool) -> None:
    model, batch = jobs.perception()
    losses = losses_alone(model, torch.optim.SGD(model.parameters(), lr=0.05), [batch] * 2)
    for found, state in pool.run(2, jobs.train_perception):
        assert found == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("trunk", [ONE, DATA], ids=["one", "shared"])
def test_outputs_are_the_models_own_on_every_rank(pool: WorkerPool, trunk: Strategy) -> None:
    model, batch = jobs.perception()
    with torch.no_grad():
        wanted = model.eval()(batch["pictures"])
    for found in pool.run(2, jobs.infer_perception, trunk=trunk):
        assert len(found) == 4  # ways to call it
        for one in found:
            torch.testing.assert_close(one, wanted)


@pytest.mark.parametrize("trunk", [ONE, DATA], ids=["one", "shared"])
def test_a_usual_loop_and_losses_without_gradients(pool: WorkerPool, trunk: Strategy) -> None:
    case = Case("Heads", HEADS, trunk, 2)
    model, batch = make_model(case), make_batch(case)
    loss = model(**batch)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    wanted = (loss.item(), norm.item(), *[model.eval()(**batch).item()] * 2)
    for found in pool.run(2, jobs.used, case=case):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_a_rank_that_is_late_is_named(pool: WorkerPool) -> None:
    def said(patience: float) -> str:
        case = Case("Coders", TWO, ONE, 2)
        found: str = pool.run(2, jobs.one_rank_is_late, case=case, patience=patience)[0]
        return found

    def names_it(found: str) -> bool:
        return found.startswith("LaunchError") and "what branch b returns from rank 1" in found

    found = patiently(said, names_it, 0.3)
    assert names_it(found), found


def test_dependent_modules_are_refused(pool: WorkerPool) -> None:
    crossed = {"one": (("up.0", "down.1"), 0, 1, ONE), "two": (("up.1", "down.0"), 1, 1, ONE)}
    for said in pool.run(2, jobs.wrong_model, case=Case("Chains", crossed, ONE, 2)):
        assert "reads what branch" in said


def test_several_rows_a_sample_are_refused_where_the_trunk_shares_samples(pool: WorkerPool) -> None:
    for said in pool.run(2, jobs.wrong_model, case=Case("Coders", TWO, DATA, 2, arguments={"use": "views"})):
        assert "2 items a sample" in said
        assert "--forbid branches" in said


def test_what_a_branch_draws_does_not_move_the_trunk(pool: WorkerPool) -> None:
    (losses, first), (others, second) = pool.run(2, jobs.train_dropping)
    assert losses == others
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_models_on_the_meta_device_start_as_under_any_plan(pool: WorkerPool) -> None:
    case = Case("Heads", HEADS, DATA, 2)
    model = make_model(case).to("meta")
    layers = layers_of(case, model)
    names = [[layer.name for layer in layers]]
    alone = ParallelModel(
        model, plain_plan(names, [[ONE] * len(layers)], case.samples), layers, make_batch(case), device="cpu",
        init_fn=jobs.fill, seed=7,
    )  # fmt: skip
    for state in pool.run(2, jobs.initial_state, case=case):
        torch.testing.assert_close(state, alone.full_state_dict(), rtol=0, atol=0)


def test_bf16_outputs_travel_in_full(pool: WorkerPool) -> None:
    case = Case("Heads", HEADS, ONE, 2, precision="bf16")
    model, batch = make_model(case), make_batch(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    for found in pool.run(2, jobs.in_bf16, case=case):
        assert found == pytest.approx(losses, rel=2**-8)  # one rounding of bf16


def test_one_process_is_refused_a_plan_for_several_devices() -> None:
    model, batch = jobs.perception()
    with pytest.raises(LaunchError, match=r"2 device.*1 process"):
        auto_parallelize(model, batch, plan=jobs.perception_plan(mode=Mode.INFERENCE), device="cpu")
