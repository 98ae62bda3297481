"""What copies of weights in the precision of compute are priced as."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.model.graph import OperatorClass, Recompute
from galvatron_lite.model.shapes.registry import load_model
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile

HIDDEN, ENTRIES = 768, 50257
WEIGHTS = 12 * HIDDEN * HIDDEN
"""Of a block's matmuls; GPT-2 small."""
BIASES = 9 * HIDDEN


@pytest.fixture(scope="module")
def known() -> Profile:
    return estimate_profile(load_model("gpt2"), load_cluster("a100-40gb", 8), precision="bf16", name="gpt2")


def held(known: Profile, kind: str, strategy: Strategy) -> int:
    cost = LayerPricer(known).price(kind, strategy, 8, 1)
    assert cost is not None
    return int(cost.weight_copies)


def test_a_block_holds_one_of_each_weight(known: Profile) -> None:
    assert held(known, "block", Strategy(data=8)) == 2 * (WEIGHTS + BIASES)
    sliced = held(known, "block", Strategy(data=4, tensor=2))
    assert WEIGHTS <= sliced <= WEIGHTS + 2 * BIASES


@pytest.mark.parametrize("kind", ["before", "block", "after"])
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_zero_1_holds_weights_as_megatron_does(known: Profile, kind: str, recompute: Recompute) -> None:
    """2 bytes an item, 4 of gradients and 12 / 8 of masters and moments (Megatron-Core, distributed optimizer)."""
    items, again = known.graph.kinds[kind].trainable, recompute if kind == "block" else Recompute.NONE
    cost = LayerPricer(known).price(kind, Strategy(zero=8, zero_stage=1, recompute=again), 8, 1)
    assert cost is not None
    assert (cost.parameters, cost.formed_gradients, cost.weight_copies) == (2 * items, 0, 0)
    assert (cost.gradients, cost.states) == (4 * items, pytest.approx(12 * items / 8, abs=1))


def test_masters_in_host_memory_are_beside_whole_parameters(known: Profile) -> None:
    cluster = replace(known.cluster, groups=tuple(
        replace(group, device=replace(group.device, host_bandwidth=2e10, host_memory_bandwidth=2e10))
        for group in known.cluster.groups
    ))  # fmt: skip
    strategy = Strategy(zero=8, zero_stage=1, offload=Offload.STATES)
    cost = LayerPricer(replace(known, cluster=cluster)).price("block", strategy, 8, 1)
    assert cost is not None
    assert (cost.parameters, cost.weight_copies) == (4 * (WEIGHTS + BIASES + 4 * HIDDEN), 2 * (WEIGHTS + BIASES))


def test_tables_are_copied_where_a_matmul_reads_them(known: Profile) -> None:
    assert held(known, "before", Strategy(data=8)) == 0
    assert held(known, "after", Strategy(data=8)) == 2 * ENTRIES * HIDDEN
    assert held(known, "after", Strategy(data=4, tensor=2)) == ENTRIES * HIDDEN


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_new_gradient_of_a_table_is_of_its_own_precision(known: Profile, kind: str) -> None:
    pricer = LayerPricer(known)
    whole, half = (pricer.price(kind, one, 8, 1) for one in (Strategy(data=8), Strategy(data=4, tensor=2)))
    assert whole is not None
    assert half is not None
    assert whole.new_gradient == 4 * ENTRIES * HIDDEN
    # the table alone is looked up before the blocks, and read by a matmul behind them
    assert whole.cast_gradient == (4 if kind == "before" else 4 + 2) * ENTRIES * HIDDEN
    assert half.new_gradient == pytest.approx(2 * ENTRIES * HIDDEN, rel=0.03)  # positions are not split


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_that_zero_gathers_have_no_further_copy(known: Profile, stage: int) -> None:
    assert held(known, "block", Strategy(zero=8, zero_stage=stage)) == 0


def test_experts_that_no_other_rank_has_are_not_gathered() -> None:
    mixture = estimate_profile(load_model("mixtral-8x7b"), load_cluster("h100", 16), precision="bf16", name="mixtral")
    experts, pricer = mixture.graph.kinds["block"].expert_parameters, LayerPricer(mixture)
    alone, shared = (pricer.price("block", Strategy(zero=d, zero_stage=3, expert=8), d, 1) for d in (8, 16))
    assert alone is not None
    assert shared is not None
    assert alone.weight_copies == pytest.approx(2 * experts / 8, rel=1e-3)
    assert shared.weight_copies == 0
    # their gradients are summed in a buffer that is there all the time
    assert (alone.gradients, shared.gradients) == (pytest.approx(4 * experts / 8, rel=1e-3), 0)
    # gathered for use: all of the layer's parameters on a device, or those that are not its own experts'
    assert shared.transient_parameters - alone.transient_parameters == pytest.approx(2 * experts / 8, rel=1e-3)


def test_a_recurrence_has_one_copy_of_what_it_reads_again_and_again(known: Profile) -> None:
    block, steps = known.graph.kinds["block"], 16
    often = [
        replace(one, count=one.count * steps, weight_bytes=one.weight_bytes * steps)
        if one.kind is OperatorClass.MATMUL
        else one
        for one in block.operators
    ]
    kinds = known.graph.kinds | {"block": replace(block, operators=tuple(often))}
    recurrent = replace(known, graph=replace(known.graph, kinds=kinds))
    assert held(recurrent, "block", Strategy(data=8)) == pytest.approx(2 * WEIGHTS, rel=1e-3)


def test_recomputed_layers_hold_copies_of_their_own(known: Profile) -> None:
    strategy = Strategy(data=8, recompute=Recompute.FULL)
    bare = LayerPricer(replace(known, copied_bytes=0)).price("block", strategy, 8, 1)
    full = LayerPricer(known).price("block", strategy, 8, 1)
    assert bare is not None
    assert full is not None
    assert full.weight_copies == 0
    assert full.working - bare.working == 2 * (WEIGHTS + BIASES)


def test_many_are_priced_as_one(known: Profile) -> None:
    strategies = [Strategy(data=8), Strategy(zero=8, zero_stage=2), Strategy(data=4, tensor=2)]
    many = LayerPricer(known).price_many("block", strategies, 8, 1).weight_copies
    assert np.array_equal(many, [held(known, "block", one) for one in strategies])


def test_logits_are_whole_where_tokens_are_shared(known: Profile) -> None:
    """A loss on shares works with shares; where tokens are shared, logits are gathered: as much as without slices."""
    pricer, samples = LayerPricer(known), 8
    tokens = 1024 * samples
    alone = pricer.price("after", Strategy(), samples, 1)
    shares = pricer.price("after", Strategy(tensor=2), samples, 1)
    gathered = pricer.price("after", Strategy(tensor=2, context=2), 2 * samples, 1)
    assert alone is not None
    assert shares is not None
    assert gathered is not None
    # fp32 logits and their gradient, instead of those, logarithms of likelihoods and two gradients
    assert alone.working - shares.working == pytest.approx((3 - 2 / 2) * 4 * tokens * ENTRIES, rel=1e-3)
    assert gathered.working == pytest.approx(alone.working, rel=1e-3)


def test_full_precision_makes_no_copies() -> None:
    whole = estimate_profile(
        load_model("gpt2", precision="fp32"), load_cluster("a100-40gb", 8), precision="fp32", name="gpt2"
    )
    assert held(whole, "block", Strategy(data=8)) == 0
