"""Tiny models whose losses, parameters and buffers depend on how a batch is shared, and jobs that train them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own convention

from galvatron_lite import auto, auto_parallelize
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from tests.runtime.examined import tried_once
from tests.runtime.plans import losses_alone, make_plan

SAMPLES, TOKENS, HIDDEN, VOCAB, STEPS = 8, 8, 16, 32, 2
TOLERANCE = 1e-4
NOISE = 1e-8
"""Parameters whose gradient is zero in theory (biases of keys) hold only rounding noise."""
ADAMW = {"lr": 1e-2, "eps": 1e-4}
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": TOKENS,
}  # fmt: skip
PLANS: Mapping[str, tuple[int, int, Strategy]] = {
    "micro-batches": (1, 4, Strategy()),
    "data": (1, 1, Strategy(data=2)),
    "zero1": (1, 1, Strategy(zero=2, zero_stage=1)),
    "zero3": (1, 2, Strategy(zero=2, zero_stage=3)),
    "pipeline": (2, 4, Strategy()),
    "context": (1, 2, Strategy(context=2)),
    "tensor": (1, 1, Strategy(tensor=2)),
    "pipeline and data": (2, 2, Strategy(data=2)),
    "recompute": (1, 2, Strategy(data=2, recompute=Recompute.FULL)),
    "selective": (1, 2, Strategy(data=2, recompute=Recompute.SELECTIVE)),
}
"""Stages, micro-batches and the strategy of all layers."""


class Block(nn.Module):
    """A residual MLP, over tokens or not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def body(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.body(hidden)


class Reversible(torch.autograd.Function):
    """Keeps nothing of a block's inside: backward runs it again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, block: Block, *_: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            return block.body(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        parameters = list(ctx.block.parameters())
        with torch.enable_grad():
            torch.autograd.backward(ctx.block.body(hidden), gradient, inputs=[hidden])
            slopes = torch.autograd.grad(ctx.block.body(hidden.detach()), parameters, gradient)
        return hidden.grad, None, *slopes


class Again(Block):
    """A block that its own backward pass runs again."""

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = Reversible.apply(hidden, self, *self.parameters())
        return output


class Averaging(Block):
    """Keeps an average of its inputs, and counts samples, from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(HIDDEN))
        self.register_buffer("samples", torch.zeros((), dtype=torch.long))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(hidden.detach().mean((0, 1)), 0.1)
            self.samples += len(hidden)
        return super().forward(hidden)


class Counting(Block):
    """Fades in by a count of its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.passes += 1
        return hidden + 0.2 * self.passes * (super().forward(hidden) - hidden)


class Network(nn.Module):
    """Tokens, two blocks, a head; ``kind`` says what the loss is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        if kind == "positions":
            self.table = nn.Embedding(64, HIDDEN)
        block = {"buffers": Averaging, "reversible": Again, "counting": Counting}.get(kind, Block)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if kind in ("loose buffer", "read buffer"):
            self.register_buffer("average", torch.zeros(HIDDEN))
        if kind == "written":
            self.teacher = nn.Parameter(self.head.weight.detach().clone(), requires_grad=False)
        self.register_buffer("classes", 1 + torch.arange(VOCAB).float() / 4, persistent=False)

    def forward(
        self, tokens: Tensor, labels: Tensor, mask: Tensor | None = None, first: Tensor | None = None
    ) -> Tensor:
        hidden = start = self.embed(tokens)
        if self.kind == "positions":
            hidden = hidden + self.table.weight[: tokens.shape[1]]
        if self.kind in ("loose buffer", "read buffer"):
            self.average.lerp_(hidden.detach().mean((0, 1)), 0.1)
        if self.kind == "read buffer":
            hidden = hidden - 5 * self.average
        for block in self.blocks:
            hidden = block(hidden)
        if self.kind == "inner module":
            hidden = self.blocks[0].norm(hidden)
        if self.kind == "contrastive":
            one, other = (F.normalize(half.mean(1), dim=-1) for half in hidden.chunk(2, dim=1))
            return F.cross_entropy(5 * one @ other.T, torch.arange(len(one), device=one.device))
        by_hand = {"tied by hand": self.embed, "head by hand": self.head}.get(self.kind)
        logits = self.head(hidden) if by_hand is None else hidden @ by_hand.weight.T
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-1)
        if self.kind.startswith("masked"):
            return (each * mask.flatten()).sum() / mask.sum().clamp(min=0 if self.kind == "masked 0/0" else 1)
        if self.kind == "written":
            self.teacher.data.lerp_(self.head.weight.data, 0.3)
            return each.mean() + (logits - hidden @ self.teacher.T).square().mean()
        if self.kind == "slope":
            (slope,) = torch.autograd.grad(each.sum(), start, create_graph=True)
            return each.mean() + slope.square().mean()
        if self.kind == "sum":
            return each.sum()
        if self.kind == "penalty":
            return each.mean() + 0.01 * sum(one.square().sum() for one in self.parameters())
        if self.kind == "ctc":
            lengths = (torch.full((len(tokens),), size) for size in (TOKENS, 3))
            return F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), labels[:, :3], *lengths)
        if self.kind == "two terms":
            following = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
            return following + 0.5 * F.cross_entropy(logits[:, 0], first) + hidden.square().mean()
        weight = self.classes if self.kind == "classes" else None
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight, ignore_index=-1)


