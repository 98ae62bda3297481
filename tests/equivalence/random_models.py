"""Small random models with their batches and losses, the same for the same seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, TOKENS, SIDE, VOCAB, CLASSES, HEADS = 8, 8, 8, 19, 5, 4
Batch = dict[str, Tensor]
LOSSES = {
    "tokens": ("cross-entropy", "ignored", "weighted", "sum", "masked mean", "mse", "contrastive"),
    "vectors": ("cross-entropy", "ignored", "weighted", "sum", "mse", "contrastive"),
    "pictures": ("cross-entropy", "weighted", "sum", "mse", "contrastive"),
}
"""Losses by what the hidden states are: [batch, tokens, width], [batch, width] or [batch, width, height, width]."""


@dataclass(frozen=True)
class Traits:
    """What was drawn.

    Attributes:
        hidden: what the hidden states are, a key of ``LOSSES``.
        widths: of the hidden states before each block and after the last.
        layers: what each block consists of; the same for all blocks if there is one entry.
        loss: one of ``LOSSES``.
        outside: whether ``loss_fn`` computes the loss, from what the model returns.
        output: what the model returns: tensor, dict, dataclass or tuple.
        extra: what a block is called with beside the hidden states: nothing, stem, previous or mask.
        features: anything else.
    """

    hidden: str
    widths: tuple[int, ...]
    layers: tuple[tuple[str, ...], ...]
    loss: str
    outside: bool
    output: str
    extra: str
    features: frozenset[str] = field(default_factory=frozenset)

    def __str__(self) -> str:
        blocks = " ".join("+".join(names) for names in self.layers)
        place = "loss_fn" if self.outside else "forward"
        texts = (self.hidden, f"{'-'.join(map(str, self.widths))} of {blocks}", f"{self.loss} in {place}")
        return ", ".join([*texts, self.output, *([self.extra] if self.extra else []), *sorted(self.features)])


@dataclass(frozen=True)
class RandomModel:
    """A model with what it is trained on."""

    traits: Traits
    model: nn.Module
    batches: list[Batch]
    loss_fn: Callable[[Any, Any], Tensor] | None


def draw_traits(seed: int) -> Traits:
    """What the model of a seed is like."""
    draw = random.Random(f"model {seed}")
    hidden = draw.choice(("tokens", "tokens", "vectors", "pictures"))
    base, blocks = draw.choice((16, 32)), draw.randint(2, 5)
    equal = draw.random() < 0.7
    widths = tuple(base if equal else draw.choice((base // 2, base, base + 8)) for _ in range(blocks + 1))
    kinds = {
        "tokens": (("attention", "mlp"), ("mlp",), ("mixer", "mlp"), ("recurrent",), ("attention",), ("gated",),
                   ("convolution", "mlp")),
        "vectors": (("mlp",), ("gated",), ("mlp", "mlp")),
        "pictures": (("convolution",), ("convolution", "convolution"), ("depthwise", "convolution")),
    }[hidden]  # fmt: skip
    layers = tuple(draw.choice(kinds) for _ in range(1 if draw.random() < 0.6 else blocks))
    features = {name for name, chance in _CHANCES.items() if draw.random() < chance}
    if hidden != "tokens":
        features -= {"tied"}
    if not equal:
        features -= {"shared block", "skips", "scanned"}
    extra = draw.choice(("", "", "", "stem", "previous", "mask")) if equal and hidden == "tokens" else ""
    outside = draw.random() < 0.4
    output = draw.choice(("tensor", "dict", "dataclass", "tuple") if outside else ("tensor", "dict", "dataclass"))
    return Traits(hidden, widths, layers, draw.choice(LOSSES[hidden]), outside, output, extra, frozenset(features))


_CHANCES = {
    "tied": 0.25, "constant buffer": 0.3, "counter": 0.1, "running mean": 0.08, "function between": 0.12,
    "function inside": 0.12, "frozen stem": 0.12, "frozen block": 0.12, "frozen biases": 0.08, "penalty": 0.06,
    "shared block": 0.06, "skips": 0.12, "auxiliary": 0.12, "free parameter": 0.2, "post norm": 0.2,
    "two heads": 0.12, "residual scale": 0.15, "loop of modules": 0.5,
}  # fmt: skip
"""Features and how often they are drawn."""


def draw_model(seed: int, dtype: torch.dtype = torch.float32) -> RandomModel:
    """The model of a seed, with batches for four steps; no randomness is left in its forward."""
    traits = draw_traits(seed)
    torch.manual_seed(seed)
    model = Network(traits).train()
    for parameter in model.parameters():  # entries near zero have updates of Adam that rounding decides
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    batches = [_cast(_batch(traits), dtype) for _ in range(4)]
    return RandomModel(traits, model.to(dtype), batches, _Loss(traits) if traits.outside else None)


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    return {name: one.to(dtype) if one.is_floating_point() else one for name, one in batch.items()}


def _batch(traits: Traits) -> Batch:
    shape = {"tokens": (TOKENS,), "vectors": (), "pictures": ()}[traits.hidden]
    inputs = {
        "tokens": lambda: torch.randint(0, VOCAB, (SAMPLES, TOKENS)),
        "vectors": lambda: torch.randn(SAMPLES, traits.widths[0]),
        "pictures": lambda: torch.randn(SAMPLES, 3, SIDE, SIDE),
    }[traits.hidden]()
    batch = {"inputs": inputs}
    if traits.loss == "mse":
        batch["target"] = torch.randn(SAMPLES, *shape, _classes(traits))
    elif traits.loss == "contrastive":
        batch["target"] = torch.randn(SAMPLES, _classes(traits))
    else:
        batch["target"] = torch.randint(0, _classes(traits), (SAMPLES, *shape))
    if traits.loss == "ignored":
        uneven = torch.rand(SAMPLES, *shape) < torch.linspace(0.1, 0.8, SAMPLES).reshape(-1, *(1 for _ in shape))
        uneven[0] = False
        batch["target"][uneven] = -100
    if traits.loss == "masked mean" or traits.extra == "mask":
        lengths = torch.randint(2, TOKENS + 1, (SAMPLES, 1))
        batch["mask"] = torch.arange(TOKENS) < lengths
    return batch


def _classes(traits: Traits) -> int:
    return VOCAB if traits.hidden == "tokens" else CLASSES


class Signal(torch.autograd.Function):
    """A squared ReLU with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden + 0.1 * hidden.relu().square()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (hidden,) = ctx.saved_tensors
        return grads[0] * (1 + 0.2 * hidden.relu())


