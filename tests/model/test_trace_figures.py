"""FLOPs against closed forms, bytes against the same block run for real."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from galvatron_lite.capture.trace import trace
from galvatron_lite.model.batch import call_model, map_tensors, resize_batch
from galvatron_lite.model.gates import keep_gates
from galvatron_lite.model.graph import LayerKind, OperatorClass, Recompute, Sharding
from galvatron_lite.model.trace.figures import SAMPLES as TWO_SIZES
from galvatron_lite.model.trace.figures import RegionFigures, figures
from galvatron_lite.model.trace.meta import meta_copy, prepare_for_training
from galvatron_lite.model.trace.run import BlockCall, observe, run_block
from galvatron_lite.parallelism.recompute.apply import apply_recompute
from galvatron_lite.parallelism.tensor.apply import shard_layer
from galvatron_lite.parallelism.tensor.group import ShapeOnlyGroup
from galvatron_lite.parallelism.tensor.infer import infer_block
from galvatron_lite.profiler.memory import PeakMemory, track_peak
from galvatron_lite.verify.dry.kernels import accelerated
from tests.model.models import FAMILIES, HEADS, TOKENS, VOCAB, captured, captured_block, hugging_face, saved_bytes

SAMPLES = 4
RANDOM_STATE = 5056
"""Bytes that torch.utils.checkpoint keeps of the CPU's random numbers, once a block."""

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class CaughtError(Exception):
    pass


def block_call(family: str) -> tuple[LayerKind, Call]:
    """The captured kind of a model's blocks, and the second block with what enters it in a real run."""
    torch.manual_seed(0)
    model, batch = FAMILIES[family]()
    graph = captured(family)
    prepare_for_training(model)
    block, caught = model.train().get_submodule(graph.layers[2].name), []

    def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append((args, kwargs))
        raise CaughtError

    handle = block.register_forward_pre_hook(catch, with_kwargs=True)
    with pytest.raises(CaughtError):
        call_model(model, map_tensors(resize_batch(batch, SAMPLES), lambda t: torch.zeros_like(t, device="cpu")))
    handle.remove()
    keep_gates(block)
    return graph.kinds["block"], (block, *caught[0])


def fresh(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Its inputs as leaves; the hidden state, which has the samples, needs a gradient."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point() and tensor.shape[0] == SAMPLES)

    return map_tensors(call[1:], leaf)


def measured(call: Call) -> PeakMemory:
    """Memory of one forward (first phase) and backward (second phase), the block's output let go between them."""
    args, kwargs = fresh(call)
    for parameter in call[0].parameters():
        parameter.grad = None
    with accelerated(), track_peak() as peak:
        output = call[0](*args, **kwargs)
        peak.mark()
        gradient, edge = torch.ones_like(output), get_gradient_edge(output)
        del output
        torch.autograd.backward([edge], [gradient])
    return peak


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_that_live_between_forward_and_backward(family: str) -> None:
    """The allocator's own count, for every recompute choice; the input is there before, and the output still is."""
    kind, call = block_call(family)
    original = call[0].forward
    for choice in Recompute:
        call[0].forward = original
        apply_recompute(call[0], choice)
        held = measured(call).phases[0].end + SAMPLES * (kind.input_bytes - kind.output_bytes)
        constant = 0 if choice is Recompute.NONE else RANDOM_STATE
        assert held - SAMPLES * kind.kept[choice].total == pytest.approx(constant, abs=64), choice


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"plain"}))
def test_peaks_of_forward_and_backward(family: str) -> None:
    """Forward exactly, up to what is the same for any batch; backward with gradients of all parameters is a close
    upper bound. (Convolutions of the plain model have a workspace on CPU that depends on the kernel chosen.)"""
    kind, call = block_call(family)
    forward, backward = measured(call).phases
    base = SAMPLES * (kind.kept[Recompute.NONE].total - kind.input_bytes)
    assert forward.peak == pytest.approx(base + SAMPLES * kind.forward_working.total, rel=0.02)
    bound = base + SAMPLES * kind.working.total + 4 * kind.parameters.total
    assert 0.98 * backward.peak <= bound <= 1.35 * backward.peak


def by_class(kind: LayerKind, sort: OperatorClass) -> int:
    return sum(operator.flops for operator in kind.operators if operator.kind is sort)


def test_convolution_flops_and_shape() -> None:
    kind = captured_block("plain")
    wide, narrow = (operator for operator in kind.operators if operator.kind is OperatorClass.CONVOLUTION)
    assert wide.shape == (32, 32, 1, 16, 3, 1, 1, 1)  # padded by one pixel, not dilated
    assert wide.flops == 2 * 32 * 32 * 3 * 16
    assert narrow.flops == 2 * 32 * 32 * 16


