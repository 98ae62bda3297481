"""Bytes that ring attention moves, against Liu et al. 2023, and Ulysses, against Jacobs et al. 2023."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass, Recompute, SplitDims
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.context.cost import key_value_items
from galvatron_lite.parallelism.strategy import Strategy
from tests.factories import make_kind
from tests.parallelism.test_states_cost import work

TOKENS, HEADS, KV_HEADS, SIZE = 4096, 32, 8, 128
FLASH = Operator("core", OperatorClass.ATTENTION, (HEADS, KV_HEADS, TOKENS, TOKENS, SIZE), 1, 1, 1, 1, 1)
DIMS = SplitDims(sequence=TOKENS, heads=HEADS, kv_heads=KV_HEADS, hidden=HEADS * SIZE)
KIND = replace(make_kind("block", 100, tensor_degrees=32, recompute=list(Recompute)), operators=(FLASH,), dims=DIMS)


def ring(strategy: Strategy, moment: Moment, kind: LayerKind = KIND) -> list[Communication]:
    return [
        one for one in work(strategy, kind, samples=float(strategy.batch_degree)).communications
        if one.collective is Collective.SEND_RECV and one.moment is moment
    ]  # fmt: skip


@pytest.mark.parametrize("context", [2, 8])
@pytest.mark.parametrize("tensor", [1, 4])
def test_each_device_sends_its_block_to_all_others(context: int, tensor: int) -> None:
    # One block: 2 bytes x 2 (keys and values) x tokens / c x (key-value heads / t) x head size; c - 1 hops.
    strategy = Strategy(data=2, context=context, tensor=tensor)
    (forward,), (backward,) = ring(strategy, Moment.FORWARD), ring(strategy, Moment.BACKWARD)
    assert forward.size == 2 * 2 * TOKENS / context * KV_HEADS / tensor * SIZE
    assert (forward.count, backward.count) == (context - 1, 2 * (context - 1))
    assert forward.group == RankGroup(context, tensor, strategy.devices // context)
    assert forward.overlaps
    assert work(strategy, KIND).samples == 64 / 2 / context


def test_fewer_heads_than_slices_are_copied() -> None:
    assert key_value_items(KIND, 32) == 2 * TOKENS * SIZE


def test_plain_attention_counts_its_heads() -> None:
    product = Operator("scores", OperatorClass.MATMUL, (HEADS * TOKENS, SIZE, TOKENS), 1, 1, 1, 1, 1)
    assert key_value_items(replace(KIND, operators=(product,)), 4) == key_value_items(KIND, 4)
    assert key_value_items(make_kind("mlp", 10), 1) == 0


def test_the_ring_runs_again_with_attention() -> None:
    full = Strategy(context=4, recompute=Recompute.FULL)
    assert sum(one.count for one in ring(full, Moment.BACKWARD)) == 3 * 3
    selective = replace(full, recompute=Recompute.SELECTIVE)
    core = replace(KIND, operators=(replace(FLASH, again=True),))
    assert sum(one.count for one in ring(selective, Moment.BACKWARD, core)) == 3 * 3
    assert sum(one.count for one in ring(selective, Moment.BACKWARD)) == 2 * 3


def test_a_layer_without_attention_sends_nothing() -> None:
    assert ring(Strategy(context=4), Moment.FORWARD, make_kind("mlp", 10)) == []


def all_to_alls(strategy: Strategy, moment: Moment, kind: LayerKind = KIND) -> list[Communication]:
    return [
        one for one in work(strategy, kind, samples=float(strategy.batch_degree)).communications
        if one.collective is Collective.ALL_TO_ALL and one.moment is moment
    ]  # fmt: skip


@pytest.mark.parametrize("context", [2, 4, 8])
def test_ulysses_moves_four_shares_of_the_hidden_state(context: int) -> None:
    """Section 3.2 of arXiv:2309.14509: 4 N h / P items a device, of which (P - 1) / P leave it."""
    alike = replace(KIND, operators=(replace(FLASH, shape=(HEADS, HEADS, TOKENS, TOKENS, SIZE)),))
    strategy = Strategy(data=2, context=context, ulysses=True)
    for moment in (Moment.FORWARD, Moment.BACKWARD):
        moved = all_to_alls(strategy, moment, alike)
        assert sum(one.count for one in moved) == 4
        assert sum(one.count * one.size for one in moved) == 2 * 4 * TOKENS * HEADS * SIZE / context
        assert all(one.group == RankGroup(context, 1, 2) and not one.overlaps for one in moved)
    assert not ring(strategy, Moment.FORWARD, alike)
    assert work(strategy, alike).samples == 64 / 2 / context


def test_a_ring_moves_less_than_ulysses_only_on_few_devices() -> None:
    # With as many heads of keys as of queries a ring sends 2 N h (c - 1) / c, Ulysses 4 N h / c (c - 1) / c.
    alike = replace(KIND, operators=(replace(FLASH, shape=(HEADS, HEADS, TOKENS, TOKENS, SIZE)),))
    for context in (2, 4, 8, 16):
        (hops,) = ring(Strategy(context=context), Moment.FORWARD, alike)
        exchanged = all_to_alls(Strategy(context=context, ulysses=True), Moment.FORWARD, alike)
        left = sum(one.count * one.size for one in exchanged) * (context - 1) / context
        assert left / (hops.size * hops.count) == pytest.approx(2 / context)


@pytest.mark.parametrize(("context", "tensor", "copies"), [(4, 1, 8), (8, 1, 8), (16, 1, 16), (4, 4, 4)])
def test_ulysses_copies_heads_of_keys_that_are_too_few(context: int, tensor: int, copies: int) -> None:
    moved = all_to_alls(Strategy(context=context, tensor=tensor, ulysses=True), Moment.FORWARD)
    queries, keys = (one.size for one in moved)
    assert queries == 2 * TOKENS * HEADS / tensor * SIZE / context
    assert keys == 2 * TOKENS * copies * SIZE / context


def test_ulysses_of_a_kind_without_operators_takes_its_extents() -> None:
    moved = all_to_alls(Strategy(context=4, ulysses=True), Moment.FORWARD, replace(KIND, operators=()))
    assert [one.size for one in moved] == [
        one.size for one in all_to_alls(Strategy(context=4, ulysses=True), Moment.FORWARD)
    ]


def test_full_recompute_exchanges_again() -> None:
    again = all_to_alls(Strategy(context=4, ulysses=True, recompute=Recompute.FULL), Moment.BACKWARD)
    assert sum(one.count for one in again) == 8
    core = replace(KIND, operators=(replace(FLASH, again=True),))
    kept = all_to_alls(Strategy(context=4, ulysses=True, recompute=Recompute.SELECTIVE), Moment.BACKWARD, core)
    assert sum(one.count for one in kept) == 4
