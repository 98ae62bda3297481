"""What layers keep by the kernels that run, against published formulas and against autograd (fp32, CPU)."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from galvatron_lite.model.graph import LayerKind, OperatorClass, Recompute, Sharding
from galvatron_lite.model.kernels import Kernels
from galvatron_lite.model.shapes import DecoderShape, EncoderShape, MoeShape, build_graph, load_shape
from tests.model.test_image_memory import SAMPLES, kept_by_block
from tests.processor_time import least, process_seconds

MEGATRON = Kernels(
    flash_attention=False, fused_softmax=True, fused_activation=True, fused_residual=True, merged_projections=True,
    parallel_loss=True, fused_loss=True, regather=True, selective="attention",
)  # fmt: skip
S, H, A = 1024, 2048, 16
GPT = DecoderShape(layers=1, hidden=H, heads=A, vocab=51200, seq_len=S, dropout=0.1)
STATISTICS = 2 * 8 * S
"""Two LayerNorms' means and reciprocal deviations, which the paper leaves out."""


def block_of(kernels: Kernels, shape: DecoderShape = GPT, precision: str = "bf16") -> LayerKind:
    return build_graph(shape, precision=precision, kernels=kernels).kinds["block"]


@pytest.mark.parametrize("t", [1, 2, 8])
def test_kept_bytes_are_those_of_korthikanti_2022(t: int) -> None:
    """Equations 1, 2 and 4 of arXiv:2205.05198, and section 5's selective recomputation (34 s b h / t)."""
    kept = block_of(MEGATRON).kept
    scores = 5 * A * S / H
    assert kept[Recompute.NONE].at(t, False) == S * H * (10 + 24 / t + scores / t) + STATISTICS
    assert kept[Recompute.NONE].at(t, True) == S * H * (34 + scores) / t + STATISTICS / t
    assert kept[Recompute.SELECTIVE].at(t, True) == S * H * 34 / t + STATISTICS / t
    assert kept[Recompute.FULL].at(1, False) == 2 * S * H


def test_without_dropout_no_mask_is_kept() -> None:
    dry = block_of(MEGATRON, replace(GPT, dropout=0.0))
    assert dry.kept[Recompute.NONE].total == S * H * 32 + 2 * A * S * S + STATISTICS


def test_flash_attention_keeps_one_number_a_query_instead_of_scores() -> None:
    flash = block_of(replace(MEGATRON, flash_attention=True)).kept
    assert flash[Recompute.NONE].total == S * H * 34 + 4 * A * S + STATISTICS
    assert flash[Recompute.SELECTIVE].total == S * H * 34 + STATISTICS


def test_gathered_inputs_are_kept_whole_unless_they_are_gathered_again() -> None:
    """Two inputs of column-split matmuls, 2 s b h bytes each; 7/8 of them are spared at degree 8."""
    whole, shared = block_of(replace(MEGATRON, regather=False)), block_of(MEGATRON)
    spared = whole.kept[Recompute.NONE].at(8, True) - shared.kept[Recompute.NONE].at(8, True)
    assert spared == 2 * 2 * S * H * 7 / 8
    assert (whole.regathers, shared.regathers) == (0, 2)


def test_selective_attention_runs_the_attention_core_again() -> None:
    again = {operator.name for operator in block_of(MEGATRON).operators if operator.again}
    assert again == {f"attention.{name}" for name in ("scores", "softmax", "weights_dropout", "context")}


def test_every_second_matmul_of_torchtitan_policy() -> None:
    """Llama's matmuls run in the order q, k, v, out, gate, up, down."""
    shape = load_shape("llama3-8b", overrides={"layers": 1})
    block = build_graph(shape, kernels=Kernels(selective="alternate")).kinds["block"]
    again = {op.name for op in block.operators if op.again and op.kind is OperatorClass.MATMUL}
    assert again == {"attention.k", "attention.out", "mlp.up"}
    tokens, h, ffn, kv = 8192, 4096, 14336, 1024
    assert block.kept[Recompute.SELECTIVE].total == 2 * tokens * (h + h + kv + h + ffn + h) + 4 * 32 * tokens