@pytest.mark.parametrize("family", ["gpt", "hf-llama"])
def test_matmul_shapes_and_bytes_moved(family: str) -> None:
    kind = captured_block(family)
    for operator in kind.operators:
        if operator.kind is OperatorClass.MATMUL:
            rows, inner, columns = operator.shape
            assert operator.flops == 2 * rows * inner * columns
            assert operator.moved == 4 * rows * (inner + columns)
            bias = columns if family == "gpt" else 0
            assert operator.weight_bytes == 4 * (inner * columns + bias)


def test_attention_inside_multihead_attention_is_fused() -> None:
    layer = torch.nn.TransformerEncoderLayer(32, HEADS, 64, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 2))
    graph = trace(model, torch.zeros(2, TOKENS, 32), loss_fn=lambda output, _: output.mean(), blocks="0.layers")
    block = graph.kinds["block"]
    assert [o.shape for o in block.operators if o.kind is OperatorClass.ATTENTION] == [(HEADS, HEADS, 16, 16, 8)]
    weights = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    assert by_class(block, OperatorClass.MATMUL) == 2 * weights * TOKENS
    assert block.backward_flops == 2 * 2 * weights * TOKENS + 10 * TOKENS**2 * 32


class RotatedBlock(nn.Module):
    """Attention whose queries lie head by head after a rotation of pairs, under a mask of booleans."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1))
        query, key = (torch.stack((-one[..., 1::2], one[..., ::2]), -1).flatten(-2) for one in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value, mask)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RotatedBlock(32) for _ in range(3))
        self.head = nn.Linear(32, 1)

    def forward(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(TOKENS, device=hidden.device) <= lengths[:, None])[:, None, None].expand(
            -1, -1, TOKENS, -1
        )
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(hidden).mean()


def test_attention_keeps_a_copy_of_its_mask_and_lies_as_its_query() -> None:
    """So joined heads are a copy."""
    torch.manual_seed(0)
    model, batch = Rotated(), {"hidden": torch.randn(4, TOKENS, 32), "lengths": torch.tensor([3, 5, 7, 9])}
    block, mask = model.blocks[0], torch.ones(1, TOKENS, TOKENS, dtype=torch.bool)

    def saved(samples: int) -> int:
        hidden = torch.randn(samples, TOKENS, 32).requires_grad_()
        return saved_bytes(lambda: block(hidden, mask.expand(samples, 1, -1, -1)), block)

    assert trace(model, batch).kinds["block"].kept[Recompute.NONE].total == (saved(4) - saved(2)) / 2


def test_eager_attention_keeps_what_it_materialises() -> None:
    """A model that writes out the scores keeps tokens x tokens of them; one that calls the fused operator does not."""
    eager, batch = hugging_face("Llama", attn_implementation="eager")
    kinds = [captured_block("hf-llama"), trace(eager, batch).kinds["block"]]
    assert kinds[1].kept[Recompute.NONE].total - kinds[0].kept[Recompute.NONE].total >= 4 * HEADS * TOKENS**2
    assert not any(operator.kind is OperatorClass.ATTENTION for operator in kinds[1].operators)
    assert any(operator.kind is OperatorClass.ATTENTION for operator in kinds[0].operators)


@pytest.mark.parametrize(("family", "causal"), [("gpt", True), ("hf-llama", True), ("hf-bert", False)])
def test_causal_attention_is_marked(family: str, causal: bool) -> None:
    operators = captured_block(family).operators
    assert [o.causal for o in operators if o.kind is OperatorClass.ATTENTION] == [causal]


SPLIT = ["gpt", "llama", "hf-gpt2", "hf-llama", "hf-qwen2", "hf-bert", "hf-vit"]


def share_of(family: str, degree: int, sequence_parallel: bool) -> RegionFigures:
    """One device's share of the first block at a degree."""
    model, batch = FAMILIES[family]()
    twin = meta_copy(model)
    path = captured(family).layers[1].name
    runs = []
    for samples in TWO_SIZES:
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


class Classifier(nn.Module):
    """One matmul and a loss, behind a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([nn.Linear(8, 8)]), nn.Linear(8, 64, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks[0](x)), labels)


def test_losses_are_computed_in_float32_as_autocast_has_them() -> None:
    batch = {"x": torch.zeros(4, 8), "labels": torch.zeros(4, dtype=torch.long)}
    last = trace(Classifier(), batch, blocks="blocks", precision="bf16").kinds["after"]
    assert last.kept[Recompute.NONE].total == 2 * 8 + 4 * 64 + 8  # the matmul's input, logarithms, labels
    assert last.forward_working.total == 2 * 64 + 4 * 64  # logits, and a copy of them
