"""The runtime without data: what is recorded, and under which names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Recompute, Role
from galvatron_lite.model.zoo.gpt import GPT
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Proof, Provenance
from galvatron_lite.verify.dry.ledger import Ledger
from galvatron_lite.verify.dry.mode import DryMode, DryRunError
from galvatron_lite.verify.dry.roles import named_for
from galvatron_lite.verify.dry.step import dry_run, subject_of
from galvatron_lite.verify.dry.world import RankPlace
from galvatron_lite.verify.schema import During, MessageType, RoleRun
from tests.equivalence.families import build_family
from tests.equivalence.plans import uniform_plan, write_plan
from tests.verify.worlds import CONFIG, NAMES, batch, in_stages, model


def run(strategy: Strategy, microbatches: int = 2) -> RoleRun:
    graph = trace(model(), batch())
    plan = uniform_plan(graph, strategy, batch=8, microbatches=microbatches)
    return dry_run(subject_of(model(), plan, batch()), plan, plan.devices - 1)[0]


def parameters() -> int:
    return 4 * sum(one.numel() for one in model().parameters())


def test_one_process_holds_what_adamw_needs_and_sends_nothing() -> None:
    found = run(Strategy())
    assert found.messages == ()
    # AdamW counts steps in one float for each parameter
    assert found.peak.parameters == parameters()
    assert 0 <= found.peak.optimizer - 2 * parameters() <= 4 * len(list(model().parameters()))
    assert found.kept["blocks.0"] == found.kept["blocks.1"] > 0
    assert max(one.memory.total for one in found.samples) == found.peak.total


def test_zero_shares_states_and_gathers_layers() -> None:
    whole, shared = run(Strategy()), run(Strategy(zero=4, zero_stage=3))
    assert 0.24 < shared.peak.optimizer / whole.peak.optimizer < 0.26
    kinds = {one.kind for one in shared.messages if one.phase is not During.SETUP}
    assert {MessageType.ALL_GATHER, MessageType.REDUCE_SCATTER} <= kinds
    (block,) = [one for one in shared.splits if one.layer == "blocks.0"]
    weight = next(one for one in block.parameters if len(one.whole) == 2)
    assert weight.sharded
    assert weight.held == (weight.whole[0] // 4, weight.whole[1])


def test_tensor_ranks_sum_twice_a_pass() -> None:
    found = run(Strategy(tensor=2), microbatches=1)
    sums = [one for one in found.messages if one.layer == "blocks.0" and one.kind is MessageType.ALL_REDUCE]
    assert [one.phase for one in sums] == [During.FORWARD] * 2 + [During.BACKWARD] * 2
    assert {one.bytes for one in sums} == {8 * 16 * 32 * 4}


def test_recomputation_runs_forward_twice_and_keeps_the_input() -> None:
    plain, again = run(Strategy()), run(Strategy(recompute=Recompute.FULL))
    assert [one.forwards for one in plain.splits if one.layer == "blocks.1"] == [2]
    assert [one.forwards for one in again.splits if one.layer == "blocks.1"] == [4]
    assert again.kept["blocks.0"] == 4 * 16 * 32 * 4 < plain.kept["blocks.0"]


@pytest.mark.parametrize("recompute", list(Recompute))
def test_what_code_makes_in_place_of_an_output_is_that_output(recompute: Recompute) -> None:
    """The first block takes the sum of an embedding and positions, which code between layers makes."""
    subject = build_family("plain", 8)
    graph = trace(*subject[:2])
    plan = uniform_plan(graph, Strategy(recompute=recompute), batch=8, microbatches=2)
    kept = dry_run(subject_of(subject[0], plan, subject[1]), plan, 0)[0].kept
    assert kept["blocks.0"] == kept["blocks.1"] == 4 * graph.kind_of(graph.layers[1]).kept[recompute].total


def test_stages_get_shapes_from_the_stage_before() -> None:
    strategies = dict.fromkeys(NAMES, Strategy(data=2))
    plan = write_plan(in_stages(2), strategies, devices=4, batch=8, microbatches=4)
    subject = subject_of(model(), plan, batch())
    first, said = dry_run(subject, plan, 1)
    last, _ = dry_run(subject, plan, 3, lambda _, purpose, place, number: said[purpose, place][number])
    sent = [one for one in first.messages if one.kind is MessageType.SEND and one.dtype == "float32"]
    got = [one for one in last.messages if one.kind is MessageType.RECEIVE and one.dtype == "float32"]
    assert [one.shape for one in sent] == [one.shape for one in got] == [(1, 16, 32)] * 4
    assert {one.peer for one in sent} == {3}
    assert [one.microbatch for one in sent] == [0, 1, 2, 3]


def test_products_of_groups_have_the_shapes_of_real_ones() -> None:
    ends = torch.tensor([16, 48], dtype=torch.int32)
    rows, columns, each, two = (48, 16), (16, 48), (2, 16, 32), (2, 32, 16)
    for first, second, offsets in ((rows, each, ends), (columns, rows, ends), (two, each, None)):
        real = functional.grouped_mm(
            torch.zeros(first, dtype=torch.bfloat16), torch.zeros(second, dtype=torch.bfloat16), offs=offsets
        )
        with DryMode(Ledger(RankPlace())):
            made = functional.grouped_mm(torch.zeros(first), torch.zeros(second), offs=offsets)
        assert (made.shape, made.dtype) == (real.shape, torch.float32)


def test_what_needs_data_is_named_with_its_place() -> None:
    class Picky(GPT):
        def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
            loss = super().forward(tokens, labels)
            return loss if loss.device.type == "meta" else loss * loss.reshape(1).nonzero().shape[0]

    with torch.device("meta"):
        picky = Picky(CONFIG)
    plan = uniform_plan(trace(model(), batch()), Strategy(), batch=8)
    with pytest.raises(DryRunError, match="stops in forward"):
        dry_run(subject_of(picky, plan, batch()), plan, 0)


def _plan(blocks: Sequence[str]) -> Plan:
    names = ["before", *blocks, "after"]
    apart = {
        name: Strategy(data=2) if place % 2 else Strategy(zero=2, zero_stage=1) for place, name in enumerate(names)
    }
    return write_plan([names], apart, devices=2, batch=2)


def _layers(blocks: Sequence[str]) -> list[Layer]:
    middle = [Layer(name, "block", Role.BLOCK) for name in blocks]
    return [Layer("before", "before", Role.BEFORE), *middle, Layer("after", "after", Role.AFTER)]


OWN = [f"blocks.{number}" for number in range(4)]
SHAPES = [f"layers.{number}" for number in range(4)]


def test_names_of_a_shape_become_those_of_the_module() -> None:
    assert named_for(_plan(SHAPES), _layers(OWN)) == _plan(OWN)
    assert named_for(_plan(OWN), _layers(OWN)) == _plan(OWN)
    with pytest.raises(InputError, match=r"plan is for 5 layers, the model has 6"):
        named_for(_plan(SHAPES[:3]), _layers(OWN))


def test_one_layer_between_encoder_and_decoder_may_be_several() -> None:
    planned = ["encoder.layers.0", "encoder.layers.1", "bridge", "decoder.layers.0"]
    own = ["encoder.block.0", "encoder.block.1", "encoder.norm", "decoder.embed_tokens", "decoder.block.0"]
    runs = [(run.first, run.last, run.count) for run in named_for(_plan(planned), _layers(own)).stages[0].runs]
    assert runs[3] == ("encoder.norm", "decoder.embed_tokens", 2)
    assert [run[0] for run in runs] == ["before", *own[:3], own[4], "after"]
    with pytest.raises(InputError, match=r"plan is for 6 layers, the model has 8"):
        named_for(_plan(planned), _layers([*own, "decoder.block.1"]))
    plan = _plan(planned)
    whole = replace(plan.stages[0].runs[0], last="after", count=6)
    joined = named_for(replace(plan, stages=(replace(plan.stages[0], runs=(whole,)),)), _layers(own))
    assert [(run.first, run.last, run.count) for run in joined.stages[0].runs] == [("before", "after", 7)]


def test_a_changed_layer_name_is_reported() -> None:
    with pytest.raises(InputError, match=r"'blocks\.9'.*no such layer.*blocks\.3"):
        named_for(_plan([*OWN[:3], "blocks.9"]), _layers(OWN))


def test_a_plan_of_another_model_with_as_many_layers_is_refused() -> None:
    with pytest.raises(InputError, match=r"'model\.layers\.0'.*no such layer.*blocks\.3"):
        named_for(_plan([f"model.{name}" for name in SHAPES]), _layers(OWN))
    made_from = Provenance("", "", "", "", "", {}, 1, Proof.GIVEN, parameters=456_000)
    plan = replace(_plan(SHAPES), provenance=made_from)
    assert named_for(plan, _layers(OWN), 460_000).stages == _plan(OWN).stages
    with pytest.raises(InputError, match=r"no layer layers\.0.*456K parameters, this one has 609K"):
        named_for(plan, _layers(OWN), 609_000)
