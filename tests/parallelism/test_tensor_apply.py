"""Split blocks compute what whole blocks do: threads in lockstep stand in for devices."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass, Recompute, SplitDims, TensorSplit
from galvatron_lite.parallelism.base import DimensionContext, LayerWork, Moment
from galvatron_lite.parallelism.registry import dimensions
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.tensor.apply import shard_layer
from galvatron_lite.parallelism.tensor.cost import ASYNC
from galvatron_lite.parallelism.tensor.group import ProcessTensorGroup, ShapeOnlyGroup
from galvatron_lite.parallelism.tensor.infer import infer_block, infer_edge
from galvatron_lite.parallelism.tensor.shards import ParameterShard
from galvatron_lite.parallelism.vocabulary.logits import full_logits
from tests.factories import make_kind
from tests.parallelism.sharded_compare import gather_full
from tests.parallelism.tensor_blocks import CASES, HIDDEN, TOKENS, make_case, split_and_compare
from tests.parallelism.test_states_cost import work
from tests.parallelism.thread_group import ThreadGroup, run_threads
from tests.pool import WorkerPool

WHOLE_TOKENS_ONLY = {"encoder", "cross_attention"}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_split_equals_whole(name: str, degree: int) -> None:
    case = make_case(name)
    errors = run_threads(degree, lambda group: split_and_compare(case, group, sequence_parallel=False))
    assert max(errors) <= case.tolerance


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("name", sorted(CASES.keys() - WHOLE_TOKENS_ONLY))
def test_split_tokens_equal_whole(name: str, recompute: Recompute) -> None:
    case = make_case(name)
    errors = run_threads(2, lambda group: split_and_compare(case, group, True, recompute))
    assert max(errors) <= case.tolerance


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_one_collective_a_region(sequence_parallel: bool) -> None:
    case = make_case("zoo_llama")
    plan = infer_block(case.block, case.args, case.kwargs)

    def work(group: ThreadGroup) -> tuple[dict[str, int], dict[str, int]]:
        block = copy.deepcopy(case.block)
        shard_layer(block, plan, group, sequence_parallel)
        state = case.args[0].chunk(2, 1)[group.rank] if sequence_parallel else case.args[0]
        output = block(state.clone().requires_grad_(), *case.args[1:])
        forward = dict(group.calls)
        group.calls.clear()
        output.sum().backward()
        return forward, dict(group.calls)

    if not sequence_parallel:
        assert run_threads(2, work) == [({"all_reduce": 2}, {"all_reduce": 2})] * 2
        return
    # the inputs of both regions, of which shards are kept, are gathered in backward too
    backward = {"all_gather": 4, "reduce_scatter": 2}
    assert run_threads(2, work) == [({"all_gather": 2, "reduce_scatter": 2}, backward)] * 2
    assert plan.collectives == 4


@pytest.mark.parametrize("name", ["zoo_llama", "cross_attention"])
@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_is_kept_after_a_micro_batch(name: str, frozen: bool) -> None:
    case = make_case(name)
    plan = infer_block(case.block, case.args, case.kwargs)
    shard_layer(case.block, plan, ShapeOnlyGroup(2), plan.sequence_parallel)
    seen: list[weakref.ref[Tensor]] = []
    for module in case.block.modules():
        module.register_forward_hook(lambda _m, args, _o: seen.extend(weakref.ref(a) for a in args[:1]))
    case.block.requires_grad_(not frozen)
    state = torch.randn_like(case.args[0]).chunk(2, 1)[0] if plan.sequence_parallel else torch.randn_like(case.args[0])
    memory = [torch.randn_like(case.args[1])] if name == "cross_attention" else list(case.args[1:])
    output = case.block(state.requires_grad_(), *memory, **case.kwargs)
    output.sum().backward()
    del output, state, memory
    gc.collect()
    kept = [tensor for reference in seen if (tensor := reference()) is not None]
    assert len(seen) >= 5
    assert all(any(tensor is given for given in case.args) for tensor in kept)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_one_share_runs_alone_on_meta(sequence_parallel: bool) -> None:
    case = make_case("hf_gpt2")
    block = copy.deepcopy(case.block).to("meta")
    plan = infer_block(block, (case.args[0].to("meta"), None), case.kwargs)
    shards = shard_layer(block, plan, ShapeOnlyGroup(4, rank=3), sequence_parallel)
    tokens = TOKENS // 4 if sequence_parallel else TOKENS
    state = torch.empty(2, tokens, HIDDEN, dtype=torch.float64, device="meta", requires_grad=True)
    output = block(state)
    output.sum().backward()
    assert output.shape == state.shape
    assert all(p.grad is not None and p.grad.shape == p.shape for p in block.parameters())
    assert {name: shard.local_shape for name, shard in shards.items()} == {
        name: tuple(parameter.shape) for name, parameter in block.named_parameters()
    }


def test_optimizer_made_before_splitting_still_fits() -> None:
    case = make_case("zoo_gpt")
    optimizer = torch.optim.AdamW(case.block.parameters())
    before = list(case.block.parameters())
    shard_layer(case.block, infer_block(case.block, case.args, {}), ShapeOnlyGroup(2))
    assert all(a is b for a, b in zip(before, case.block.parameters(), strict=True))
    case.block(*case.args).sum().backward()
    optimizer.step()


def test_refusals() -> None:
    case = make_case("encoder")
    plan = infer_block(case.block, case.args, case.kwargs)
    with pytest.raises(InputError, match="Use a divisor of 64"):
        shard_layer(case.block, plan, ShapeOnlyGroup(3))
    with pytest.raises(InputError, match="token by token"):
        shard_layer(case.block, plan, ShapeOnlyGroup(2), sequence_parallel=True)
    gpt = make_case("zoo_gpt")
    shard_layer(gpt.block, infer_block(gpt.block, gpt.args, {}), ShapeOnlyGroup(4), sequence_parallel=True)
    row = gpt.block.get_submodule("mlp.down_proj")
    with pytest.raises(InputError, match="sequence length"):
        row(torch.randn(1, 6, 32, dtype=torch.float64))  # 6 tokens over 4 devices


class Model(nn.Module):
    """Embedding and head, tied or not, of a vocabulary that does not divide evenly."""

    def __init__(self, tied: bool, padding: int | None) -> None:
        super().__init__()
        self.words = nn.Embedding(35, 8, padding_idx=padding)
        self.places = nn.Embedding(6, 8)
        self.transform = nn.Linear(8, 8)
        self.head = nn.Linear(8, 35)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        state = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        logits: Tensor = self.head(self.transform(state).tanh())
        return logits


def edges(model: Model, group: Any) -> dict[str, ParameterShard]:
    before = {"words": model.words, "places": model.places}
    after = {"transform": model.transform, "head": model.head}
    shards = {}
    for layer in (before, after):
        plan = infer_edge(layer, model)
        assert all(plan.max_degree % degree == 0 for degree in (2, 4))
        assert plan.max_degree <= 35 or not plan.heads
        shards |= shard_layer(layer, plan, group)
    return shards


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("padding", [None, 0, 34])
@pytest.mark.parametrize("degree", [2, 4])
def test_edges_equal_whole(tied: bool, padding: int | None, degree: int) -> None:
    torch.manual_seed(0)
    model = Model(tied, padding).double()
    ids = torch.randint(0, 35, (3, 6))
    ids[0, :2] = torch.tensor([0, 34])

    def losses(split: Model) -> Tensor:
        output = split(ids)
        output.logsumexp(-1).square().sum().backward()
        return full_logits(output.detach())

    def work(group: ThreadGroup) -> dict[str, Tensor]:
        split = copy.deepcopy(model)
        shards = edges(split, group)
        assert (split.head.weight is split.words.weight) == tied
        output = losses(split)
        gradients = {name: value.grad for name, value in split.named_parameters() if value.grad is not None}
        assert {name: tuple(value.shape) for name, value in gradients.items()} == {
            name: shards[name].local_shape for name in gradients
        }
        return {"": output} | {name: gather_full(value, shards[name], group) for name, value in gradients.items()}

    results = run_threads(degree, work)
    expected = {"": losses(model)} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


def test_tied_layers_split_by_different_degrees_are_refused() -> None:
    model = Model(tied=True, padding=None)
    before, after = {"words": model.words}, {"head": model.head}
    shard_layer(before, infer_edge(before), ShapeOnlyGroup(2))
    with pytest.raises(InputError, match="alike"):
        shard_layer(after, infer_edge(after), ShapeOnlyGroup(4))


@given(st.integers(1, 500), st.integers(1, 16))
def test_shares_cover_everything_evenly(extent: int, degree: int) -> None:
    shares = [share(extent, degree, rank) for rank in range(degree)]
    assert [index for start, length in shares for index in range(start, start + length)] == list(range(extent))
    lengths = [length for _, length in shares]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def collectives() -> list[Any]:
    group = ProcessTensorGroup()
    mine = torch.arange(8.0).reshape(2, 4) + 10 * group.rank
    results = [group.all_reduce(mine)]
    results += [group.all_gather(mine, dim) for dim in (0, 1, -1)]
    results += [group.reduce_scatter(mine, dim) for dim in (0, 1)]
    # strided tensors, too
    return [*results, group.all_reduce(mine.t()), group.all_gather(mine.t(), 1), group.reduce_scatter(mine.t(), 1)]


def test_collectives(pool: WorkerPool) -> None:
    first = torch.arange(8.0).reshape(2, 4)
    second, total = first + 10, 2 * first + 10
    for rank, results in enumerate(pool.run(2, collectives)):
        expected = [total, torch.cat([first, second], 0), *[torch.cat([first, second], 1)] * 2]
        expected += [total.chunk(2, 0)[rank], total.chunk(2, 1)[rank]]
        expected += [total.t(), torch.cat([first.t(), second.t()], 1), total.t().chunk(2, 1)[rank]]
        torch.testing.assert_close(results, expected)


# Collectives of tensor parallelism, against Korthikanti et al. 2022 and Megatron-Core's cross-entropy.


GATHER, SCATTER, REDUCE = Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE
BLOCK = replace(
    make_kind("block", 1200, tensor_degrees=4, recompute=list(Recompute)),
    input_bytes=100, output_bytes=300, tensor_gathers=2, tensor_scatters=1,
)  # fmt: skip
ENDS = SplitDims(sequence=16, hidden=4, vocab=32)
HEAD = replace(BLOCK, tensor_gathers=1, tensor_scatters=0, dims=ENDS)
EMBEDDING = replace(BLOCK, tensor_gathers=0, tensor_scatters=1, dims=ENDS)
SEQUENCE = Strategy(tensor=4, sequence_parallel=True)


def calls(strategy: Strategy, moment: Moment, kind: LayerKind = BLOCK) -> Counter[tuple[Collective, float]]:
    """How often each collective runs with how many bytes, of one sample."""
    counts: Counter[tuple[Collective, float]] = Counter()
    for one in work(strategy, kind, samples=float(strategy.batch_degree)).communications:
        if one.moment is moment:
            counts[one.collective, one.size] += one.count
    return counts


PLAIN, FORWARD, BACKWARD = Strategy(tensor=4), Moment.FORWARD, Moment.BACKWARD
SENT: dict[str, tuple[Strategy, Moment, LayerKind, dict[tuple[Collective, float], int]]] = {
    "plain regions reduce where they end": (PLAIN, FORWARD, BLOCK, {(REDUCE, 300): 1}),
    "and in backward where they begin": (PLAIN, BACKWARD, BLOCK, {(REDUCE, 100): 2}),
    "shared tokens are gathered and scattered": (SEQUENCE, FORWARD, BLOCK, {(GATHER, 100): 2, (SCATTER, 300): 1}),
    "and in backward the other way round": (SEQUENCE, BACKWARD, BLOCK, {(GATHER, 300): 1, (SCATTER, 100): 2}),
    "inputs kept as shares are gathered again": (
        SEQUENCE, BACKWARD, replace(BLOCK, regathers=2), {(GATHER, 300): 1, (GATHER, 100): 2, (SCATTER, 100): 2},
    ),
    "what is before the blocks ends a region": (PLAIN, FORWARD, EMBEDDING, {(REDUCE, 300): 1}),
    "and begins none": (PLAIN, BACKWARD, EMBEDDING, {}),
    "what is behind them begins one": (PLAIN, BACKWARD, HEAD, {(REDUCE, 100): 1}),
    "a split loss reduces three figures a token": (PLAIN, FORWARD, HEAD, {(REDUCE, 4 * 16): 3}),
    "whole logits are gathered": (PLAIN, FORWARD, replace(HEAD, gathered_output_bytes=5000), {(GATHER, 5000): 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
def test_what_a_layer_sends(name: str) -> None:
    strategy, moment, kind, expected = SENT[name]
    assert calls(strategy, moment, kind) == expected


@pytest.mark.parametrize(("precision", "bytes_an_item"), [("fp8", 1), ("fp8-rowwise", 2), ("", 2)])
def test_fp8_is_gathered_after_the_cast_and_reduced_wide(precision: str, bytes_an_item: int) -> None:
    # TransformerEngine and torchao's Float8ColwiseParallel; scales of rows are found on gathered tensors.
    matmul = Operator("mlp.up", OperatorClass.MATMUL, (8, 4, 4), 1, 1, 2, 1, 1, 1, precision=precision)
    kind = replace(BLOCK, operators=(matmul,))
    assert calls(SEQUENCE, Moment.FORWARD, kind) == {(GATHER, 50 * bytes_an_item): 2, (SCATTER, 300): 1}
    assert calls(SEQUENCE, Moment.BACKWARD, kind) == {(GATHER, 150 * bytes_an_item): 1, (SCATTER, 100): 2}
    assert calls(Strategy(tensor=4), Moment.FORWARD, kind) == {(REDUCE, 300): 1}


@pytest.mark.parametrize(
    ("strategy", "beside"), [(Strategy(tensor=4), {REDUCE: 2}), (SEQUENCE, {SCATTER: 2, GATHER: 2})]
)
def test_what_the_gradient_of_inputs_needs_may_run_beside_that_of_weights(
    strategy: Strategy, beside: dict[Collective, int]
) -> None:
    # Megatron-LM's LinearWithGradAccumulationAndAsyncCommunication: neither forward nor row-split matmuls.
    named = [one for one in work(strategy, replace(BLOCK, regathers=2)).communications if one.cause == ASYNC]
    assert {one.collective: one.count for one in named} == beside
    assert {(one.moment, one.size / 64) for one in named} == {(Moment.BACKWARD, 100)}


@pytest.mark.parametrize(
    ("operator", "repeated"),
    [
        (None, {(GATHER, 100): 2}),
        (Operator("core", OperatorClass.ATTENTION, (1, 1, 1, 1, 1), 1, 1, 1, 1, 1, again=True), {}),
        (
            Operator("up", OperatorClass.MATMUL, (1, 1, 1), 1, 1, 1, 1, 1, weight_bytes=2, again=True),
            {(GATHER, 100): 2},
        ),
    ],
)
def test_selective_recomputation_repeats_what_it_contains(
    operator: Operator | None, repeated: dict[tuple[Collective, float], int]
) -> None:
    kind = replace(BLOCK, operators=(operator,) if operator else ())
    once = calls(SEQUENCE, Moment.BACKWARD, kind)
    again = calls(replace(SEQUENCE, recompute=Recompute.SELECTIVE), Moment.BACKWARD, kind)
    assert again - once == repeated


def test_full_recomputation_repeats_all_of_forward() -> None:
    full = replace(SEQUENCE, recompute=Recompute.FULL)
    extra = calls(full, Moment.BACKWARD) - calls(SEQUENCE, Moment.BACKWARD)
    assert extra == calls(SEQUENCE, Moment.FORWARD)


def test_context_shares_the_tokens_of_every_collective() -> None:
    strategy = replace(SEQUENCE, context=2)
    assert calls(strategy, Moment.FORWARD)[GATHER, 50] == 2


@pytest.mark.parametrize(("recompute", "forwards"), [(Recompute.NONE, 1), (Recompute.FULL, 2)])
def test_gathered_and_scattered_tensors_are_copied_where_software_does_so(recompute: Recompute, forwards: int) -> None:
    # Of one sample: 2 x 100 gathered and 300 scattered in forward, 300 gathered and 2 x 100 scattered in backward.
    per_byte = 1e-3
    strategy = replace(SEQUENCE, recompute=recompute)
    seconds = {}
    for host in (0.0, per_byte):
        context = DimensionContext(4, 8, 2, 2, 2, 2, 1, host={"gathered_per_byte": host})
        start = LayerWork(1.0, 1, False, Recompute.NONE, 1200.0, 1200.0, 1200.0, 1200.0)
        done = reduce(lambda known, one, seen=context: one.apply(known, BLOCK, strategy, seen), dimensions(), start)
        seconds[host] = done.microbatch_overhead
    assert seconds[0.0] == 0
    assert seconds[per_byte] == pytest.approx(per_byte * 500 * (forwards + 1))


def test_a_loss_on_shares_gathers_its_figures_once() -> None:
    """Tokens that are shared, too, make logits whole; what is kept of them then is that of one device."""
    kept = {Recompute.NONE: TensorSplit(tensor=800, whole=3)}
    head = replace(HEAD, gathered_output_bytes=5000, loss_bytes=12, kept=kept)
    assert calls(Strategy(tensor=4), Moment.FORWARD, head) == {(GATHER, 4 * 12): 1}
    assert work(Strategy(tensor=4), head).edge_bytes == 0
    assert calls(Strategy(tensor=1), Moment.FORWARD, head) == {}
    both = Strategy(tensor=4, context=2)
    (gathered,) = [one for one in work(both, head).communications if one.moment is Moment.FORWARD and one.count]
    assert (gathered.collective, gathered.cause) == (GATHER, "tensor")
    assert work(both, head).edge_bytes == 600 * work(both, head).samples
