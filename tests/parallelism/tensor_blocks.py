"""Blocks to split, and the comparison of a split block with the whole one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.recompute.apply import apply_recompute
from galvatron_lite.parallelism.tensor.apply import shard_layer
from galvatron_lite.parallelism.tensor.group import TensorGroup
from galvatron_lite.parallelism.tensor.infer import infer_block
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.parallelism.tensor.shards import Placement
from tests.equivalence.families import with_adapters
from tests.parallelism.sharded_compare import gather_full

SAMPLES, TOKENS, HIDDEN, HEADS, HEAD = 2, 8, 32, 4, 8


@dataclass
class Case:
    """A block, its inputs (the hidden state first, or by keyword), and how closely it computes."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-10


class FusedAttention(nn.Module):
    """Query, key and value in one linear, fewer key-value heads, head counts in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = 8, 4, 4
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (8 + 2 * 4) * 4)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        query, key, value = self.qkv(self.norm(hidden)).split([q, kv, kv], -1)
        samples, tokens = query.shape[:2]
        query = query.view(samples, tokens, self.heads, self.head_size).transpose(1, 2)
        key = key.view(samples, tokens, self.kv_heads, self.head_size).transpose(1, 2)
        value = value.view(samples, tokens, self.kv_heads, self.head_size).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return hidden + self.out(mixed.transpose(1, 2).reshape(samples, tokens, q))


class GatedMLP(nn.Module):
    """Gate and value in one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 96), nn.Linear(48, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, value = self.wide(self.norm(hidden)).chunk(2, -1)
        return hidden + self.narrow(functional.silu(gate) * value)


class CrossAttention(nn.Module):
    """Keys and values come from another input than queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            linear(value).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for linear, value in ((self.q, hidden), (self.k, memory), (self.v, memory))
        )
        return hidden + self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def hidden(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(SAMPLES, TOKENS, HIDDEN, dtype=dtype)


def rotary(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.randn(1, TOKENS, HEAD, dtype=dtype)
    return angles.cos(), angles.sin()


def zoo_gpt() -> Case:
    return Case(build("gpt-tiny", hidden=HIDDEN, heads=HEADS).blocks[0].double(), (hidden(),))  # type: ignore[index]


def zoo_llama() -> Case:
    model = build("llama-tiny", hidden=2 * HIDDEN, heads=8, kv_heads=4)
    state = torch.randn(SAMPLES, TOKENS, 2 * HIDDEN, dtype=torch.float64)
    cos, sin = (angles[0] for angles in rotary(torch.float64))
    return Case(model.blocks[0].double(), (state, cos, sin))  # type: ignore[index]


def _hugging_face(config: Any) -> Any:
    config._attn_implementation = "sdpa"
    return config


def _decoder(config_type: str, block: Callable[..., nn.Module], **extra: Any) -> Case:
    import transformers

    shape = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": HEADS, "num_hidden_layers": 1}
    config = getattr(transformers, config_type)(**shape, num_key_value_heads=HEADS, vocab_size=64, **extra)
    # its norms compute in float32
    keywords = {"position_embeddings": rotary(torch.float32), "attention_mask": None}
    return Case(block(_hugging_face(config), 0), (hidden(torch.float32),), keywords, tolerance=1e-5)


def hf_llama() -> Case:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return _decoder("LlamaConfig", LlamaDecoderLayer)


def hf_qwen2() -> Case:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    return _decoder("Qwen2Config", Qwen2DecoderLayer)


def hf_qwen3() -> Case:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    return _decoder("Qwen3Config", Qwen3DecoderLayer, head_dim=HEAD)


def hf_gpt2() -> Case:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=HIDDEN, n_head=HEADS, vocab_size=64, bos_token_id=0, eos_token_id=0)
    return Case(GPT2Block(_hugging_face(config), 0).double(), (hidden(), None), {"attention_mask": None})


def hf_bert() -> Case:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, intermediate_size=64, vocab_size=64)
    mask = torch.zeros(SAMPLES, 1, TOKENS, TOKENS, dtype=torch.float64)
    mask[1, ..., -2:] = torch.finfo(torch.float64).min
    return Case(BertLayer(_hugging_face(config)).double(), (hidden(), mask))


def hf_vit() -> Case:
    from transformers import ViTConfig
    from transformers.models.vit.modeling_vit import ViTLayer

    config = ViTConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, intermediate_size=64)
    return Case(ViTLayer(_hugging_face(config)).double(), (hidden(),))


def encoder() -> Case:
    return Case(nn.TransformerEncoderLayer(HIDDEN, HEADS, 64, batch_first=True).double(), (hidden(),))


def fused_attention() -> Case:
    return Case(FusedAttention().double(), (hidden(),))


def gated_mlp() -> Case:
    return Case(GatedMLP().double(), (hidden(),))


def cross_attention() -> Case:
    return Case(CrossAttention().double(), (hidden(), hidden()))


def adapted(case: Case) -> Case:
    """With adapters beside all linear layers; everything trains, to see all gradients."""
    names = {path.rpartition(".")[2] for path, module in case.block.named_modules() if isinstance(module, nn.Linear)}
    return replace(case, block=with_adapters(case.block, names).double().requires_grad_())


def adapted_llama() -> Case:
    return adapted(zoo_llama())


def adapted_hf_llama() -> Case:
    return adapted(hf_llama())


CASES: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        zoo_gpt, zoo_llama, hf_llama, hf_qwen2, hf_qwen3, hf_gpt2, hf_bert, hf_vit, encoder, fused_attention,
        gated_mlp, cross_attention, adapted_llama, adapted_hf_llama,
    )
}  # fmt: skip


def make_case(name: str) -> Case:
    """The named case, the same each time, without dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        case = CASES[name]()
        for parameter in case.block.parameters():
            if parameter.dim() < 2:  # norms and biases start at ones and zeros, which would hide mistakes
                parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    return Case(case.block.eval(), case.args, case.kwargs, case.tolerance)


def run_whole(case: Case) -> dict[str, Tensor]:
    """Output and gradients of the whole block."""
    return _gradients(copy.deepcopy(case.block), case, case.args[0])


def run_split(
    case: Case, plan: TensorPlan, group: TensorGroup, sequence_parallel: bool, recompute: Recompute = Recompute.NONE
) -> dict[str, Tensor]:
    """The same of the split block, put together from all devices, after a second micro-batch."""
    block = copy.deepcopy(case.block)
    shards = shard_layer(block, plan, group, sequence_parallel)
    state = case.args[0].chunk(group.size, 1)[group.rank] if sequence_parallel else case.args[0]
    apply_recompute(block, recompute)
    _gradients(block, case, state * 0.5)
    block.zero_grad()
    results = _gradients(block, case, state)
    whole = {}
    for name, value in results.items():
        if name in ("output", "hidden"):
            whole[name] = group.all_gather(value, 1) if sequence_parallel else value
            continue
        summed = group.all_reduce(value) if shards[name].placement is Placement.PARTIAL else value
        whole[name] = gather_full(summed, shards[name], group)
    return whole


def split_and_compare(
    case: Case, group: TensorGroup, sequence_parallel: bool, recompute: Recompute = Recompute.NONE
) -> float:
    """Largest difference between the split and the whole block, relative to each tensor's largest value."""
    plan = infer_block(case.block, case.args, case.kwargs)
    whole, split = run_whole(case), run_split(case, plan, group, sequence_parallel, recompute)
    assert whole.keys() == split.keys()
    largest = {key: float(value.abs().max()) for key, value in whole.items()}
    # some gradients are zero but for rounding: a key's bias adds the same to all scores of a query
    least = 1e-3 * max(largest.values())
    return max(float((split[key] - whole[key]).abs().max()) / max(largest[key], least) for key in whole)


def _gradients(block: nn.Module, case: Case, state: Tensor) -> dict[str, Tensor]:
    state = state.detach().clone().requires_grad_()

    result = block(state, *case.args[1:], **case.kwargs)
    output: Tensor = result if isinstance(result, Tensor) else result[0]
    # a loss that weighs no element by its place: each device of a sequence-parallel group can take its share
    (output.sin() + output.square()).sum().backward()
    found = {name: value.grad for name, value in block.named_parameters() if value.grad is not None}
    assert state.grad is not None
    return {"output": output.detach(), "hidden": state.grad} | found