EVEN = (
    "classes", "buffers", "loose buffer", "read buffer", "penalty", "written", "slope", "inner module", "reversible",
    "ctc",
)  # fmt: skip
"""Kinds whose samples have as many labels."""


def make(kind: str) -> tuple[nn.Module, Any]:
    """A model and an uneven batch: labels of few samples count much."""
    import transformers

    torch.manual_seed(0)
    tokens = torch.randint(1, VOCAB, (SAMPLES, TOKENS))
    keeps = torch.arange(TOKENS) < torch.tensor([8, 7, 6, 8, 2, 1, 0, 0])[:, None]
    if kind == "llama":
        tokens_of = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
        config = transformers.LlamaConfig(**SHAPE, num_key_value_heads=2, **tokens_of)
        model: nn.Module = transformers.LlamaForCausalLM(config)
        return model, {"input_ids": tokens, "labels": tokens.where(keeps, -100)}
    if kind == "bert":
        calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**SHAPE, **calm))
        return model, {"input_ids": tokens, "labels": tokens.where(keeps, -100)}
    if kind == "t5":
        shape = {"d_model": HIDDEN, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        config = transformers.T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **shape)
        return transformers.T5ForConditionalGeneration(config), {
            "input_ids": tokens, "labels": tokens.where(keeps, -100),
        }  # fmt: skip
    labels = tokens.roll(-1, 1)
    even = kind in EVEN or "masked" in kind
    labels = labels if even else labels.where(keeps, -1)
    more = {"first": tokens[:, 1].where(keeps[:, 2], -100)} if kind == "two terms" else {}
    return Network(kind), {"tokens": tokens, "labels": labels, **more} | ({"mask": keeps} if "masked" in kind else {})


@cache
def layers_of(kind: str) -> list[str]:
    return [layer.name for layer in auto.watch_model(*make(kind)).layers]


def plan_of(name: str, kind: str) -> Plan:
    stages, microbatches, strategy = PLANS[name]
    names = layers_of(kind)
    bounds = [round(number * len(names) / stages) for number in range(stages + 1)]
    split = [names[a:b] for a, b in pairwise(bounds)]
    return make_plan(split, [[strategy] * len(part) for part in split], SAMPLES, microbatches)


def train_alone(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and the state after two steps of AdamW, plain PyTorch."""
    model, batch = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return losses_alone(model, optimizer, [batch] * STEPS), model.state_dict()


def count_mask(batch: Mapping[str, Tensor]) -> Tensor:
    return batch["mask"].sum()


@tried_once()
def differences(kind: str, names: Sequence[str], **options: Any) -> list[str]:
    """What is not as in one process, under each of some plans, which this world runs."""
    losses, state = train_alone(kind)
    lines = []
    for name in names:
        model, batch = make(kind)
        parallel = auto_parallelize(model, batch, plan=plan_of(name, kind), device="cpu", **options)
        optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
        found = [float(parallel.train_step(batch, optimizer)) for _ in range(STEPS)]
        lines += [
            f"{name}: loss {a}, not {b}" for a, b in zip(found, losses, strict=True) if abs(a / b - 1) > TOLERANCE
        ]
        for entry, value in parallel.full_state_dict().items():
            error = float((value - state[entry]).abs().max()) if value.numel() else 0.0
            if not error <= TOLERANCE * float(state[entry].abs().max()) + NOISE:
                lines.append(f"{name}: {entry} off by {error:.2g} of {float(state[entry].abs().max()):.2g}")
    return lines


@tried_once()
def refusals(kind: str, names: Sequence[str], **options: Any) -> list[str]:
    """The error that each plan meets before the first step; empty: none."""
    errors = []
    for name in names:
        model, batch = make(kind)
        try:
            auto_parallelize(model, batch, plan=plan_of(name, kind), device="cpu", **options)
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def switch_refusal(kind: str, first: str, other: str) -> str:
    """The error with which a model goes on under the plan it has; empty: it went over."""
    model, batch = make(kind)
    parallel = auto_parallelize(model, batch, plan=plan_of(first, kind), device="cpu")
    try:
        parallel.switch(plan_of(other, kind), parallel.optimizer(torch.optim.SGD, lr=0.1))
    except InputError as error:
        return str(error)
    return ""


def planned(kind: str, profile: str, fix: Sequence[str] = ()) -> tuple[Plan | None, str]:
    """The plan that is chosen, and its error, if there is none."""
    model, batch = make(kind)
    try:
        return auto_parallelize(model, batch, profile=profile, device="cpu", fix=fix).plan, ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
