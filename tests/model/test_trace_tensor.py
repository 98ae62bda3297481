"""The parts of every figure against one device's share, run at degrees the capture never saw."""

import copy

import pytest

from galvatron_lite.model.batch import resize_batch
from galvatron_lite.model.graph import LayerKind, OperatorClass, Recompute, Sharding
from galvatron_lite.model.trace.figures import SAMPLES, RegionFigures, figures
from galvatron_lite.model.trace.meta import meta_copy
from galvatron_lite.model.trace.run import BlockCall, observe, run_block
from galvatron_lite.parallelism.tensor.apply import shard_layer
from galvatron_lite.parallelism.tensor.group import ShapeOnlyGroup
from galvatron_lite.parallelism.tensor.infer import infer_block
from tests.model.models import FAMILIES, TOKENS, VOCAB, captured, captured_block

SPLIT = ["gpt", "llama", "hf-gpt2", "hf-llama", "hf-qwen2", "hf-bert", "hf-vit"]


def share_of(family: str, degree: int, sequence_parallel: bool) -> RegionFigures:
    """One device's share of the first block at a degree."""
    model, batch = FAMILIES[family]()
    twin = meta_copy(model)
    path = captured(family).layers[1].name
    runs = []
    for samples in SAMPLES:
        call = observe(twin, resize_batch(batch, samples), [path]).calls[0]
        block = copy.deepcopy(twin.get_submodule(path))
        plan = infer_block(block, call.args, call.kwargs)
        shard_layer(block, plan, ShapeOnlyGroup(degree), sequence_parallel)
        hidden = call.args[0]
        tokens = hidden.shape[1] // degree if sequence_parallel else hidden.shape[1]
        own = hidden.new_empty(samples, tokens, hidden.shape[2]).requires_grad_()
        args = (own, *call.args[1:])
        runs.append(run_block(block, BlockCall(path, args, call.kwargs), [0]))
    rows = {row for region in plan.regions for row in region.rows}
    return figures(*runs, rows=rows, degree=degree if sequence_parallel else 1)


@pytest.fixture(scope="module", params=SPLIT)
def block(request: pytest.FixtureRequest) -> tuple[str, LayerKind]:
    return request.param, captured_block(request.param)


def test_blocks_are_split_by_heads(block: tuple[str, LayerKind]) -> None:
    kind = block[1]
    assert kind.tensor_degrees == kind.dims.kv_heads
    assert kind.tensor_collectives == 4
    assert kind.sequence_parallel


def test_matmuls_and_attention_are_divided(block: tuple[str, LayerKind]) -> None:
    heavy = [operator for operator in block[1].operators if operator.kind is not OperatorClass.MEMORY]
    assert {operator.sharding for operator in heavy} == {Sharding.TENSOR}


def test_norms_and_residuals_are_divided_by_tokens(block: tuple[str, LayerKind]) -> None:
    light = [operator for operator in block[1].operators if operator.kind is OperatorClass.MEMORY]
    if block[0] != "hf-vit":  # 17 tokens cannot be shared by two
        assert {o.sharding for o in light if "norm" in o.name.lower() or o.name == "add"} == {Sharding.SEQUENCE}


def test_parameters_outside_matmuls_stay_whole(block: tuple[str, LayerKind]) -> None:
    family, kind = block
    model, _ = FAMILIES[family]()
    path = captured(family).layers[1].name
    matrices = sum(p.numel() for p in model.get_submodule(path).parameters() if p.dim() == 2)
    assert matrices <= kind.parameters.tensor < kind.parameters.total
    assert kind.parameters.sequence == 0


@pytest.mark.parametrize("family", ["gpt", "hf-bert"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_figures_hold_at_another_degree(family: str, sequence_parallel: bool) -> None:
    kind, share = captured_block(family), share_of(family, 4, sequence_parallel)
    assert kind.kept[Recompute.NONE].at(4, sequence_parallel) == share.kept
    assert kind.kept[Recompute.SELECTIVE].at(4, sequence_parallel) == pytest.approx(share.selective, rel=0.01)
    assert kind.working.at(4, sequence_parallel) == pytest.approx(share.working, rel=0.25)
    flops = sum(call.flops for call in share.calls if not call.backward)
    divided = sum(o.flops for o in kind.operators if o.sharding is Sharding.TENSOR)
    assert divided / 4 == flops


def test_the_input_kept_by_full_recomputation_is_shared_by_tokens(block: tuple[str, LayerKind]) -> None:
    kind = block[1]
    assert kind.kept[Recompute.FULL].sequence == kind.input_bytes


@pytest.mark.parametrize(("family", "tied"), [("gpt", True), ("llama", False)])
def test_vocabulary_is_split_in_embedding_and_head(family: str, tied: bool) -> None:
    graph = captured(family)
    before, after = graph.kinds["before"], graph.kinds["after"]
    table = VOCAB * 32
    assert before.parameters.tensor == table
    assert after.parameters.tensor == (0 if tied else table)
    assert before.tensor_collectives == 2
    assert (before.gathered_output_bytes, after.gathered_output_bytes) == (0, 4 * TOKENS * VOCAB)
    assert (before.loss_bytes, after.loss_bytes) == (0, 12 * TOKENS)
    assert [(kind.tensor_gathers, kind.tensor_scatters) for kind in (before, after)] == [(0, 1), (1, 0)]
    assert after.kept[Recompute.NONE].tensor == pytest.approx(4 * TOKENS * VOCAB, rel=0.05)
    assert [o.sharding for o in after.operators if o.kind is OperatorClass.MATMUL] == [Sharding.TENSOR]


def test_a_block_that_cannot_be_split_says_why() -> None:
    kind = captured_block("plain")
    assert kind.tensor_degrees == 1
    assert "not offered" in kind.tensor_reason
    assert kind.kept[Recompute.NONE].whole == kind.kept[Recompute.NONE].total
    assert {operator.sharding for operator in kind.operators} == {Sharding.NONE}


def test_the_sum_of_parts_is_the_whole_block() -> None:
    """What one device holds is the same whether or not the layer can be split."""
    kind = captured_block("gpt")
    whole = share_of("gpt", 1, False)
    assert kind.kept[Recompute.NONE].total == whole.kept
    assert kind.working.total == whole.working
    assert kind.forward_working.total == whole.forward_working