def test_norms_and_activations_run_again() -> None:
    """Spared of Korthikanti's 34 bytes: two norms' outputs (2 each) and the activation's (8)."""
    block = block_of(replace(MEGATRON, flash_attention=True, selective="norms"))
    assert block.kept[Recompute.SELECTIVE].total == S * H * (34 - 2 - 2 - 8) + 4 * A * S + STATISTICS
    again = {operator.name for operator in block.operators if operator.again}
    assert again == {"norm1", "norm2", "mlp.act"}


def test_flops_are_the_same_whatever_runs() -> None:
    plain, merged = block_of(Kernels()), block_of(Kernels(merged_projections=True))
    assert plain.flops == merged.flops
    assert sum(o.count for o in plain.operators) == sum(o.count for o in merged.operators) + 2
    dense = block_of(replace(MEGATRON, fp8=True))
    assert dense.flops == block_of(MEGATRON).flops
    assert {o.precision for o in dense.operators if o.weight_bytes and o.kind is OperatorClass.MATMUL} == {"fp8"}


def test_fp8_matmuls_keep_one_byte_an_input_item() -> None:
    """Of the 34 bytes: inputs of QKV, output projection, up (1 instead of 2 each) and down (4 instead of 8).

    Flash attention keeps its output itself, so the output projection's fp8 copy comes on top.
    """
    kernels = replace(MEGATRON, flash_attention=True, fp8=True)
    kept = block_of(kernels).kept[Recompute.NONE].total
    assert kept == S * H * (34 - 1 - 1 - 4 + 1) + 4 * A * S + STATISTICS


@pytest.mark.parametrize(("rows", "sharding"), [(False, Sharding.SEQUENCE), (True, Sharding.NONE)])
def test_inputs_are_cast_before_they_are_gathered_unless_scales_go_by_rows(rows: bool, sharding: Sharding) -> None:
    block = block_of(replace(MEGATRON, fp8=True, fp8_rows=rows))
    casts = {o.name: o.sharding for o in block.operators if o.name.endswith(".cast")}
    split_by_rows = {name for name, found in casts.items() if found is Sharding.TENSOR}
    assert split_by_rows == {"attention.out.cast", "mlp.down.cast"}
    assert {casts[name] for name in casts.keys() - split_by_rows} == {sharding}


