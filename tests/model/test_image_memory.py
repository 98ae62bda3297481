"""What image networks keep for backward, against what autograd keeps of real blocks on this machine (fp32, CPU)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.errors import InputError
from galvatron_lite.model.gates import keep_gates
from galvatron_lite.model.graph import ModelGraph, Recompute
from galvatron_lite.model.shapes import ConvNextShape, DecoderShape, EncoderShape, MoeShape, VitShape, build_graph
from galvatron_lite.model.shapes.images.layout import partitioned
from galvatron_lite.model.shapes.images.mobile import BlockSpec, Mobile, mobile_graph
from galvatron_lite.model.shapes.images.names import graph_of_name
from galvatron_lite.model.shapes.images.network import NetworkBuilder
from galvatron_lite.model.shapes.images.residual import Residual, residual_graph
from galvatron_lite.model.shapes.images.summary import ImageTotals, summary_graph
from galvatron_lite.stacks.catalog import STACKS
from tests.model.models import saved_bytes

SAMPLES = 2
SIDE = 64


def kept(graph: ModelGraph) -> int:
    return SAMPLES * sum(graph.kind_of(layer).kept[Recompute.NONE].total for layer in graph.layers)


def whole_loss(module: nn.Module) -> Callable[[], Tensor]:
    pixels, labels = torch.randn(SAMPLES, 3, SIDE, SIDE), torch.zeros(SAMPLES, dtype=torch.long)
    return lambda: F.cross_entropy(module(pixels), labels)


def normed(inner: int, outer: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inner, outer, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(outer)]


class Bottleneck(nn.Module):
    """He et al. 2015, activations in place."""

    def __init__(self, inner: int, planes: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *normed(inner, planes), nn.ReLU(True), *normed(planes, planes, 3, stride), nn.ReLU(True),
            *normed(planes, 4 * planes),
        )  # fmt: skip
        self.project = nn.Sequential(*normed(inner, 4 * planes, 1, stride)) if inner != 4 * planes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.path(x)
        y += self.project(x)
        return F.relu_(y)


class Inverted(nn.Module):
    """Sandler et al. 2018 with squeeze and excitation and an activation that keeps its input, in place."""

    def __init__(self, inner: int, outer: int, stride: int, function: Callable[[], nn.Module], squeeze: int) -> None:
        super().__init__()
        wide = 6 * inner
        self.first = nn.Sequential(*normed(inner, wide), function(), *normed(wide, wide, 3, stride, wide), function())
        self.reduce, self.expand = nn.Conv2d(wide, max(squeeze, 1), 1), nn.Conv2d(max(squeeze, 1), wide, 1)
        self.squeeze = squeeze
        self.last = nn.Sequential(*normed(wide, outer))
        self.same = inner == outer and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        if self.squeeze:
            gate = self.expand(F.relu_(self.reduce(y.mean((2, 3), keepdim=True))))
            y = y * gate.sigmoid()
        y = self.last(y)
        return x + y if self.same else y


def entering(precision: str) -> NetworkBuilder:
    """A picture, of which a network can be made."""
    return NetworkBuilder("made-up", precision, 3, (SIDE, SIDE))


def head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]


@pytest.mark.parametrize(("function", "name"), [(nn.ReLU, "relu"), (nn.ReLU6, "relu6"), (nn.SiLU, "silu")])
@pytest.mark.parametrize("squeeze", [0.0, 0.25])
def test_inverted_bottlenecks_keep_what_their_activation_needs(
    function: Callable[..., nn.Module], name: str, squeeze: float
) -> None:
    """In place ReLU needs its output only; ReLU6 and SiLU a copy of their input."""

    def fresh() -> nn.Module:
        return function(inplace=True)

    net = nn.Sequential(
        *normed(3, 32, 3, 2), fresh(), Inverted(32, 32, 1, fresh, round(32 * squeeze)),
        Inverted(32, 48, 2, fresh, round(32 * squeeze)), *normed(48, 256), fresh(), *head(256),
    )  # fmt: skip
    rows = (BlockSpec(1, (3,), 1, 6, 32, squeeze), BlockSpec(1, (3,), 2, 6, 48, squeeze))
    spec = Mobile(rows=rows, head=256, function=name)  # type: ignore[arg-type]
    graph = mobile_graph(entering("fp32"), spec)
    assert saved_bytes(whole_loss(net), net) == pytest.approx(kept(graph), rel=0.01)


def test_autocast_keeps_what_the_closed_form_says() -> None:
    """Half precision: activations at two bytes, the picture also as it came, weights' copies whatever the batch."""
    net = nn.Sequential(*normed(3, 64, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1), Bottleneck(64, 64, 1), *head(256))
    graph = residual_graph(entering("bf16"), Residual(depths=(1,)))

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return whole_loss(net)()

    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    copies = 2 * sum(weight.numel() for weight in net.parameters() if weight.dim() > 1)
    statistics = sum(8 * norm.num_features for norm in norms)
    # autograd does not keep the fp32 picture (it is the caller's), our count holds it
    expected = kept(graph) - SAMPLES * 3 * SIDE * SIDE * 4
    assert saved_bytes(run, net) - copies - statistics == pytest.approx(expected, rel=0.02)
    buffers = sum(graph.kind_of(layer).buffer_bytes for layer in graph.layers)
    own = sum(buffer.numel() * buffer.element_size() for buffer in net.buffers())
    assert buffers == pytest.approx(own + copies, rel=0.01)


