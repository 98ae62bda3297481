"""Small models for the profiler's tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.zoo.gpt import GPT, GPTConfig

VOCAB, LAYERS, HIDDEN, TOKENS = 32, 3, 16, 8


def small_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=VOCAB, layers=LAYERS, hidden=HIDDEN, heads=4, sequence=TOKENS))


def token_batch(samples: int) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(samples * TOKENS).reshape(samples, TOKENS) % VOCAB
    return tokens, tokens


def gpt_layers() -> tuple[Layer, ...]:
    blocks = [Layer(f"blocks.{index}", "block", Role.BLOCK, (f"blocks.{index}",)) for index in range(LAYERS)]
    return Layer("before", "before", Role.BEFORE), *blocks, Layer("after", "after", Role.AFTER)


class TupleBlock(nn.Module):
    """Returns its hidden state inside a tuple, as many transformers blocks do, and is asked for an attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = 2.0

    def forward(self, hidden: Tensor, shift: Tensor) -> tuple[Tensor, None]:
        return torch.relu(self.linear(hidden)) + shift, None


class TupleModel(nn.Module):
    def __init__(self, width: int = 6, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(TupleBlock(width) for _ in range(blocks))
        self.last = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        shift = torch.ones(hidden.shape[-1])
        for block in self.blocks:
            hidden = block.scale * block(hidden, shift=shift)[0]
        return self.last(hidden).square().mean()


def tuple_layers() -> tuple[Layer, ...]:
    blocks = [Layer(f"blocks.{index}", "block", Role.BLOCK, (f"blocks.{index}",)) for index in range(2)]
    return (
        Layer("before", "before", Role.BEFORE, ("first",)),
        *blocks,
        Layer("after", "after", Role.AFTER, ("last",)),
    )
