"""Attention of shared tokens against torch's own on the whole sequence: outputs and gradients, on threads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass, Recompute, SplitDims
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.context import ring as kernels
from galvatron_lite.parallelism.context.cost import key_value_items
from galvatron_lite.parallelism.context.ring import AttentionTask, VisibleKeys, tasks
from galvatron_lite.parallelism.context.rules import rules_of
from galvatron_lite.parallelism.recompute.apply import recomputed
from galvatron_lite.parallelism.sharded.collectives import distribute, full_tensor
from galvatron_lite.parallelism.sharded.groups import MirroredGroup
from galvatron_lite.parallelism.sharded.tensor import Rules, ShardSpec, specs_of, to_local
from galvatron_lite.parallelism.shares import mirrored
from galvatron_lite.parallelism.strategy import Strategy
from tests.factories import make_kind
from tests.parallelism.test_states_cost import work
from tests.parallelism.thread_group import ThreadGroup, run_threads

SAMPLES, ITEMS = 2, 8


@dataclass(frozen=True)
class Given:
    """Queries, keys, values of the whole sequence, and options."""

    tensors: tuple[Tensor, Tensor, Tensor]
    options: dict[str, object]

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found: Tensor = scaled_dot_product_attention(query, key, value, **self.options)  # type: ignore[arg-type]
        return found


def given(tokens: int, heads: int, kv_heads: int, keys: int = 0, **options: object) -> Given:
    torch.manual_seed(tokens + heads)
    sizes = (heads, tokens), (kv_heads, keys or tokens), (kv_heads, keys or tokens)
    query, key, value = (torch.randn(SAMPLES, count, length, ITEMS) for count, length in sizes)
    return Given((query, key, value), options | ({"enable_gqa": True} if heads != kv_heads else {}))


def alone(one: Given) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in one.tensors]
    result = one.run(*leaves)
    (result * weights_of(result)).sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def weights_of(result: Tensor) -> Tensor:
    return torch.randn(result.shape, generator=torch.Generator().manual_seed(3))


def together(one: Given, degree: int, rules: Rules) -> list[list[Tensor]]:
    """The same on threads; every rank gives whole tensors, and sums of its gradients with those of others."""

    def work(group: ThreadGroup) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in one.tensors]
        line = MirroredGroup(group)
        shares = [distribute(leaf, (ShardSpec(2, leaf.shape[2], line),), rules) for leaf in leaves]
        result = one.run(*shares)
        assert [cut.dim for cut in specs_of(result)] == [2]
        everything = full_tensor(result)
        (everything * weights_of(everything)).sum().div(degree).backward()
        gradients = [group.all_reduce(leaf.grad) for leaf in leaves if leaf.grad is not None]
        return [everything.detach(), *gradients]

    return run_threads(degree, work)


def compare(one: Given, degree: int, strategy: Strategy) -> None:
    expected = alone(one)
    for found in together(one, degree, rules_of(strategy)):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)


RING, ULYSSES = Strategy(context=2), Strategy(context=2, ulysses=True)
BIAS = torch.randn(SAMPLES, 1, 16, 16, generator=torch.Generator().manual_seed(1))
PADDING = torch.arange(16) < torch.tensor([16, 9]).view(2, 1, 1, 1)


@pytest.mark.parametrize("strategy", [RING, ULYSSES], ids=["ring", "ulysses"])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_equals_one_process(strategy: Strategy, degree: int, heads: int, kv_heads: int, causal: bool) -> None:
    compare(given(16, heads, kv_heads, is_causal=causal), degree, strategy)


@pytest.mark.parametrize("strategy", [RING, ULYSSES], ids=["ring", "ulysses"])
@pytest.mark.parametrize("mask", [BIAS, PADDING, BIAS > 0.2], ids=["bias", "padding", "random"])
def test_attention_with_masks(strategy: Strategy, mask: Tensor) -> None:
    compare(given(16, 4, 2, attn_mask=mask), 4, strategy)


@pytest.mark.parametrize("strategy", [RING, ULYSSES], ids=["ring", "ulysses"])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"scale": 0.3}], ids=str)
def test_uneven_sequences(strategy: Strategy, options: dict[str, object]) -> None:
    compare(given(13, 4, 4, **options), 2, strategy)
    compare(given(12, 4, 4, keys=16, **options), 2, strategy)


def test_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SCORES", 100)
    compare(given(16, 4, 2, attn_mask=BIAS), 2, RING)


def test_a_bias_that_is_learnt_has_its_gradient() -> None:
    one, bias = given(16, 4, 4), BIAS.clone().requires_grad_()
    scaled_dot_product_attention(*one.tensors, attn_mask=bias).square().sum().backward()

    def work(group: ThreadGroup) -> Tensor:
        leaf = BIAS.clone().requires_grad_()
        spec = ShardSpec(2, 16, MirroredGroup(group))
        shares = [distribute(tensor, (spec,), rules_of(RING)) for tensor in one.tensors]
        scaled_dot_product_attention(*shares, attn_mask=leaf).square().sum().div(2).backward()
        return group.all_reduce(leaf.grad)

    for found in run_threads(2, work):
        torch.testing.assert_close(found, bias.grad, rtol=1e-4, atol=1e-6)


def dropped(strategy: Strategy, seed: int) -> list[list[Tensor]]:
    """Attention of equal scores: a token's output is the mean of what is kept of the values, which are ones."""
    tokens, rate = 64, 0.25
    one = Given((torch.zeros(1, 2, tokens, ITEMS), torch.zeros(1, 2, tokens, ITEMS), torch.eye(tokens)[None, None]
        .expand(1, 2, -1, -1)), {"dropout_p": rate})  # fmt: skip
    torch.manual_seed(seed)
    return together(one, 2, rules_of(strategy))


