"""What a profile holds of its model's loss, and plans made from it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite import auto_parallelize, evaluate, explain, plan, profile, verify_plan
from galvatron_lite.errors import LOG, InputError
from galvatron_lite.plans.describe import shares_batch
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.measure import measure_profile
from galvatron_lite.profiler.schema import PlanNeeds, Profile
from galvatron_lite.profiler.store import profile_hash, read_profile
from galvatron_lite.profiler.timing import TimingRule
from galvatron_lite.profiler.transfer import scale_up
from tests.pool import WorkerPool

NOTE = "the loss compares samples with one another: only plans that keep the batch whole"


class Pairs(nn.Module):
    """A contrastive loss of rows; or a mean over them."""

    def __init__(self, contrastive: bool = True) -> None:
        super().__init__()
        self.contrastive, self.blocks = contrastive, nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows).tanh()
        if not self.contrastive:
            return rows.square().mean()
        return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows), device=rows.device))


def estimated(folder: Path, contrastive: bool = True, gpus: int = 4, check: bool = True) -> Profile:
    rows = torch.randn(8, 4)
    return profile(Pairs(contrastive), rows, estimate=True, cluster="t4", gpus=gpus, folder=folder, check=check)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return estimated(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def shared(pairs: Profile, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A plan that shares the batch, from a profile of a model that was not tried."""
    untried = estimated(tmp_path_factory.mktemp("untried"), check=False)
    assert untried.needs == PlanNeeds()
    assert profile_hash(untried) == profile_hash(pairs)
    return plan(untried, batch=8, fix="dp=4", runners_up=0)


def test_plans_of_a_contrastive_loss_keep_the_batch_whole(tmp_path: Path) -> None:
    model, rows = Pairs(), torch.randn(8, 4)
    values, state = [one.clone() for one in model.parameters()], torch.get_rng_state()
    profile(model, rows, estimate=True, cluster="t4", gpus=4, folder=tmp_path, name="pairs")
    assert all(map(torch.equal, model.parameters(), values))
    assert all(one.grad is None for one in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    stored = read_profile(tmp_path / "t4" / "pairs.yaml")
    assert stored.needs.fix == ("dp=1", "microbatches=1")
    best = plan(stored, batch=8, runners_up=0)
    assert best.devices == 4
    assert not shares_batch(best)
    assert best.provenance is not None
    assert best.provenance.notes[0].startswith(NOTE)
    assert plan(scale_up(stored, stored.cluster), batch=8, runners_up=0).provenance == best.provenance


def test_a_plain_mean_leaves_nothing_in_the_file(tmp_path: Path) -> None:
    plain = estimated(tmp_path, contrastive=False)
    assert "needs" not in (tmp_path / "t4" / "Pairs.yaml").read_text(encoding="utf-8")
    assert shares_batch(plan(plain, batch=8, runners_up=0))


@pytest.mark.parametrize("pins", [{"fix": "dp=4"}, {"fix": "zero=2"}, {"forbid": "pipeline"}])
def test_pins_that_leave_no_plan_beside_the_loss_are_named_with_the_reason(
    pairs: Profile, pins: dict[str, str]
) -> None:
    words = " ".join(f"--{name} {word}" for name, word in pins.items())
    with pytest.raises(InputError, match="the loss compares samples with one another") as caught:
        plan(pairs, batch=8, runners_up=0, **pins)  # type: ignore[arg-type]
    assert f"'{words}' cannot be used" in str(caught.value)
    assert f"Lift {words}, or train in one process" in str(caught.value)


def test_pins_that_are_wrong_alone_are_not_blamed_on_the_loss(pairs: Profile) -> None:
    with pytest.raises(InputError, match="It must divide the 4 devices") as caught:
        plan(pairs, batch=8, runners_up=0, fix="pp=3")
    assert "compares samples" not in str(caught.value)


def test_inference_has_no_loss(pairs: Profile) -> None:
    assert shares_batch(plan(pairs, batch=8, runners_up=0, mode="inference"))


def test_a_users_plan_that_shares_the_batch_has_a_note(pairs: Profile, shared: Plan) -> None:
    for notes in (
        getattr(evaluate(shared, pairs).provenance, "notes", ()),
        explain(shared, pairs, what_if=False).notes,
    ):
        assert [note for note in notes if note.startswith("auto_parallelize refuses this plan: the loss compares")]
    verified = verify_plan(shared, Pairs(), torch.randn(8, 4), checks="dry", profile=pairs)
    assert verified.passed
    assert [check.name for check in verified.checks if "refuses this plan" in check.said] == ["trains like one process"]
    whole = evaluate(plan(pairs, batch=8, runners_up=0), pairs)
    assert whole.provenance is not None
    assert not any("refuses" in note for note in whole.provenance.notes)


def test_what_is_measured_holds_it_too(tmp_path: Path) -> None:
    quick, needs = TimingRule(warmup=1, least=1, most=1, seconds=0.01), PlanNeeds(fix=("dp=1",), reasons=("why",))
    done = measure_profile(
        Pairs(), torch.randn(2, 4), folder=tmp_path, device="cpu", rule=quick, name="p", find_needs=lambda _: needs
    )
    assert done.needs == needs
    assert read_profile(next(tmp_path.glob("*/p.yaml"))) == done


def launched(source: Profile, check: bool) -> tuple[bool, list[str]]:
    """Whether the plan that ``auto_parallelize`` finds shares the batch, and its log."""
    lines, handler = list[str](), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(handler)
    try:
        parallel = auto_parallelize(Pairs(), torch.randn(8, 4), profile=source, check=check, device="cpu")
    finally:
        LOG.removeHandler(handler)
    assert isinstance(parallel.plan, Plan)
    return shares_batch(parallel.plan), lines


def test_auto_parallelize_goes_by_its_check_alone(pool: WorkerPool, tmp_path: Path) -> None:
    """The profile's words neither come twice nor restrict what is not to be checked."""
    two = estimated(tmp_path, gpus=2)
    assert two.needs.fix
    shares, lines = pool.run(2, launched, source=two, check=True)[0]
    assert not shares
    assert sum(NOTE in line for line in lines) == 1
    shares, lines = pool.run(2, launched, source=two, check=False)[0]
    assert shares
    assert not any(NOTE in line for line in lines)