class Mlp(nn.Module):
    def __init__(self, width: int, gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Linear(width, 2 * width, bias=False) if gated else None

    def forward(self, hidden: Tensor) -> Tensor:
        wide = self.up(hidden)
        wide = functional.gelu(wide) if self.gate is None else functional.silu(self.gate(hidden)) * wide
        narrow: Tensor = self.down(wide)
        return narrow


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        def heads(values: Tensor) -> Tensor:
            return values.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        query, key, value = heads(self.query(hidden)), heads(self.key(hidden)), heads(self.value(hidden))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=None if mask is None else mask[:, None, None, :], is_causal=mask is None
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Convolution(nn.Module):
    def __init__(self, width: int, pictures: bool, groups: int = 1) -> None:
        super().__init__()
        kind = nn.Conv2d if pictures else nn.Conv1d
        self.conv = kind(width, width, 3, padding=1, groups=groups)
        self.pictures = pictures

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.conv(hidden) if self.pictures else self.conv(hidden.transpose(1, 2)).transpose(1, 2)
        return functional.relu(mixed)


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells = nn.GRU(width, width, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        states: Tensor = self.cells(hidden)[0]
        return states


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(TOKENS, TOKENS, bias=False)  # a norm behind it takes what a bias adds

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.mix(hidden.transpose(1, 2)).transpose(1, 2)
        return mixed


def _layer(name: str, width: int, pictures: bool) -> nn.Module:
    return {
        "mlp": lambda: Mlp(width, gated=False), "gated": lambda: Mlp(width, gated=True), "mixer": Mixer,
        "attention": lambda: Attention(width), "recurrent": lambda: Recurrent(width),
        "convolution": lambda: Convolution(width, pictures),
        "depthwise": lambda: Convolution(width, pictures, groups=width),
    }[name]()  # fmt: skip


class Block(nn.Module):
    """Residual layers, each behind a norm; then a projection where the width changes."""

    def __init__(self, traits: Traits, number: int) -> None:
        super().__init__()
        width, after = traits.widths[number : number + 2]
        pictures = traits.hidden == "pictures"
        names = traits.layers[number % len(traits.layers)]
        self.layers = nn.ModuleList(_layer(name, width, pictures) for name in names)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) if pictures else nn.LayerNorm(width) for _ in names)
        kind: Any = (lambda i, o: nn.Conv2d(i, o, 1)) if pictures else nn.Linear
        self.project = kind(width, after) if after != width else None
        self.memory = nn.Linear(width, width, bias=False) if traits.extra in ("stem", "previous") else None
        self.scale = nn.Parameter(torch.rand(1) + 0.5) if "residual scale" in traits.features else None
        self.traits = traits

    def forward(self, hidden: Tensor, extra: Tensor | None = None) -> Any:
        features = self.traits.features
        for norm, layer in zip(self.norms, self.layers, strict=True):
            inputs = hidden if "post norm" in features else norm(hidden)
            masked = self.traits.extra == "mask" and isinstance(layer, Attention)
            update = layer(inputs, extra) if masked else layer(inputs)
            update = update if self.scale is None else self.scale * update
            update = Signal.apply(update) if "function inside" in features else update
            hidden = norm(hidden + update) if "post norm" in features else hidden + update
        if self.memory is not None and extra is not None:
            hidden = hidden + self.memory(extra)
        hidden = hidden if self.project is None else self.project(hidden)
        return (hidden, hidden.square().mean()) if "auxiliary" in features else hidden


