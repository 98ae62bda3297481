"""Plans that are followed pass every check; faults planted in the real runtime, run dry, are found and named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.model.graph import ModelGraph, Recompute
from galvatron_lite.model.zoo.gpt import GPT
from galvatron_lite.parallelism.pipeline.runner import Sender
from galvatron_lite.parallelism.process_groups import ProcessGroups
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import MemoryBreakdown, Plan, Prediction, Proof, Provenance, TimeBreakdown
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.verify.conformance.groups import GRADIENTS, GROUPS, gradients_summed, groups_fit
from galvatron_lite.verify.conformance.layers import KEPT, SPLITS, STAGES, PlannedLayers, layer_checks
from galvatron_lite.verify.conformance.memory import BUDGET, MEMORY, memory_checks
from galvatron_lite.verify.conformance.volume import predicted_bytes, volume, wire_bytes
from galvatron_lite.verify.dry.step import Subject, dry_run, subject_of
from galvatron_lite.verify.dry.world import _LOG
from galvatron_lite.verify.match.meeting import FIT, PROGRESS, match
from galvatron_lite.verify.match.words import folded
from galvatron_lite.verify.schema import Check, During, Message, MessageType, RoleRun, Sample, Verdict
from tests.equivalence.plans import write_plan
from tests.verify.worlds import CONFIG, NAMES, batch, in_stages, message, model


@cache
def graph() -> ModelGraph:
    return trace(model(), batch())


def plan_with(strategy: Strategy, stages: int = 1, microbatches: int = 1, **others: Strategy) -> Plan:
    """``others``: strategies of single blocks."""
    edge = Strategy(data=strategy.batch_degree, tensor=strategy.tensor)
    strategies = {name: strategy if name.startswith("blocks") else edge for name in NAMES}
    strategies |= {name.replace("_", "."): one for name, one in others.items()}
    return write_plan(
        in_stages(stages), strategies, devices=stages * strategy.devices, batch=8, microbatches=microbatches
    )


@cache
def subject(plan: Plan) -> Subject:
    return subject_of(model(), plan, batch(), optimizer=torch.optim.SGD)


def run_one(plan: Plan, rank: int, said: dict[int, Any]) -> RoleRun:
    def hear(source: int, purpose: str, place: int, number: int) -> Any:
        return said[source][purpose, place][number]

    run, said[rank] = dry_run(subject(plan), plan, rank, hear)
    return run


@cache
def right_runs(plan: Plan) -> list[RoleRun]:
    """Every rank by itself, in order."""
    said: dict[int, Any] = {}
    return [run_one(plan, rank, said) for rank in range(plan.devices)]


def with_fault(plan: Plan, fault: Any, broken: Sequence[int] = (0,)) -> list[RoleRun]:
    """The runs of a plan, of which these ranks' are under a fault (a patch)."""
    runs = list(right_runs(plan))
    with fault:
        for rank in broken:
            runs[rank] = run_one(plan, rank, {})
    return runs


def checks_of(runs: Sequence[RoleRun], plan: Plan) -> dict[str, Check]:
    planned = PlannedLayers(plan, graph())
    found = [*match(runs, plan), *layer_checks(runs, planned), gradients_summed(runs, planned)]
    found.append(groups_fit(runs, planned))
    return {check.name: check for check in found}


def failed(runs: Sequence[RoleRun], plan: Plan) -> dict[str, Check]:
    return {name: check for name, check in checks_of(runs, plan).items() if check.verdict is Verdict.FAILED}


