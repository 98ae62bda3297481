"""A GPT-2 style decoder language model: learned positions, pre-norm blocks, GELU MLP, head tied to the embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.errors import InputError


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Shape of a GPT."""

    vocab: int  # entries of the vocabulary
    layers: int  # blocks
    hidden: int  # width of the hidden state
    heads: int  # attention heads; divides ``hidden``
    kv_heads: int = 0  # key-value heads; 0 means as many as ``heads``; divides ``heads``
    ffn_hidden: int = 0  # inner width of the MLP; 0 means 4 x hidden
    sequence: int = 1024  # tokens of the longest sample (size of the position table)
    dropout: float = 0.0  # probability of dropping an activation

    def __post_init__(self) -> None:
        check_heads(self.hidden, self.heads, self.kv_heads or self.heads)


def check_heads(hidden: int, heads: int, kv_heads: int) -> None:
    """Raise InputError if heads do not divide the hidden size, or key-value heads do not divide heads."""
    if hidden % heads:
        raise InputError("heads", heads, f"Choose a number that divides the hidden size {hidden}.")
    if heads % kv_heads:
        raise InputError("kv_heads", kv_heads, f"Choose a number that divides the {heads} heads.")


def language_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy; logits (samples, tokens, vocab), labels (samples, tokens) already shifted by the caller."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def random_tokens(samples: int, sequence: int, vocab: int) -> dict[str, Tensor]:
    """Random tokens, and as labels the next tokens: two (samples, sequence) tensors of indices."""
    rows = torch.randint(0, vocab, (samples, sequence + 1), generator=torch.Generator().manual_seed(0))
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def rotate(channels: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (samples, heads, tokens, head size) by angles whose cosine and sine are (tokens, head size)."""
    first, second = channels.chunk(2, dim=-1)
    return channels * cos + torch.cat((-second, first), dim=-1) * sin


class SelfAttention(nn.Module):
    """Causal grouped-query attention with separate projections; maps (samples, tokens, hidden) to the same shape."""

    def __init__(self, config: Any, bias: bool = True) -> None:
        super().__init__()
        self.head_size = config.hidden // config.heads
        kv_hidden = self.head_size * (config.kv_heads or config.heads)
        self.q_proj = nn.Linear(config.hidden, config.hidden, bias=bias)
        self.k_proj = nn.Linear(config.hidden, kv_hidden, bias=bias)
        self.v_proj = nn.Linear(config.hidden, kv_hidden, bias=bias)
        self.o_proj = nn.Linear(config.hidden, config.hidden, bias=bias)
        self.dropout = config.dropout

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:2], -1, self.head_size).transpose(1, 2)

    def forward(self, hidden: Tensor, *angles: Tensor) -> Tensor:
        """Attend over earlier tokens; ``angles`` are cosine and sine of rotary positions, if the model has any."""
        q, k, v = (self._heads(projection(hidden)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if angles:
            q, k = rotate(q, *angles), rotate(k, *angles)
        dropout = self.dropout if self.training else 0.0
        grouped = k.shape[1] != q.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
        merged: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return merged


class MLP(nn.Module):
    """Two Linears with GELU between; maps (samples, tokens, hidden) to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        ffn_hidden = config.ffn_hidden or 4 * config.hidden
        self.up_proj = nn.Linear(config.hidden, ffn_hidden)
        self.act = nn.GELU()
        self.down_proj = nn.Linear(ffn_hidden, config.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """Widen, activate, narrow."""
        narrowed: Tensor = self.down_proj(self.act(self.up_proj(hidden)))
        return narrowed


class GPTBlock(nn.Module):
    """Pre-norm transformer block; maps (samples, tokens, hidden) to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = SelfAttention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attention and MLP, each added to its input."""
        hidden = hidden + self.dropout(self.attention(self.norm1(hidden)))
        summed: Tensor = hidden + self.dropout(self.mlp(self.norm2(hidden)))
        return summed


class LanguageModel(nn.Module):
    """Base class of decoder language models."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def _init_weights(self, module: nn.Module) -> None:
        # called by this name, as in transformers, when a model on the meta device gets its initial values
        initialise(module)

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random inputs of the longest sample."""
        return random_tokens(samples, self.config.sequence, self.config.vocab)


class GPT(LanguageModel):
    """Decoder language model whose head shares the token embedding's weight."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.apply(initialise)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (samples, tokens, vocab), or the mean cross-entropy with labels.

        Args:
            tokens: (samples, tokens) indices.
            labels: (samples, tokens) indices of the next tokens; -100 is ignored.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.embed(tokens) + self.positions(positions))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits if labels is None else language_loss(logits, labels)


def initialise(module: nn.Module) -> None:
    """Normal weights of standard deviation 0.02 and zero biases (GPT-2), for Linear and Embedding modules."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
