"""A GPT that learns to add, byte by byte, in one process."""

import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention


@dataclass
class Config:
    """The shape; BABY trains on CPUs, XL is GPT-2 XL."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 64
    vocab: int = 256


BABY = Config()
XL = Config(layers=48, heads=25, width=1600, context=1024, vocab=50304)


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and added to its input."""

    def __init__(self, config: Config):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape: samples, tokens, width."""
        samples, tokens, width = x.shape
        q, k, v = (
            each.view(samples, tokens, self.heads, -1).transpose(1, 2) for each in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.down(gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Embeddings, blocks, and a head that predicts the next token."""

    def __init__(self, config: Config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss over all tokens."""
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_batch(config: Config = BABY, samples: int = 16) -> dict[str, torch.Tensor]:
    """Random stretches of sums, ``12+34=46``, and the same one byte later."""
    sums = "".join(f"{a}+{b}={a + b}\n" for a in range(100) for b in range(100))
    text = torch.frombuffer(bytearray(sums, "ascii"), dtype=torch.uint8)
    starts = torch.randint(0, len(text) - config.context - 1, (samples,))
    rows = torch.stack([text[start : start + config.context + 1] for start in starts]).long()
    return {"idx": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def make_model(config: Config = BABY) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and an example batch."""
    torch.manual_seed(0)
    return GPT(config), make_batch(config)


def make_xl() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 XL without its weights: planning reads shapes alone."""
    with torch.device("meta"):
        model = GPT(XL)
    return model, make_batch(XL)


if __name__ == "__main__":
    model, batch = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    for step in range(101):
        loss = model(**make_batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and os.environ.get("RANK", "0") == "0":
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