@dataclass
class Output:
    """What a model returns as a dataclass."""

    loss: Tensor | None
    logits: Tensor


class Network(nn.Module):
    """A stem, blocks, a norm and a head."""

    def __init__(self, traits: Traits) -> None:
        super().__init__()
        self.traits, features, widths = traits, traits.features, traits.widths
        stems: Mapping[str, Callable[[], nn.Module]] = {
            "tokens": lambda: nn.Embedding(VOCAB, widths[0]),
            "vectors": lambda: nn.Linear(widths[0], widths[0]),
            "pictures": lambda: nn.Conv2d(3, widths[0], 3, padding=1),
        }
        self.stem = stems[traits.hidden]()
        self.blocks = nn.ModuleList(Block(traits, number) for number in range(len(widths) - 1))
        self.norm = nn.GroupNorm(4, widths[-1]) if traits.hidden == "pictures" else nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], _classes(traits), bias=False)
        self.second = nn.Linear(widths[-1], _classes(traits)) if "two heads" in features else None
        if "tied" in features and widths[0] == widths[-1]:
            self.head.weight = self.stem.weight  # type: ignore[assignment]
        if "free parameter" in features:
            self.offset = nn.Parameter(0.1 * torch.randn(widths[0], *((1, 1) if traits.hidden == "pictures" else ())))
        if "constant buffer" in features:
            self.register_buffer("constant", torch.tensor(1.25))
        if "counter" in features:
            self.register_buffer("steps", torch.zeros(()))
        if "running mean" in features:
            self.register_buffer("mean", torch.zeros(()))
        frozen = {"frozen stem": self.stem, "frozen block": self.blocks[0]}
        for name in features & frozen.keys():
            frozen[name].requires_grad_(False)
        if "frozen biases" in features:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and not name.endswith("bias"))
        self.loss = None if traits.outside else _Loss(traits)

    def forward(self, inputs: Tensor, target: Tensor, mask: Tensor | None = None) -> Any:
        features, traits = self.traits.features, self.traits
        hidden = self.stem(inputs)
        hidden = hidden + self.offset if "free parameter" in features else hidden
        hidden = hidden * self.constant if "constant buffer" in features else hidden
        if "counter" in features:
            self.steps += 1
            hidden = hidden * (1 + 0.1 * self.steps)
        if "running mean" in features:
            self.mean.mul_(0.9).add_(0.1 * hidden.detach().mean())
            hidden = hidden - self.mean
        hidden, auxiliary = self._blocks(hidden, mask)
        hidden = self.norm(hidden)
        hidden = hidden.mean((2, 3)) if traits.hidden == "pictures" else hidden
        logits = self.head(hidden) if self.second is None else self.head(hidden) + self.second(hidden).tanh()
        loss = None
        if self.loss is not None:
            loss = self.loss(logits, {"target": target, "mask": mask}) + 0.1 * auxiliary
            if "penalty" in features:
                loss = loss + 1e-2 * sum(parameter.square().sum() for parameter in self.parameters())
        if traits.output == "tensor":
            return logits if loss is None else loss
        if traits.output == "tuple":
            return hidden.mean(), logits
        return {"loss": loss, "logits": logits} if traits.output == "dict" else Output(loss, logits)

    def _blocks(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        features, extra, auxiliary = self.traits.features, mask, 0.0
        blocks = list(self.blocks)
        blocks = [*blocks, blocks[0]] if "shared block" in features else blocks
        stem, earlier, skips = hidden, hidden, []
        for number, block in enumerate(blocks):
            extra = {"stem": stem, "previous": earlier, "mask": mask}.get(self.traits.extra)
            earlier = hidden
            if "skips" in features and number >= (len(blocks) + 1) // 2:
                hidden = hidden + skips.pop()
            after = block(hidden) if extra is None else block(hidden, extra)
            if "auxiliary" in features:
                after, more = after
                auxiliary = auxiliary + more
            skips.append(hidden) if "skips" in features and number < len(blocks) // 2 else None
            hidden = Signal.apply(after) if "function between" in features and number == 0 else after
        return hidden, auxiliary


class _Loss:
    """The loss of logits; called as a ``loss_fn`` too."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    def __call__(self, output: Any, batch: Mapping[str, Any]) -> Tensor:
        logits = output["logits"] if isinstance(output, dict) else getattr(output, "logits", output)
        logits = logits[1] if isinstance(logits, tuple) else logits
        target, kind = batch["target"], self.traits.loss
        if kind == "contrastive":
            return self._contrastive(logits, target)
        if kind == "mse":
            return functional.mse_loss(logits, target)
        logits, target = logits.flatten(0, -2), target.flatten()
        if kind == "masked mean":
            each = functional.cross_entropy(logits, target, reduction="none")
            weights = batch["mask"].flatten().to(each.dtype)
            return (each * weights).sum() / weights.sum()
        weight = torch.linspace(0.2, 2.0, logits.shape[-1], dtype=logits.dtype) if kind == "weighted" else None
        reduction = "sum" if kind == "sum" else "mean"
        return functional.cross_entropy(logits, target, weight=weight, reduction=reduction)

    def _contrastive(self, logits: Tensor, target: Tensor) -> Tensor:
        """Each sample is told from all others of the batch."""
        pooled = logits.mean(1) if logits.dim() == 3 else logits
        scores = pooled @ target.T / math.sqrt(pooled.shape[-1])
        return functional.cross_entropy(scores, torch.arange(len(scores)))
