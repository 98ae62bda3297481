"""Strategies that are offered, against every combination of values judged one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from galvatron_lite.model.graph import LayerKind, ModelGraph, OperatorClass, Recompute, SplitDims
from galvatron_lite.model.shapes import load_model
from galvatron_lite.parallelism.backends import ANY, GALVATRON, Backend
from galvatron_lite.parallelism.registry import choosing
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.search.space import Fixed, Narrowed, Space, strategies_for
from tests.factories import make_graph, make_kind

PLAIN = make_kind("block", 1200, tensor_degrees=12, recompute=[Recompute.NONE, Recompute.FULL])
ATTENTION = replace(PLAIN, dims=SplitDims(sequence=48, heads=24, kv_heads=4, hidden=96))
MIXTURE = replace(ATTENTION, dims=replace(ATTENTION.dims, experts=8), expert_parameters=800)
BARE = replace(make_kind("bare", 0, tensor_degrees=4), dims=SplitDims(), sequence_parallel=False)
KINDS = {"plain": PLAIN, "attention": ATTENTION, "mixture": MIXTURE, "bare": BARE}


def every(devices: int) -> Iterator[Strategy]:
    """All values of all fields whose degrees take the devices; experts of 8 or fewer."""
    degrees = list(product(range(1, devices + 1), repeat=4))
    flags = list(product((0, 1, 2, 3), (False, True), (False, True), (1, 2, 3, 4, 8), (0, 1)))
    for data, zero, context, tensor in degrees:
        if data * zero * context * tensor == devices:
            for stage, shared, ulysses, expert, slices in flags:
                yield Strategy(
                    data, zero, stage, tensor, shared, Recompute.NONE, context, expert, slices, ulysses
                )  # fmt: skip


def legal(kind: LayerKind, one: Strategy, devices: int) -> bool:
    """Rule by rule, as people would say them."""
    dims, shares = kind.dims, one.context * (one.tensor if one.sequence_parallel else 1)
    attends = dims.heads > 0
    slice_heads = max(dims.kv_heads // one.tensor, 1)
    return all((
        kind.tensor_degrees % one.tensor == 0,
        not one.sequence_parallel or (kind.sequence_parallel and one.tensor > 1 and dims.sequence % one.tensor == 0),
        one.context == 1 or (dims.sequence > 1 and dims.sequence % shares == 0),
        not one.ulysses or (attends and one.context > 1 and dims.heads % (one.context * one.tensor) == 0),
        not one.ulysses or slice_heads % one.context == 0 or one.context % slice_heads == 0,
        (one.zero_stage > 0) == (one.zero > 1) or (one.zero == 1 and one.context > 1),
        one.zero_stage == 0 or kind.parameters.total > 0,
        one.expert == 1 or (dims.experts > 0 and dims.experts % one.expert == 0),
        one.expert_tensor == 0 or (one.expert > 1 and one.tensor > 1),
        devices % (one.expert * (1 if one.expert_tensor else one.tensor)) == 0 or one.expert == 1,
    ))  # fmt: skip


@pytest.mark.parametrize("devices", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("name", list(KINDS))
def test_what_is_legal_is_offered_once_and_nothing_else(name: str, devices: int) -> None:
    kind = KINDS[name]
    still = Narrowed({"recompute": (Recompute.NONE,), "offload": (Offload.NONE,)})
    offered = strategies_for(kind, devices, narrowed=still)
    assert len(set(offered)) == len(offered)
    assert set(offered) == {one for one in every(devices) if legal(kind, one, devices)}


def test_what_takes_no_devices_stands_beside_all() -> None:
    kept = replace(PLAIN, kept=dict.fromkeys((Recompute.NONE, Recompute.FULL), PLAIN.parameters))
    still = Narrowed({"recompute": (Recompute.NONE,), "offload": (Offload.NONE,)})
    assert len(strategies_for(kept, 4)) == 2 * 4 * len(strategies_for(kept, 4, narrowed=still))
    nothing = {one.offload for one in strategies_for(PLAIN, 4)}
    assert nothing == {Offload.NONE, Offload.STATES}  # it keeps no activations


def test_a_causal_ring_takes_pieces_twice_as_fine() -> None:
    blocks = load_model("gpt2", sequence=None, precision="bf16").kinds["block"]
    odd = replace(blocks, dims=replace(blocks.dims, sequence=1028))
    rings = {(one.context, one.ulysses) for one in strategies_for(odd, 4)}
    assert rings == {(1, False), (2, False), (2, True), (4, True)}  # 8 pieces of 1,028 tokens are not even
    assert any(operator.causal for operator in blocks.operators if operator.kind is OperatorClass.ATTENTION)


def sensible(kind: LayerKind, one: Strategy, devices: int, node: int, tokens: int) -> bool:
    """The rules of the declared space, as its module states them."""

    def near(size: int) -> bool:
        return size <= node and (node % size == 0 or devices <= node)

    shares = one.context * (one.tensor if one.sequence_parallel else 1)
    if one.context > 1 and not one.ulysses and any(operator.causal for operator in kind.operators):
        shares *= 2
    shared = one.tensor == 1 or one.sequence_parallel or not kind.sequence_parallel
    hybrid = one.data > 1 and one.zero_stage > 0
    shards = one.zero * one.context * one.tensor
    states, kept = (getattr(one, name) for name in ("offloads_states", "offloads_activations"))
    return all((
        near(one.tensor),
        not one.ulysses or near(one.context * one.tensor),
        one.context == 1 or (shared and kind.dims.sequence >= tokens * shares),
        one.context == 1 or one.ulysses or not kind.dims.heads or kind.dims.sequence // one.context >= 4 * tokens,
        one.expert == 1 or (shared and not (one.expert_tensor and one.expert < one.tensor)),
        not hybrid or shards == node,
        not states or (one.data == 1 and (one.context == 1 or one.zero_stage > 0)),
        not kept or one.tensor == 1 or one.sequence_parallel,
    ))  # fmt: skip


@pytest.mark.parametrize(("devices", "node"), [(1, 4), (4, 4), (6, 4), (8, 4), (8, 8), (12, 4), (16, 2)])
@pytest.mark.parametrize("name", ["plain", "attention", "mixture"])
def test_the_declared_space_is_what_is_legal_and_sensible(name: str, devices: int, node: int) -> None:
    kind = replace(KINDS[name], kept={Recompute.NONE: PLAIN.parameters})
    offered = strategies_for(kind, devices, node, tokens=6)
    wanted = [one for one in strategies_for(kind, devices) if sensible(kind, one, devices, node, 6)]
    assert list(offered) == wanted


@cache
def graph_of(model: str) -> ModelGraph:
    return load_model(model, sequence=None, precision="bf16")


@pytest.mark.parametrize("backend", [GALVATRON, ANY])
@pytest.mark.parametrize("devices", [8, 64, 1024, 16384])
def test_degrees_need_not_be_powers_of_two_and_fit(backend: Backend, devices: int) -> None:
    space = Space(graph_of("llama3-8b"), 8, backend, offload=True)
    for kind in space.graph.kinds:
        offered = space.strategies(kind, devices, Fixed())
        assert all(one.devices == devices and backend.runs(one) for one in offered)
    assert {one.tensor for one in Space(graph_of("gpt3-175b"), 6).strategies("block", 12, Fixed())} == {1, 2, 3, 6}


def test_a_pin_outside_the_rules_is_taken_as_it_is() -> None:
    space = Space(graph_of("gpt3-175b"), 8)
    offered = space.strategies("block", 64, Fixed(strategy=(("tensor", 32),)))
    assert offered
    assert {one.tensor for one in offered} == {32}
    assert {one.expert for one in offered} == {1}  # the backend still has its say


def test_forbidden_dimensions_leave_the_others() -> None:
    space = Space(graph_of("mixtral-8x7b"), 8, ANY, offload=True)
    for name in ("context", "ulysses", "expert", "offload", "zero", "tensor", "recompute"):
        offered = space.strategies("block", 16, Fixed(forbidden=(name,)))
        plain = [one for one in space.strategies("block", 16, Fixed()) if Fixed(forbidden=(name,)).allows(one)]
        assert list(offered) == plain != []


def test_nothing_is_offloaded_where_the_link_is_not_known() -> None:
    assert {one.offload for one in Space(graph_of("gpt2"), 8, ANY).strategies("block", 8, Fixed())} == {Offload.NONE}


def test_backends_say_what_they_leave_out() -> None:
    (left,) = GALVATRON.missing
    assert "host memory" in left
    assert not GALVATRON.runs(Strategy(offload=Offload.ACTIVATIONS, recompute=Recompute.SELECTIVE))
    assert GALVATRON.runs(Strategy(offload=Offload.ALL, recompute=Recompute.FULL))
    assert GALVATRON.runs(Strategy(context=2, ulysses=True))
    assert all(GALVATRON.runs(Strategy(zero=2, zero_stage=stage)) for stage in (1, 2, 3))
    assert ANY.runs(Strategy(context=2, ulysses=True))


def test_every_field_is_some_dimension_s() -> None:
    kind = replace(MIXTURE, kept={Recompute.NONE: PLAIN.parameters})
    fields = {name for dimension in choosing() for option in dimension.choices(kind, 8) for name in option}
    assert fields == set(Strategy.__slots__) - {"more"}
    assert make_graph([kind], ["block"]).kinds["block"] is kind
