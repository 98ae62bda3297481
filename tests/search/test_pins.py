"""Pins: what is read, what is kept, and what a backend lacks."""

from __future__ import annotations

import re

import pytest

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute, Tie
from galvatron_lite.model.shapes import load_model
from galvatron_lite.parallelism.backends import ANY, DEEPSPEED, GALVATRON
from galvatron_lite.parallelism.registry import parts_of
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.search.pin_names import check_backend, forbidden_names, pin_names, schedules_named
from galvatron_lite.search.pins import NOTHING, Pins, read_pins
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.space import Fixed, Space
from tests.analysis.cases import small
from tests.factories import make_graph, make_kind

GRAPH = make_graph(
    [make_kind(name, 1, tensor_degrees=24) for name in ("before", "block", "after")],
    ["before", *["block"] * 10, "after"],
)


def pins(*fix: str, forbid: tuple[str, ...] = ()) -> Pins:
    return read_pins(fix, forbid, GRAPH)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("pp=4", "pipeline", 4),
        ("pipeline=1", "pipeline", 1),
        ("stages=2", "pipeline", 2),
        ("microbatches=8", "microbatches", 8),
        ("gradient-accumulation=8", "microbatches", 8),
        ("schedule=1f1b", "schedule", Schedule.ONE_F_ONE_B),
        ("schedule=ZB1P", "schedule", Schedule.ZERO_BUBBLE_1P),
        ("schedule=interleaved", "schedule", Schedule.INTERLEAVED),
        ("virtual=2", "virtual", 2),
        ("vpp=3", "virtual", 3),
    ],
)
def test_what_is_chosen_once(given: str, name: str, value: object) -> None:
    assert pins(given) == Pins(Fixed(**{name: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("tp=2", "tensor", 2),
        ("Tensor = 4", "tensor", 4),
        ("dp=8", "batch_degree", 8),
        ("data=2", "data", 2),
        ("zero=3", "zero_stage", 3),
        ("zero=0", "zero_stage", 0),
        ("fsdp=8", "zero", 8),
        ("sp=on", "sequence_parallel", True),
        ("sequence_parallel=false", "sequence_parallel", False),
        ("cp=2", "context", 2),
        ("ulysses=yes", "ulysses", True),
        ("ep=4", "expert", 4),
        ("etp=1", "expert_tensor", 1),
        ("recompute=full", "recompute", Recompute.FULL),
        ("ckpt=on", "recompute", Recompute.FULL),
        ("ac=selective", "recompute", Recompute.SELECTIVE),
        ("offload=optimizer", "offload", Offload.STATES),
        ("offload=none", "offload", Offload.NONE),
    ],
)
def test_what_every_layer_chooses(given: str, name: str, value: object) -> None:
    """Embedding and head of this model have neither experts nor tokens to share, and nothing to recompute."""
    model = load_model("mixtral-8x7b")
    known = read_pins([given], [], model).fixed
    blocks = value in {True, Recompute.FULL, Recompute.SELECTIVE} or name in {"expert", "expert_tensor"}
    for layer in model.layers:
        found = dict((*known.strategy, *known.pins_of(layer.name)))
        pinned = not blocks or layer.name.startswith("layers.") or (name, value) == ("expert_tensor", 0)
        assert found == ({name: value} if pinned else {})
    assert pins(f"l3.{given}") == Pins(Fixed(layers=(("l3", name, value),)))
    assert hasattr(Strategy(), name)


def test_what_no_layer_offers() -> None:
    with pytest.raises(InputError, match=r"--fix expert: '8' cannot be used. No layer of test offers it\."):
        pins("ep=8")
    with pytest.raises(InputError, match=r"--fix recompute: 'full'.*No layer of test offers it\."):
        pins("recompute=full")


def test_what_is_said_of_a_layer_holds_there_beside_what_is_said_of_all() -> None:
    fixed = pins("l3.tp=1", "tp=2").fixed
    assert fixed.strategy == ()
    assert dict(fixed.pins_of("l3")) == {"tensor": 1}
    assert all(dict(fixed.pins_of(f"l{place}")) == {"tensor": 2} for place in range(12) if place != 3)


@pytest.mark.parametrize(
    ("fix", "forbid", "said"),
    [
        (["tpp=2"], [], r"--fix: 'tpp' is unknown. Did you mean tp or pp\?"),
        (["recompte=full"], [], "Did you mean recompute"),
        (["pp"], [], "NAME=VALUE"),
        (["pp="], [], "NAME=VALUE"),
        (["pp=0"], [], "1 or more"),
        (["pp=two"], [], "1 or more"),
        (["tp=-2"], [], "1 or more"),
        (["zero=4"], [], "stages 0 .off., 1, 2 and 3"),
        (["sp=maybe"], [], "on or off"),
        (["recompute=ful"], [], r"Did you mean full\? Known: none, selective, full"),
        (["schedule=1f2b"], [], "Did you mean 1f1b"),
        (["offload=everything"], [], "none, states, activations, all"),
        (["l99.tp=2"], [], r"Did you mean l9\? Layers of test: l0, l1, l2, …, l10, l11"),
        (["blocks.*.tp=2"], [], "Layers of test"),
        (["l3.pp=2"], [], "once for the whole plan"),
        (["pp=2", "pp=4"], [], "also fixed to 2"),
        (["tp=2", "tensor=4"], [], "also fixed to 2"),
        (["microbatches=2", "microbatch=4"], [], "the same as microbatches"),
        (["spatial=2"], [], r"Did you mean height, width or depth\?"),
        (["rows=2"], [], r"Did you mean height\?"),
        ([], ["pixels"], r"Did you mean spatial\?"),
        ([], ["tensr"], r"'tensr' is unknown. Did you mean tensor\?"),
        (["tp=2"], ["tp"], "--forbid: 'tensor'|also fixed to 2"),
        (["l2.recompute=full"], ["recompute"], "also fixed to full"),
        (["pp=2"], ["pipeline"], "also fixed to 1"),
        (["fsdp=2"], ["dp"], "also fixed to 2"),
        (["sp=on"], ["sequence"], "also fixed to True"),
    ],
)
def test_what_cannot_be_pinned(fix: list[str], forbid: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_pins(fix, forbid, GRAPH)


def test_equal_pins_and_pins_that_a_ban_implies_are_no_contradiction() -> None:
    assert pins("pp=2", "pipeline=2") == pins("pp=2")
    assert pins("tp=1", "recompute=none", forbid=("tp", "recompute")).fixed.forbidden == ("tensor", "recompute")


def test_forbidden_dimensions_by_their_names() -> None:
    assert pins(forbid=("tp", "sp", "tensor")).fixed.forbidden == ("tensor", "sequence")
    assert pins(forbid=("dp",)).fixed.forbidden == ("data", "zero")
    assert pins(forbid=("pp",)).fixed == Fixed(pipeline=1, forbidden=("pipeline",))
    known = {name for names in forbidden_names().values() for name in names}
    assert known == {*parts_of(), "pipeline", "branches"}


def test_no_two_pins_share_a_name_and_each_says_what_it_means() -> None:
    names = [name for pin in pin_names() for name in (pin.name, *pin.aliases)]
    assert len(names) == len(set(names))
    assert all(pin.means for pin in pin_names())


@pytest.mark.parametrize(
    ("fix", "devices", "batch", "count"),
    [
        (["microbatch=16"], 8, 64, 4),
        (["mbs=2", "dp=4"], 8, 64, 8),
        (["mbs=1", "pp=2", "tp=2", "cp=1"], 8, 64, 32),
        (["mbs=4", "pp=1", "tp=1", "cp=1"], 8, 64, 2),
    ],
)
def test_sizes_of_micro_batches_become_counts(fix: list[str], devices: int, batch: int, count: int) -> None:
    assert pins(*fix).at(devices, batch).microbatches == count


def test_forbidden_degrees_are_one_for_sizes_too() -> None:
    assert pins("mbs=2", "pp=2", forbid=("tp", "cp")).at(8, 64).microbatches == 8


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        (["microbatch=7"], r"divide the batch of 64 samples; the nearest: 4 or 8"),
        (["mbs=2"], "fix dp too"),
        (["mbs=2", "pp=2"], "fix dp too"),
        (["tp=3"], "--fix tensor: 3 cannot be used. It must divide the 8 devices: one of 1, 2, 4, 8"),
        (["pp=16"], "--fix pipeline: 16"),
        (["pp=2", "tp=2", "cp=4"], "--fix pipeline=2 --fix tensor=2 --fix context=4: 16 cannot be used"),
        (["dp=8", "tp=2"], "8 devices"),
        (["pp=4", "l3.tp=4"], "--fix pipeline=4 --fix tensor=4: 16 cannot be used"),
    ],
)
def test_numbers_that_do_not_divide(fix: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        pins(*fix).at(8, 64)


def test_degrees_of_unlike_layers_do_not_multiply() -> None:
    assert pins("pp=2", "l3.tp=4", "l4.cp=4").at(8, 64).pipeline == 2


def test_without_pins_nothing_is_fixed() -> None:
    assert pins() == NOTHING
    assert NOTHING.at(7, 5) == Fixed()


@pytest.mark.parametrize("fix", ["pp=2", "tp=2", "zero=3", "dp=4", "recompute=none", "microbatches=4", "microbatch=2"])
def test_the_plan_keeps_what_is_pinned(fix: str) -> None:
    kept = 0
    for seed in range(4):
        setting = small(seed)
        try:
            plan = find_plan(
                setting.profile, devices=4, global_batch=8, budget=setting.budget, runners_up=0,
                fixed=read_pins([fix], [], setting.profile.graph).at(4, 8),
            )  # fmt: skip
        except InputError:
            assert "tp" in fix  # some of these models cannot be split so
            continue
        kept += 1
        strategies = [run.strategy for stage in plan.stages for run in stage.runs]
        found = {
            "pp": {plan.pipeline}, "tp": {s.tensor for s in strategies}, "zero": {s.zero_stage for s in strategies},
            "dp": {s.batch_degree for s in strategies}, "recompute": {s.recompute.value for s in strategies},
            "microbatches": {plan.microbatches}, "microbatch": {plan.microbatch},
        }  # fmt: skip
        name, _, value = fix.partition("=")
        assert {str(one) for one in found[name]} == {value}
    assert kept


def test_schedules_by_name() -> None:
    assert schedules_named(None, None) is None
    assert schedules_named([], None) is None
    assert schedules_named(["GPipe", "1f1b", "gpipe"], None) == (Schedule.GPIPE, Schedule.ONE_F_ONE_B)
    assert schedules_named(None, Schedule.GPIPE) == (Schedule.GPIPE,)
    assert schedules_named([Schedule.GPIPE], Schedule.GPIPE) == (Schedule.GPIPE,)
    with pytest.raises(InputError, match="not among --schedule gpipe"):
        schedules_named(["gpipe"], Schedule.ONE_F_ONE_B)
    with pytest.raises(InputError, match="1f1b"):
        schedules_named(["pipedream"], None)


def test_of_two_pins_of_a_layer_the_one_that_names_fewer_layers_holds() -> None:
    for fix in (["l*.tp=2", "l3.tp=4"], ["l3.tp=4", "l*.tp=2"]):
        kept = {(layers, name): value for layers, name, value in pins(*fix).fixed.layers}
        others = {layer.name for layer in GRAPH.layers if layer.name.startswith("l")} - {"l3"}
        assert kept == {("l3", "tensor"): 4} | {(name, "tensor"): 2 for name in others}
    assert pins("l*.tp=2", "l3.tp=2", "l3.zero=3").fixed.layers[0] == ("l*", "tensor", 2)


def test_two_pins_of_a_layer_that_name_as_many_layers_are_quoted_as_typed() -> None:
    with pytest.raises(
        InputError, match=r"--fix: 'l\?1.tensor=4' cannot be used. --fix \*11.tensor=2 asks for another"
    ):
        read_pins(["l?1.tp=4", "*11.tp=2"], [], GRAPH)


def test_blocks_that_do_not_offer_a_pin_are_named() -> None:
    kinds = [make_kind(name, 1, tensor_degrees=degrees) for name, degrees in (("before", 1), ("a", 2), ("b", 1))]
    graph = make_graph(kinds, ["before", "a", "b", "a"])
    known = read_pins(["tp=2"], (), graph)
    assert known.notes == ("--fix tensor=2 is not possible for l2, and holds for the other layers",)
    assert known.fixed.layers == (("l1", "tensor", 2), ("l3", "tensor", 2))


def test_a_pin_leaves_out_layers_that_share_parameters_with_one_that_does_not_offer_it() -> None:
    kinds = [make_kind(name, 1, tensor_degrees=degrees) for name, degrees in (("before", 1), ("a", 2))]
    graph = make_graph(kinds, ["before", "a", "a"], [Tie("l0", "l2", 1)])
    assert read_pins(["tp=2"], (), graph).fixed.layers == (("l1", "tensor", 2),)


def test_layers_that_share_parameters_have_a_strategy_in_common_under_pins() -> None:
    kinds = [make_kind(name, 64, tensor_degrees=degrees) for name, degrees in (("before", 2), ("a", 2), ("b", 1))]
    graph = make_graph(kinds, ["before", "a", "b"], [Tie("l0", "l2", 1)])
    fixed = read_pins(["data=2", "tp=2"], (), graph).fixed
    first, block, second = (Space(graph, 8).strategies(one.kind, 4, fixed.at_layer(one.name)) for one in graph.layers)
    assert set(first) & set(second)
    assert {(one.data, one.tensor) for one in block} == {(2, 2)}


@pytest.mark.parametrize(
    ("pin", "lacking"),
    [
        ("schedule=interleaved", "the interleaved-1f1b schedule"),
        ("vpp=2", "several stages a group"),
    ],
)
def test_what_the_backend_lacks_is_named_as_it_was_typed(pin: str, lacking: str) -> None:
    with pytest.raises(
        InputError, match=re.escape(f"--fix: '{pin}' cannot be used. Backend deepspeed cannot run")
    ) as no:
        check_backend([pin], [], DEEPSPEED)
    assert lacking in str(no.value)
    assert "--backend any offers it" in str(no.value)
    check_backend([pin], [], ANY)


def test_schedules_that_are_asked_for_are_held_against_the_backend_too() -> None:
    check_backend(
        ["cp=2", "ulysses=on", "EP=2", "zero=3", "tp=8", "filters=2", "height=2", "schedule=gpipe", "vpp=1"],
        ["1f1b"],
        GALVATRON,
    )
    with pytest.raises(InputError, match="--schedule: 'zb1p' cannot be used") as no:
        check_backend([], ["zb1p"], DEEPSPEED)
    assert "--backend any offers it" in str(no.value)
    check_backend([], ["zb1p"], GALVATRON)
    check_backend([], ["zb1p"], ANY)