DATA = plan_with(Strategy(data=2))
PIPELINE = plan_with(Strategy(), stages=2, microbatches=3 + 1)
AGAIN = plan_with(Strategy(data=2), blocks_1=Strategy(data=2, recompute=Recompute.FULL))
PLANS = {
    "data": DATA,
    "pipeline": PIPELINE,
    "recompute": AGAIN,
    "states": plan_with(Strategy(zero=2, zero_stage=1)),
    "shards": plan_with(Strategy(zero=2, zero_stage=3)),
    "tensor": plan_with(Strategy(tensor=2, sequence_parallel=True)),
    "mixed": plan_with(Strategy(data=2, tensor=2), blocks_1=Strategy(data=4)),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_are_followed_pass(name: str) -> None:
    assert failed(right_runs(PLANS[name]), PLANS[name]) == {}


@pytest.mark.parametrize("name", ["shards", "states", "data"])
def test_parameters_that_the_loss_does_not_need(name: str) -> None:
    """They have no gradient to sum, in one process either."""
    with torch.device("meta"):
        spare = GPT(CONFIG)
        spare.blocks[0].spare = torch.nn.Linear(64, 64)
    plan = PLANS[name]
    examined = subject_of(spare, plan, batch(), optimizer=torch.optim.SGD)
    runs = [dry_run(examined, plan, rank)[0] for rank in range(plan.devices)]
    assert examined.unreached == {"blocks.0.spare.weight", "blocks.0.spare.bias"}
    assert gradients_summed(runs, PlannedLayers(plan, trace(spare, batch()))).verdict is Verdict.PASSED


def test_a_missing_sum_of_gradients_on_one_rank() -> None:
    """The other rank waits for it; and the rank's gradients are not summed."""
    fault = patch("galvatron_lite.parallelism.data.apply._launch", lambda _bucket: None)
    found = failed(with_fault(DATA, fault, [1]), DATA)
    assert {FIT, PROGRESS} & set(found)
    assert "Rank 1" in found[GRADIENTS].said
    assert "ranks 0, 1" in found[GRADIENTS].said


def test_a_missing_sum_of_gradients_on_all_ranks() -> None:
    """Nobody waits; still it is found."""
    fault = patch("galvatron_lite.parallelism.data.apply._launch", lambda _bucket: None)
    found = failed(with_fault(DATA, fault, [0, 1]), DATA)
    assert set(found) == {GRADIENTS}
    assert found[GRADIENTS].said.startswith("Rank 0 (stage 0): gradients of one of before .. after are not summed over")


def test_a_wrong_group() -> None:
    """On one rank a gradient group of other ranks than those the plan puts together."""
    plan = PLANS["mixed"]
    group = ProcessGroups.group

    def other(groups: ProcessGroups, ranks: Sequence[int], purpose: str) -> Any:
        moved = {(0, 2): (0, 1), (1, 3): (2, 3)}.get(tuple(ranks), ranks) if purpose == "gradients" else ranks
        return group(groups, moved, purpose)

    found = failed(with_fault(plan, patch.object(ProcessGroups, "group", other)), plan)
    assert found[FIT].said == "Rank 2 uses the group of ranks 0, 2 (gradients), which rank 0 does not use."
    assert "rank 0's groups for gradients: ranks 0, 1, 2, 3; ranks 0, 1" in found[FIT].details
    assert "uses ranks 0, 1 for gradients" in found[GROUPS].said
    assert "Rank 0" in found[GRADIENTS].said


def test_sends_in_another_order() -> None:
    """Two micro-batches of equal shapes, the later one sent first."""
    send, held = Sender.send, []

    def late(sender: Sender, tensors: Any, room: int, announcement: Any = None) -> None:
        held.append(announcement)
        place = _LOG.get().place
        before = place.microbatch
        if len(held) == 2:
            place.microbatch = 2  # what is sent now was made of it
        send(sender, tensors, room, announcement)
        place.microbatch = before

    found = failed(with_fault(PIPELINE, patch.object(Sender, "send", late)), PIPELINE)
    assert "are of other micro-batches" in found[FIT].said
    assert "rank 0" in found[FIT].said


def test_a_receive_before_the_send_that_it_answers() -> None:
    """Stage 0 waits for a gradient before it has sent what that is of: a circle."""
    isend, held = dist.isend, []

    def waits(tensor: Any, peer: int, group: Any = None) -> Any:
        if tensor.is_floating_point() and not held:
            held.append(dist.recv(torch.empty_like(tensor), peer, group=group))
        return isend(tensor, peer, group=group)

    found = failed(with_fault(PIPELINE, patch.object(dist, "isend", waits)), PIPELINE)
    assert found[PROGRESS].said == "Ranks wait for one another for ever: 0 → 1 → 0."


def test_a_layer_with_another_split() -> None:
    """All ranks agree, and do something else than the plan."""
    plan = plan_with(Strategy(data=2, tensor=2))
    found = failed(right_runs(PLANS["mixed"]), plan)
    assert FIT not in found
    assert any("blocks.1 on rank 0" in line for line in (found[SPLITS].said, *found[SPLITS].details))


def test_a_stage_that_begins_one_layer_late() -> None:
    early = write_plan([NAMES[:1], NAMES[1:]], {name: Strategy() for name in NAMES}, devices=2, batch=8, microbatches=4)
    found = failed(right_runs(early), PIPELINE)
    assert "Rank 0 (stage 0) has not blocks.0" in found[STAGES].said
    assert any("has blocks.0" in line for line in found[STAGES].details)


def test_an_activation_that_is_kept() -> None:
    fault = patch("galvatron_lite.parallelism.wrapping.apply_recompute", lambda *_: None)
    found = failed(with_fault(AGAIN, fault, [0, 1]), AGAIN)
    assert set(found) == {KEPT}
    assert "blocks.1 on rank 0" in found[KEPT].said
    assert any("keeps" in line and "nothing computed again" in line for line in found[KEPT].details)


def priced(plan: Plan, runs: Sequence[RoleRun], budget: int) -> Plan:
    """The plan, predicted to take what a run took."""
    memory = replace(runs[0].peak, context=1000)
    prediction = Prediction(1.0, TimeBreakdown(), 1.0, 1.0, 0.5, memory.total)
    origin = Provenance("", "", "", "", "", {}, budget, Proof.GIVEN)
    stages = tuple(replace(stage, memory=memory) for stage in plan.stages)
    return replace(plan, stages=stages, prediction=prediction, provenance=origin)


def test_memory_over_the_budget_and_unlike_the_prediction() -> None:
    runs = right_runs(DATA)
    total = runs[0].peak.total + 1000
    assert failed(runs, priced(DATA, runs, total)) == {}
    found = failed(runs, priced(DATA, runs, total - 1))
    assert set(found) == {BUDGET}
    assert found[BUDGET].said.startswith("Ranks 0, 1 (stage 0): ")
    more, most = ([replace(run, peak=more_of(run.peak, share)) for run in runs] for share in (10, 3))
    assert checks_of(more, priced(DATA, runs, 2 * total))[MEMORY].verdict is Verdict.DIFFERS
    assert MEMORY in failed(most, priced(DATA, runs, 2 * total))
    assert BUDGET in failed(more, priced(DATA, runs, total))
    little = [replace(run, peak=more_of(run.peak, 40)) for run in runs]
    assert "--mem" in failed(little, priced(DATA, runs, total))[BUDGET].said


def test_categories_are_compared_at_the_moment_that_was_predicted() -> None:
    """The optimizer's moment and one of backward may take as many bytes, of other kinds."""
    updating = MemoryBreakdown(parameters=2**30, optimizer=2**29)
    backward = replace(updating, optimizer=0, activations=2**29)
    samples = (Sample(1, During.BACKWARD, 0, "", backward), Sample(2, During.OPTIMIZER, -1, "", updating))
    run = replace(right_runs(DATA)[0], peak=backward, samples=samples)
    for memory, verdict in ((updating, Verdict.PASSED), (replace(backward, parameters=2**29), Verdict.FAILED)):
        predicted = priced(DATA, [replace(run, peak=memory)], 2**40)
        assert memory_checks([run], predicted)[0].verdict is verdict


def test_what_the_default_budget_leaves_free() -> None:
    """A little more than 95 % of the device passes, with a word; as much more than a budget that was given does not."""
    cluster = load_cluster("v100", 2)
    memory = cluster.device.memory
    run = right_runs(DATA)[0]
    for budget, verdict in ((round(0.95 * memory), Verdict.DIFFERS), (round(0.9 * memory), Verdict.FAILED)):
        peak = replace(MemoryBreakdown(), activations=budget + 2**20)
        fuller = replace(run, peak=peak)
        check = memory_checks([fuller], priced(DATA, [fuller], budget), cluster)[1]
        assert (check.name, check.verdict) == (BUDGET, verdict)
        assert ("leaves free" in check.said) == (verdict is Verdict.DIFFERS)


def test_findings_common_to_ranks_are_reported_once() -> None:
    lines = ["Rank 0 (stage 0): a.", "Rank 1 (stage 0): a.", "Rank 2 (stage 1): a.", "Rank 4 (stage 1): b.", "c", "c"]
    assert folded(lines) == ["Ranks 0 to 2 (stages 0, 1): a.", "Rank 4 (stage 1): b.", "c"]
    assert folded(["stage 0: x", "known: y", "stage 1: x"]) == ["stages 0, 1: x", "known: y"]


def more_of(peak: MemoryBreakdown, share: int) -> MemoryBreakdown:
    return replace(peak, activations=peak.activations + peak.total // share)


@cache
def profile() -> Profile:
    return estimate_profile(graph(), load_cluster("a100-80gb", 4), precision="fp32", name="gpt")


def of(kind: MessageType, bytes_given: int, **more: tuple[int, ...]) -> Message:
    return replace(message(kind, (0, 1, 2, 3), shape=(bytes_given,)), bytes=bytes_given, **more)


def test_wire_bytes_of_one_message() -> None:
    """By hand, four ranks and 400 bytes given by each."""
    assert wire_bytes(of(MessageType.ALL_REDUCE, 400), 0) == 600
    assert wire_bytes(of(MessageType.ALL_GATHER, 400), 0) == 1200
    assert wire_bytes(of(MessageType.REDUCE_SCATTER, 400), 0) == 300
    assert wire_bytes(of(MessageType.ALL_TO_ALL, 400), 0) == 300
    assert wire_bytes(of(MessageType.ALL_TO_ALL, 400, sent=(100,) * 4, taken=(10, 20, 30, 40)), 1) == 80
    assert wire_bytes(of(MessageType.SEND, 400), 0) == 400
    assert wire_bytes(replace(of(MessageType.RECEIVE, 400), bytes=0), 0) == 0


def test_priced_bytes_are_the_closed_form() -> None:
    """All gradients once a step in an all-reduce of two ranks; twice a boundary tensor for every micro-batch."""
    found = predicted_bytes(LayerPricer(profile()), PlannedLayers(PLANS["data"], graph()), 0)
    assert found["data"] == 4 * graph().parameters
    ends = predicted_bytes(LayerPricer(profile()), PlannedLayers(PLANS["pipeline"], graph()), 0)
    assert ends["pipeline"] == PLANS["pipeline"].microbatches * 2 * 16 * 32 * 4


@pytest.mark.parametrize("name", PLANS)
def test_what_is_sent_is_what_is_priced(name: str) -> None:
    check = volume(right_runs(PLANS[name]), PLANS[name], profile())
    assert check.verdict is Verdict.PASSED, (check.said, *check.details)
    assert check.details


def test_messages_that_are_not_priced_are_found() -> None:
    """Gradients that are summed twice."""
    runs = right_runs(PLANS["data"])
    twice = [replace(run, messages=run.messages * 2) for run in runs]
    check = volume(twice, PLANS["data"], profile())
    assert check.verdict is Verdict.FAILED
    assert check.said.startswith("Stage 0 sends")
    assert any("for data" in line for line in check.details)
