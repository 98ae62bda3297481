"""What the closed forms say is kept, against what autograd keeps of real modules on this machine (fp32, CPU)."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.model.gates import keep_gates
from galvatron_lite.model.graph import ModelGraph, Recompute
from galvatron_lite.model.shapes import DecoderShape, EncoderShape, MoeShape, VitShape, build_graph
from tests.model.saved import saved_bytes

SAMPLES = 2


def kept_per_sample(graph: ModelGraph) -> int:
    return sum(graph.kind_of(layer).kept[Recompute.NONE].total for layer in graph.layers)


def kept_by_block(module: nn.Module, *inputs: Tensor) -> float:
    return saved_bytes(lambda: module(*inputs), module) / SAMPLES


def test_bert_layer_of_transformers() -> None:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(hidden_size=32, num_attention_heads=4, intermediate_size=80, hidden_dropout_prob=0.0)
    config.attention_probs_dropout_prob, config._attn_implementation = 0.0, "sdpa"
    shape = EncoderShape(layers=1, hidden=32, heads=4, ffn_hidden=80, vocab=64, seq_len=24)
    kind = build_graph(shape, precision="fp32").kinds["block"]
    layer = BertLayer(config)  # type: ignore[no-untyped-call]
    assert sum(parameter.numel() for parameter in layer.parameters()) == kind.parameters.total
    hidden = torch.randn(SAMPLES, 24, 32, requires_grad=True)
    assert kept_by_block(layer, hidden) == kind.kept[Recompute.NONE].total


def test_vit_model_of_transformers() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, image_size=32, patch_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = 10
    model = ViTForImageClassification(config)
    shape = VitShape(layers=2, hidden=32, heads=4, ffn_hidden=80, image_size=32, patch=8, classes=10)
    graph = build_graph(shape, precision="fp32")
    assert sum(parameter.numel() for parameter in model.parameters()) == graph.parameters
    images, labels = torch.randn(SAMPLES, 3, 32, 32), torch.zeros(SAMPLES, dtype=torch.long)
    saved = saved_bytes(lambda: F.cross_entropy(model(images).logits, labels), model)
    assert saved == SAMPLES * kept_per_sample(graph) + 4


class Mixture(nn.Module):
    """Mixtral's mixture of experts by the book, every token copied to its two experts, as grouped matmuls run it."""

    def __init__(self, hidden: int, ffn: int, many: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, many, bias=False)
        self.gate = nn.ModuleList(nn.Linear(hidden, ffn, bias=False) for _ in range(many))
        self.up = nn.ModuleList(nn.Linear(hidden, ffn, bias=False) for _ in range(many))
        self.down = nn.ModuleList(nn.Linear(ffn, hidden, bias=False) for _ in range(many))
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        shares = torch.split(flat[order // 2], chosen.flatten().bincount(minlength=len(self.up)).tolist())
        outputs = [
            down(self.act(gate(share)) * up(share))
            for gate, up, down, share in zip(self.gate, self.up, self.down, shares, strict=True)
        ]
        weighted = torch.cat(outputs) * weights.flatten()[order, None]
        mixed: Tensor = weighted[order.argsort()].view(len(flat), 2, -1).sum(1).view_as(x)
        return mixed


def test_mixture_of_experts() -> None:
    """The closed form may differ by the indices of rows that sorting makes."""
    shape = MoeShape(
        layers=1, hidden=64, heads=4, ffn_hidden=96, gated_mlp=True, activation="silu", norm="rmsnorm", biases=False,
        positions="none", n_experts=4, vocab=64, seq_len=32,
    )  # fmt: skip
    plain = DecoderShape(
        layers=1, hidden=64, heads=4, ffn_hidden=96, gated_mlp=True, activation="silu", norm="rmsnorm", biases=False,
        positions="none", vocab=64, seq_len=32,
    )  # fmt: skip
    block, dense = (build_graph(s, precision="fp32").kinds["block"] for s in (shape, plain))
    mixture = Mixture(64, 96, 4)
    keep_gates(mixture)
    own = sum(parameter.numel() for parameter in mixture.parameters())
    assert block.parameters.total - dense.parameters.total == own - 3 * 64 * 96
    mlp = 4 * 32 * (64 + 3 * 96)
    x = torch.randn(SAMPLES, 32, 64, requires_grad=True)
    expected = block.kept[Recompute.NONE].total - dense.kept[Recompute.NONE].total + mlp
    assert kept_by_block(mixture, x) == pytest.approx(expected, rel=0.03)
