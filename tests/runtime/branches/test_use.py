"""Inference, evaluation, the usual loop, errors, and the perception network, under plans with branches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from galvatron_lite import auto_parallelize
from galvatron_lite.errors import LaunchError
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Mode
from galvatron_lite.runtime.engine import ParallelModel
from tests.patience import patiently
from tests.pool import WorkerPool
from tests.runtime.branches import jobs
from tests.runtime.branches.networks import ONE, Case, layers_of, make_batch, make_model
from tests.runtime.branches.test_branches import DATA, HEADS, TWO
from tests.runtime.plans import make_plan as plain_plan


def test_perception_network_trains_like_one_process(pool: WorkerPool) -> None:
    model, batch = jobs.perception()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
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
def test_losses_without_gradients(pool: WorkerPool, trunk: Strategy) -> None:
    case = Case("Heads", HEADS, trunk, 2)
    with torch.no_grad():
        wanted = make_model(case).eval()(**make_batch(case))
    for found in [*pool.run(2, jobs.infer, case=case), *pool.run(2, jobs.evaluate, case=case)]:
        assert float(found) == pytest.approx(float(wanted), rel=1e-6)


def test_a_usual_loop(pool: WorkerPool) -> None:
    case = Case("Heads", HEADS, DATA, 2)
    model = make_model(case)
    loss = model(**make_batch(case))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for found in pool.run(2, jobs.call_and_clip, case=case):
        assert found == pytest.approx((loss.item(), norm.item()), rel=1e-5)


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