def test_dropout_of_attention() -> None:
    """What is dropped is drawn for each item once: as often as asked, in backward as in forward, unlike by rank."""
    for weights, _, _, value in dropped(RING, seed=5):
        kept = weights[0] * 64 * 0.75
        assert bool(((kept - 1).abs() < 1e-4).logical_or(kept.abs() < 1e-6).all())
        assert 0.7 < float(kept.mean()) < 0.8
        expected = weights[0].mT @ weights_of(weights)[0]
        torch.testing.assert_close(value[0], expected, rtol=1e-4, atol=1e-5)
        assert not torch.equal(kept[0, :16], kept[0, 16:32])


def test_heads_that_cannot_be_spread_are_refused() -> None:
    with pytest.raises(InputError, match=r"heads of attention.*ulysses: false"):
        together(given(16, 6, 6), 4, rules_of(ULYSSES))


def test_a_causal_ring_is_balanced() -> None:
    """Every rank has the same scores at every step: half a block of each other rank's keys."""
    size, tokens = 4, 32
    held = [mirrored(tokens, size, rank) for rank in range(size)]
    for rank in range(size):
        for other in range(size):
            found = tasks(held[rank], held[other], causal=True)
            wanted = AttentionTask((0, 8), (0, 8), VisibleKeys.BEFORE) if rank == other else None
            (one,) = found
            area = (one.rows[1] - one.rows[0]) * (one.columns[1] - one.columns[0])
            assert one == wanted if wanted else (one.seen, area) == (VisibleKeys.ALL, 32)


def test_the_ring_sends_two_blocks_of_keys_alone() -> None:
    """c - 1 hops of this rank's keys and values in forward, twice as many in backward."""
    degree, one = 4, given(16, 4, 2, is_causal=True)
    block = SAMPLES * 2 * (16 // degree) * ITEMS * 2 * 4

    def work(group: ThreadGroup) -> tuple[int, int]:
        leaves = [tensor.clone().requires_grad_() for tensor in one.tensors]
        shares = [distribute(leaf, (ShardSpec(2, 16, MirroredGroup(group)),), rules_of(RING)) for leaf in leaves]
        result = one.run(*shares)
        forward = group.sent_bytes
        result.sum().backward()
        return forward, group.sent_bytes - forward

    assert run_threads(degree, work) == [(block * (degree - 1), 2 * block * (degree - 1))] * degree


def test_selective_recomputation_keeps_a_ring() -> None:
    """The ring is one operator that is kept: keys and values do not go round once more."""
    one = given(16, 4, 2, is_causal=True)

    def work(group: ThreadGroup) -> int:
        leaves = [tensor.clone().requires_grad_() for tensor in one.tensors]

        def run(*given: Tensor) -> Tensor:
            shares = [
                distribute(tensor * 1, (ShardSpec(2, 16, MirroredGroup(group)),), rules_of(RING)) for tensor in given
            ]
            return to_local(one.run(*shares))

        recomputed(run, Recompute.SELECTIVE)(*leaves).sum().backward()
        return group.calls["exchange"]

    # c - 1 hops in forward; in backward as many, and those of gradients
    assert run_threads(4, work) == [9] * 4


def test_gathering_by_ids() -> None:
    """Items chosen by ids of shared tokens: from a whole table, and from what is shared as they are."""
    torch.manual_seed(0)
    table, ids, logits = torch.randn(2, 20), torch.randint(0, 20, (2, 16)), torch.randn(2, 16, 20)

    def work(group: ThreadGroup) -> None:
        cut = (ShardSpec(1, 16, MirroredGroup(group)),)
        shared, scores = (distribute(one, cut, rules_of(RING)) for one in (ids, logits))
        for found, expected in (
            (torch.gather(table, 1, shared), table.gather(1, ids)),
            (scores.gather(2, ids[..., None]), logits.gather(2, ids[..., None])),
        ):
            assert specs_of(found) == cut
            assert torch.equal(full_tensor(found), expected)

    run_threads(2, work)


# Bytes that ring attention moves, against Liu et al. 2023, and Ulysses, against Jacobs et al. 2023.


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
