"""Collectives of tensor parallelism, against Korthikanti et al. 2022 and Megatron-Core's cross-entropy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import reduce

import pytest

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.model.graph import LayerKind, Operator, OperatorClass, Recompute, SplitDims, TensorSplit
from galvatron_lite.parallelism.base import DimensionContext, LayerWork, Moment
from galvatron_lite.parallelism.registry import dimensions
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.tensor.cost import ASYNC
from tests.factories import make_kind
from tests.parallelism.test_states_cost import work

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


def test_plain_regions_reduce_where_they_end_and_in_backward_where_they_begin() -> None:
    assert calls(Strategy(tensor=4), Moment.FORWARD) == {(REDUCE, 300): 1}
    assert calls(Strategy(tensor=4), Moment.BACKWARD) == {(REDUCE, 100): 2}


def test_shared_tokens_are_gathered_and_scattered() -> None:
    assert calls(SEQUENCE, Moment.FORWARD) == {(GATHER, 100): 2, (SCATTER, 300): 1}
    assert calls(SEQUENCE, Moment.BACKWARD) == {(GATHER, 300): 1, (SCATTER, 100): 2}


def test_inputs_kept_as_shares_are_gathered_again() -> None:
    assert calls(SEQUENCE, Moment.BACKWARD, replace(BLOCK, regathers=2))[GATHER, 100] == 2


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


def test_ends_have_half_a_region() -> None:
    assert calls(Strategy(tensor=4), Moment.BACKWARD, EMBEDDING) == {}
    assert calls(Strategy(tensor=4), Moment.FORWARD, EMBEDDING) == {(REDUCE, 300): 1}
    assert calls(Strategy(tensor=4), Moment.BACKWARD, HEAD) == {(REDUCE, 100): 1}


def test_a_split_loss_reduces_three_figures_a_token() -> None:
    assert calls(Strategy(tensor=4), Moment.FORWARD, HEAD) == {(REDUCE, 4 * 16): 3}
    gathered = replace(HEAD, gathered_output_bytes=5000)
    assert calls(Strategy(tensor=4), Moment.FORWARD, gathered) == {(GATHER, 5000): 1}


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