class Layer(nn.Module):
    """A pre-norm layer as Megatron runs it, with the kernels of PyTorch that keep the same."""

    def __init__(self, shape: DecoderShape, *, merged: bool, fused: bool) -> None:
        super().__init__()
        hidden, kv, ffn = shape.hidden, shape.kv_width or shape.hidden, shape.ffn_hidden or 4 * shape.hidden
        self.shape, self.merged, self.fused, self.kv = shape, merged, fused, kv
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        widths = [hidden + 2 * kv] if merged else [hidden, kv, kv]
        self.qkv = nn.ModuleList(nn.Linear(hidden, width) for width in widths)
        self.out, self.down = nn.Linear(hidden, hidden), nn.Linear(ffn, hidden)
        ups = ([2 * ffn] if merged else [ffn, ffn]) if shape.gated_mlp else [ffn]
        self.ups = nn.ModuleList(nn.Linear(hidden, width) for width in ups)

    def drop(self, x: Tensor) -> Tensor:
        p = self.shape.dropout
        return torch.native_dropout(x, p, True)[0] if p else x  # CUDA's kernel: a mask of one byte an item

    def attend(self, x: Tensor) -> Tensor:
        parts = [linear(x) for linear in self.qkv]
        q, k, v = parts[0].split([x.shape[-1], self.kv, self.kv], -1) if self.merged else parts
        heads = [self.split(part) for part in (q, k, v)]
        repeats = self.shape.heads // heads[1].shape[1]
        q, k, v = heads[0], *(part.repeat_interleave(repeats, 1) if repeats > 1 else part for part in heads[1:])
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = torch.einsum("bnqd,bnkd->bnqk", q, k)
        weights = self.drop((scores * q.shape[-1] ** -0.5).masked_fill(mask, -1e4).softmax(-1))
        return self.out(torch.einsum("bnqk,bnkd->bqnd", weights, v).flatten(2))

    def split(self, part: Tensor) -> Tensor:
        return part.unflatten(-1, (-1, self.shape.hidden // self.shape.heads)).transpose(1, 2)

    def mlp(self, x: Tensor) -> Tensor:
        parts = [linear(x) for linear in self.ups]
        if not self.shape.gated_mlp:
            return self.down(F.gelu(parts[0]))
        gate, up = parts[0].chunk(2, -1) if self.merged else parts
        return self.down(SwiGlu.apply(parts[0]) if self.fused else F.silu(gate) * up)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attend(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class SwiGlu(torch.autograd.Function):
    """Megatron's ``SwiGLUFunction``: keeps its input, gate and up side by side."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        s = gate.sigmoid()
        return torch.cat([gradients[0] * up * s * (1 + gate * (1 - s)), gradients[0] * gate * s], -1)


SMALL = DecoderShape(layers=1, hidden=32, heads=4, ffn_hidden=96, vocab=64, seq_len=24, positions="none")
CASES = {
    "plain": (SMALL, False, False),
    "dropout": (replace(SMALL, dropout=0.2), False, False),
    "merged": (replace(SMALL, dropout=0.2), True, False),
    "gated": (replace(SMALL, gated_mlp=True, activation="silu"), False, False),
    "gated merged": (replace(SMALL, gated_mlp=True, activation="silu"), True, False),
    "gated fused": (replace(SMALL, gated_mlp=True, activation="silu", dropout=0.1), True, True),
    "shared heads": (replace(SMALL, kv_heads=2, head_dim=8), False, False),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fused", [False, True])
def test_kept_bytes_are_those_of_autograd(name: str, fused: bool) -> None:
    """In fp32 fused and unfused softmax, norm and residual keep the same; only SwiGLU differs."""
    shape, merged, swiglu = CASES[name]
    kernels = Kernels(
        flash_attention=False, fused_softmax=fused, fused_residual=fused, merged_projections=merged,
        fused_activation=swiglu,
    )  # fmt: skip
    kind = block_of(kernels, shape, "fp32")
    layer = Layer(shape, merged=merged, fused=swiglu)
    assert sum(parameter.numel() for parameter in layer.parameters()) == kind.parameters.total
    x = torch.randn(SAMPLES, 24, 32, requires_grad=True)
    scale_and_mask = 24 * 24  # the causal mask, one byte a pair, once a batch
    assert kept_by_block(layer, x) == kind.kept[Recompute.NONE].total + scale_and_mask / SAMPLES


def test_plain_attention_in_half_precision_keeps_five_bytes_a_score() -> None:
    """Without autocast softmax runs and is kept in the precision of its input, fused or not."""
    shape = replace(SMALL, dropout=0.2)
    layer = Layer(shape, merged=False, fused=False).bfloat16()
    x = torch.randn(SAMPLES, 24, 32, dtype=torch.bfloat16, requires_grad=True)
    plain = block_of(Kernels(flash_attention=False), shape).kept[Recompute.NONE].total
    narrow_statistics = 2 * 24 * 2 * 2  # of two norms: the CPU's kernel keeps them in the precision of its weights
    assert kept_by_block(layer, x) == plain + 24 * 24 / SAMPLES - narrow_statistics  # and the causal mask


class Moved(TorchDispatchMode):
    """Counts bytes that kernels read and write; views move none."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.total += sum(each.nbytes for each in tree_leaves((args, out)) if isinstance(each, Tensor))
        return out


def moved(function: Any, *inputs: Tensor) -> tuple[float, float]:
    """Passes over the first input, forward and backward."""
    with Moved() as forward:
        out = function(*inputs)
    gradient = torch.ones_like(out)
    with Moved() as backward:
        torch.autograd.grad(out, inputs, gradient)
    return forward.total / inputs[0].nbytes, backward.total / inputs[0].nbytes


def test_biases_and_clamps_of_experts_move_what_the_kernels_of_megatron_core_do() -> None:
    """``TEGroupedMLP._apply_bias`` and the clamps of ``weighted_bias_quick_geglu_impl``, on all rows of all experts."""
    shape = MoeShape(
        layers=1, hidden=32, heads=4, vocab=64, seq_len=1024, n_experts=4, moe_topk=1, moe_ffn=64, gated_mlp=True,
        clamped=True, activation="silu", positions="none",
    )  # fmt: skip
    kernels = Kernels(merged_projections=True, fused_activation=True)
    operators = {operator.name: operator for operator in build_graph(shape, kernels=kernels).kinds["block"].operators}
    rows = [torch.randn(1024, width, dtype=torch.bfloat16, requires_grad=True) for width in (32, 128)]
    weights = torch.rand(1024, 1, dtype=torch.bfloat16, requires_grad=True)
    biases = [torch.randn(32, dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]

    def biased(x: Tensor, weights: Tensor, *biases: Tensor) -> Tensor:
        parts = zip(x.split(256), weights.split(256), biases, strict=True)
        return torch.cat([part + bias * weight for part, weight, bias in parts])

    def clamped(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return torch.cat((gate.clamp(max=7.0), up.clamp(-7.0, 7.0)), -1)

    for name, passes, size in [
        ("mlp.experts.bias", moved(biased, rows[0], weights, *biases), rows[0].nbytes),
        ("mlp.clamp", moved(clamped, rows[1]), rows[1].nbytes),
    ]:
        operator = operators[name]
        assert (operator.moved / size, operator.backward_moved / size) == pytest.approx(passes, rel=0.05)


def test_latent_attention_with_shared_experts_has_deepseek_parameters() -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=96, hidden_size=32, intermediate_size=80, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=2, n_routed_experts=8, kv_lora_rank=12,
        q_lora_rank=20, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=7, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)  # type: ignore[no-untyped-call]
    shape = MoeShape(
        layers=3, hidden=32, heads=4, head_dim=10, rope_dim=4, value_dim=7, kv_rank=12, q_rank=20, ffn_hidden=80,
        moe_ffn=16, n_experts=8, moe_topk=2, shared_ffn=32, dense_layers=1, gated_mlp=True, activation="silu",
        norm="rmsnorm", biases=False, positions="rotary", vocab=96, tied_embeddings=False, seq_len=16,
    )  # fmt: skip
    graph = build_graph(shape)
    assert graph.parameters == sum(parameter.numel() for parameter in model.parameters())
    block = graph.kinds["block"]
    assert block.expert_parameters == 3 * 8 * 32 * 16
    assert block.dispatched_bytes == 2 * 16 * 2 * 32
    assert [layer.kind for layer in graph.layers[1:-1]] == ["dense_block", "block", "block"]


def test_masked_head_on_predicted_tokens_only() -> None:
    shape = EncoderShape(layers=1, hidden=64, heads=4, vocab=1000, seq_len=128)
    every, few = (build_graph(s).kinds["after"] for s in (shape, replace(shape, predicted=20)))
    logits = 4 * 1000  # bytes a token of the fp32 log-softmax, all that tokens x vocabulary keep
    assert every.kept[Recompute.NONE].total - few.kept[Recompute.NONE].total >= 108 * logits
    assert few.parameters == every.parameters


def logits_of(**kernels: bool) -> tuple[float, float]:
    """Kept bytes and worst backward bytes a logit, on a head where little else counts."""
    shape = replace(GPT, hidden=16, heads=1)
    after = build_graph(shape, kernels=Kernels(**kernels)).kinds["after"]  # type: ignore[arg-type]
    kept, items = after.kept[Recompute.NONE], S * 51200
    peak = kept.total + max(after.working.total, after.forward_working.total)
    return kept.total / items, peak / items


@pytest.mark.parametrize(
    ("kernels", "kept", "peak"),
    [
        ({}, 4, 12),  # fp32 log-softmax; in backward two fp32 gradients with it
        ({"fused_loss": True, "parallel_loss": True}, 4, 6),  # the fp32 copy becomes softmax, then gradient
        ({"jit_loss": True}, 4, 10),  # logits, their fp32 copy and its exponentials in forward
        ({"compiled_loss": True}, 2, 4),  # logits and their gradient
        ({"inplace_loss": True}, 2, 2),  # the gradient takes the logits' place
    ],
)
def test_bytes_a_logit(kernels: dict[str, bool], kept: float, peak: float) -> None:
    found = logits_of(**kernels)
    assert found[0] == pytest.approx(kept, rel=0.01)
    assert found[1] == pytest.approx(peak, rel=0.01)


def test_logits_stay_split_with_either_loss_on_shares() -> None:
    """Megatron's, and this project's own, which keeps a total of each token besides."""
    own, parallel = (build_graph(GPT, kernels=Kernels(parallel_loss=choice)).kinds["after"] for choice in (False, True))
    assert (own.gathered_output_bytes, own.loss_bytes) == (2 * S * 51200, 12 * S)
    assert (parallel.gathered_output_bytes, parallel.loss_bytes) == (0, 0)
    assert (parallel.tensor_gathers, parallel.tensor_scatters) == (1, 0)
    spared = own.kept[Recompute.NONE].at(8, False) - parallel.kept[Recompute.NONE].at(8, False)
    assert spared == 2 * 4 * S * 7 / 8


class Swish(nn.Module):
    """A Llama block without its attention's own tensors: norm, one projection and its residual, gated MLP."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.out, self.gate, self.up = (nn.Linear(hidden, n, bias=False) for n in (hidden, ffn, ffn))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def test_compiled_block_keeps_what_the_partitioner_of_pytorch_keeps() -> None:
    """AOTAutograd's min-cut partitioner drops the activated gate, and keeps both norms' outputs and the product."""
    from functorch.compile import aot_module, min_cut_rematerialization_partition, nop
    from torch._decomp import core_aten_decompositions

    block = aot_module(
        Swish(32, 96), fw_compiler=nop, bw_compiler=nop, partition_fn=min_cut_rematerialization_partition,
        decompositions=core_aten_decompositions(),
    )  # fmt: skip
    x = torch.randn(SAMPLES, 24, 32, requires_grad=True)
    found = kept_by_block(block, x)
    assert found == 4 * 24 * (4 * 32 + 3 * 96 + 2)
    shape = DecoderShape(
        layers=1, hidden=32, heads=4, ffn_hidden=96, gated_mlp=True, activation="silu", norm="rmsnorm", biases=False,
        positions="none", vocab=64, seq_len=24,
    )  # fmt: skip
    kept = block_of(Kernels(compiled=True), shape, "fp32").kept[Recompute.NONE].total
    attention = 4 * 24 * (4 * 32 + 4)  # q, k, v, the output, and a log-sum a query and head
    assert kept == found + attention


def test_a_compiler_joins_chains_of_kernels() -> None:
    shape = load_shape("llama3-8b", overrides={"layers": 1})
    eager, lean = (build_graph(shape, kernels=Kernels(compiled=choice)).kinds["block"] for choice in (False, True))
    memory = [[o for o in block.operators if o.kind is OperatorClass.MEMORY] for block in (eager, lean)]
    assert [sum(o.count for o in part) for part in memory] == [16, 5]
    tokens = 8192 * 4096 * 2
    joined = next(o for o in lean.operators if o.name == "attention.residual+norm2")
    assert joined.moved == 4 * tokens + 4 * 8192  # reads x and the projection, writes sum, norm and reciprocal roots
    assert eager.flops == lean.flops


def test_graphs_of_large_models_are_built_quickly() -> None:
    """Under 5 ms each; the best of some, so that a busy machine does not matter."""
    for shape in (GPT, load_shape("llama3-8b"), load_shape("mixtral-8x7b"), load_shape("bert-large")):
        build = partial(build_graph, shape, kernels=MEGATRON)
        assert least(partial(process_seconds, build), 5e-3, most=100) < 5e-3


def test_a_backward_written_by_hand_keeps_no_normalised_or_activated_tensor() -> None:
    """Two normalised inputs (2 s b h bytes each) and GELU's output (8 s b h) of Korthikanti et al.'s 34 s b h."""
    flash = replace(MEGATRON, flash_attention=True)
    plain, remade = block_of(flash).kept, block_of(replace(flash, remade=True)).kept
    assert remade[Recompute.NONE].total == S * H * (34 - 2 - 2 - 8) + 4 * A * S + STATISTICS
    assert remade[Recompute.FULL] == plain[Recompute.FULL]


@pytest.mark.parametrize("degree", [2, 8])
def test_folded_experts_keep_a_share_of_the_copies_and_of_the_outputs(degree: int) -> None:
    """Copies and outputs take 2 k s b h bytes each; whole on every device of a tensor group, or shared among them."""
    ways = 4
    shape = MoeShape(layers=1, hidden=H, heads=A, vocab=51200, seq_len=S, n_experts=16, moe_topk=ways, moe_ffn=H)
    whole, folded = (
        build_graph(shape, kernels=replace(MEGATRON, folded_experts=one)).kinds["block"].kept[Recompute.NONE]
        for one in (False, True)
    )
    assert whole.at(1, False) == folded.at(1, False)
    assert whole.at(degree, True) - folded.at(degree, True) == 2 * 2 * ways * S * H * (degree - 1) / degree
