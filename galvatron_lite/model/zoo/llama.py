"""A Llama style decoder language model: RMSNorm, rotary positions, grouped-query attention, gated SiLU MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from galvatron_lite.model.zoo.gpt import LanguageModel, SelfAttention, check_heads, language_loss


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shape of a Llama."""

    vocab: int  # entries of the vocabulary
    layers: int  # blocks
    hidden: int  # width of the hidden state
    heads: int  # query heads; divides ``hidden``
    kv_heads: int  # key-value heads; divides ``heads``
    ffn_hidden: int  # inner width of the gated MLP
    sequence: int = 2048  # tokens of the longest sample
    dropout: float = 0.0  # probability of dropping an attention weight
    tied: bool = False  # whether the head shares the embedding's weight
    rope_theta: float = 10000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5  # added to the mean square before its root

    def __post_init__(self) -> None:
        check_heads(self.hidden, self.heads, self.kv_heads)


class LlamaMLP(nn.Module):
    """Gated SiLU MLP; maps (samples, tokens, hidden) to the same shape."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn_hidden, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn_hidden, bias=False)
        self.act = nn.SiLU()
        self.down_proj = nn.Linear(config.ffn_hidden, config.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Widen twice, gate, narrow."""
        narrowed: Tensor = self.down_proj(self.act(self.gate_proj(hidden)) * self.up_proj(hidden))
        return narrowed


class LlamaBlock(nn.Module):
    """Pre-norm transformer block; maps (samples, tokens, hidden) to the same shape."""

    inner: type[nn.Module] = LlamaMLP

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = SelfAttention(config, bias=False)
        self.norm2 = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = self.inner(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention and MLP, each added to its input."""
        hidden = hidden + self.attention(self.norm1(hidden), cos, sin)
        summed: Tensor = hidden + self.mlp(self.norm2(hidden))
        return summed


class Llama(LanguageModel):
    """Decoder language model; the head is untied unless the config ties it."""

    block: type[nn.Module] = LlamaBlock

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(self.block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.apply(self._init_weights)
        if config.tied:
            self.head.weight = self.embed.weight

    def _rotations(self, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles (tokens, head size) that rotate each pair of channels (Su et al., 2021)."""
        size, device = self.config.hidden // self.config.heads, tokens.device
        powers = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
        positions = torch.arange(tokens.shape[1], device=device, dtype=torch.float32)
        angles = torch.outer(positions, self.config.rope_theta ** (-powers))
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(dtype), both.sin().to(dtype)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (samples, tokens, vocab), or the mean cross-entropy with labels; see ``GPT``."""
        hidden = self.embed(tokens)
        cos, sin = self._rotations(tokens, hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, cos, sin)
        logits: Tensor = self.head(self.norm(hidden))
        return logits if labels is None else language_loss(logits, labels)