# Parameters in millions: Kim et al. 2020 (arXiv:2004.09910), tables 2 and 3.
SIZES = [("amoebanet_d_l18_d208", 224, 81.5), ("amoebanet_d_l18_d416", 224, 319.0), ("unet_b6_c72", 192, 362.2)]


def built(name: str, side: int, item_bytes: int = 4) -> ModelGraph:
    graph = graph_of_name(name, side, "fp32" if item_bytes == 4 else "fp16")
    assert graph is not None
    return graph


@pytest.mark.parametrize(("name", "side", "millions"), SIZES)
def test_networks_have_their_published_parameters(name: str, side: int, millions: float) -> None:
    assert built(name, side).parameters / 1e6 == pytest.approx(millions, rel=0.001)


def test_a_partition_keeps_what_enters_it() -> None:
    graph, balance = built("amoebanet_d_l18_d256", 224), (3, 4, 5, 12)
    whole = partitioned(graph, balance)
    first = [graph.kind_of(graph.layers[place]) for place in (0, 3, 7, 12)]
    blocks = [whole.kind_of(layer) for layer in whole.layers[1:-1]]
    assert [block.kept[Recompute.FULL].total for block in blocks] == [kind.input_bytes for kind in first]
    assert whole.parameters == graph.parameters
    assert whole.flops == graph.flops
    assert kept(whole) == kept(graph)


@pytest.mark.parametrize("balance", [(3, 4), (24, 0), (23, 1)])
def test_partitions_must_add_up(balance: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="balance"):
        partitioned(built("amoebanet_d_l18_d256", 224), balance)


@pytest.mark.parametrize(
    ("tokens", "inplace", "tensors"), [(False, False, 2.0), (True, False, 1.8), (False, True, 1.0)]
)
def test_a_summary_keeps_two_tensors_an_output(tokens: bool, inplace: bool, tensors: float) -> None:
    """Convolution and batch normalisation keep their inputs; networks on tokens a little less, in place one only."""
    outputs = 10_000_000
    given = ImageTotals(macs=4e9, activations=outputs, parameters=25e6, tokens=tokens, inplace=inplace)
    ends = outputs / 50 * (4 + 2)  # the picture as it came in fp32, the last layer's output
    assert kept(summary_graph(given, "fp16")) / SAMPLES == pytest.approx(tensors * outputs * 2 + ends, rel=0.01)


class NextBlock(nn.Module):
    """Liu et al. 2022 as autocast runs it on a GPU: norm in fp32, everything else in half precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).permute(0, 2, 3, 1).contiguous()
        y = self.norm(y.float()).to(torch.bfloat16)
        y = self.down(F.gelu(self.up(y))) * self.gamma
        out: Tensor = x + y.permute(0, 3, 1, 2)
        return out


def test_a_convnext_block_under_autocast() -> None:
    shape = ConvNextShape(depths=(2,), widths=(16,), image_size=32)
    kind = build_graph(shape, precision="bf16", kernels=STACKS["torchgpipe"].kernels).kinds["stage0_block"]
    block, x = NextBlock(16), torch.randn(SAMPLES, 16, 8, 8, dtype=torch.bfloat16, requires_grad=True)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = block(x)
        return out

    copies = 2 * sum(layer.weight.numel() for layer in (block.conv, block.up, block.down))
    assert saved_bytes(run, block) - copies == pytest.approx(SAMPLES * kind.kept[Recompute.NONE].total, rel=0.03)
    assert kind.buffer_bytes == 2 * kind.parameters.total


class PlainBlock(nn.Module):
    """A pre-norm block whose attention is scores, softmax and context, in autocast's precisions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        half = torch.bfloat16
        batch, tokens, width = x.shape
        y = self.qkv(self.norm1(x.float()).to(half))
        q, k, v = y.view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = ((q @ k.transpose(-2, -1)) * 0.25).softmax(-1, dtype=torch.float32)
        y = (scores.to(half) @ v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(y)
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x.float()).to(half))))
        return out


def test_a_plain_vit_block_under_autocast() -> None:
    shape = VitShape(layers=1, hidden=32, heads=4, image_size=32, patch=4)
    kernels = replace(STACKS["torchgpipe"].kernels, merged_projections=True)
    kind = build_graph(shape, precision="bf16", kernels=kernels).kinds["block"]
    block, x = PlainBlock(32, 4), torch.randn(SAMPLES, 65, 32, dtype=torch.bfloat16, requires_grad=True)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = block(x)
        return out

    copies = 2 * sum(layer.weight.numel() for layer in (block.qkv, block.out, block.up, block.down))
    kept_here = SAMPLES * kind.kept[Recompute.NONE].total
    assert saved_bytes(run, block) - copies == pytest.approx(kept_here, rel=0.02)
    assert not any(operator.name.endswith("mask") for operator in kind.operators)
    assert kind.buffer_bytes == 2 * kind.parameters.total


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
