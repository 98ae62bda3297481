"""Tiny models of every family the package must train like one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.model.graph import Layer

HIDDEN, LAYERS, TOKENS, VOCAB, HEADS = 32, 4, 16, 67, 4
FEWER = 3
"""Blocks of families that no schedule with many stages is tried on."""

Batch = Any


class PlainBlock(nn.Module):
    """A residual two-layer MLP that mixes tokens by their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        narrowed: Tensor = self.down(torch.relu(self.up(self.norm(hidden))))
        return hidden + narrowed


class PlainModel(nn.Module):
    """A user's own module: no config, no tied weights, a position parameter of its own, loss from the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, HIDDEN)
        self.position = nn.Parameter(0.02 * torch.randn(TOKENS, HIDDEN))
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        hidden = self.embed(inputs) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.mse_loss(self.head(self.norm(hidden)), target)


def _plain() -> tuple[nn.Module, Callable[[int], Batch]]:
    return PlainModel(), lambda samples: (torch.randn(samples, TOKENS, 8), torch.randn(samples, TOKENS, 3))


def _zoo(name: str) -> tuple[nn.Module, Callable[[int], Batch]]:
    from galvatron_lite.model.zoo import build

    more = {"layers": FEWER, "kv_heads": 2, "ffn_hidden": 64} if name.startswith("llama") else {"layers": LAYERS}
    model = build(name, vocab=VOCAB, hidden=HIDDEN, heads=HEADS, sequence=TOKENS, **more)
    return model, _next_tokens


def _next_tokens(samples: int) -> Batch:
    text = _text(samples, TOKENS + 1)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def _tokens(samples: int) -> Batch:
    ids = _text(samples, TOKENS)
    return {"input_ids": ids, "labels": ids.clone()}


def _padded(samples: int) -> Batch:
    """Texts of unlike lengths, most of the later ones short."""
    lengths = 4 + (torch.rand(samples) * (TOKENS - 4) / torch.arange(1, samples + 1).sqrt()).long()
    return _tokens(samples) | {"attention_mask": (torch.arange(TOKENS) < lengths[:, None]).long()}


def _text(samples: int, tokens: int) -> Tensor:
    """Token ids of which small ones are frequent, so that there is something to learn."""
    return (VOCAB * torch.rand(samples, tokens) ** 3).long()


def _hugging_face(name: str, balanced: bool = False) -> tuple[nn.Module, Callable[[int], Batch]]:
    import transformers

    shape = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": FEWER, "num_attention_heads": HEADS,
        "intermediate_size": 64, "max_position_embeddings": TOKENS,
    }  # fmt: skip
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=TOKENS, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, **tokens,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config), _tokens
    if name == "llama":
        config = transformers.LlamaConfig(**shape, num_key_value_heads=2, **tokens)
        return transformers.LlamaForCausalLM(config), _tokens
    if name == "qwen2":
        config = transformers.Qwen2Config(**shape, num_key_value_heads=2, tie_word_embeddings=True, **tokens)
        return transformers.Qwen2ForCausalLM(config), _tokens
    if name == "mixtral":
        config = transformers.MixtralConfig(
            **shape, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **tokens,
            output_router_logits=balanced, router_aux_loss_coef=0.5,
        )  # fmt: skip
        return transformers.MixtralForCausalLM(config), _tokens
    if name == "qwen2-moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        config = transformers.Qwen2MoeConfig(
            **shape, num_key_value_heads=2, shared_expert_intermediate_size=32, **experts, **tokens
        )
        return transformers.Qwen2MoeForCausalLM(config), _tokens
    if name == "bert":
        config = transformers.BertConfig(**shape, **calm, **(tokens | {"pad_token_id": 0}))
        return transformers.BertForMaskedLM(config), _tokens
    shape = {key: value for key, value in shape.items() if key in transformers.ViTConfig().to_dict()}
    config = transformers.ViTConfig(**shape, **calm, image_size=16, patch_size=4, num_labels=5)
    return transformers.ViTForImageClassification(config), _images


def _encoder_decoder() -> tuple[nn.Module, Callable[[int], Batch]]:
    """A T5: the layers of its decoder all read the output of its encoder."""
    import transformers

    shape = {"d_model": HIDDEN, "d_kv": HIDDEN // HEADS, "d_ff": 64, "num_layers": 2, "num_heads": HEADS}
    tokens = {"vocab_size": VOCAB, "decoder_start_token_id": 0, "pad_token_id": 0}
    config = transformers.T5Config(**shape, **tokens, dropout_rate=0.0)
    return transformers.T5ForConditionalGeneration(config), _tokens


def _adapted(
    family: tuple[nn.Module, Callable[[int], Batch]], targets: Collection[str]
) -> tuple[nn.Module, Callable[[int], Batch]]:
    return with_adapters(family[0], targets), family[1]


def _images(samples: int) -> Batch:
    return {"pixel_values": torch.rand(samples, 3, 16, 16), "labels": torch.randint(0, 5, (samples,))}


def _pictures(name: str, **fields: Any) -> tuple[nn.Module, Callable[[int], Batch]]:
    """A convolutional network. Its batch norms take statistics of all samples, as one process does.

    In float64: in few steps rounding of float32 puts some of the many zeros of ReLU on the other side.
    """
    from galvatron_lite.model.zoo import build

    model = nn.SyncBatchNorm.convert_sync_batchnorm(build(name, **fields)).double()
    return model, partial(_drawn_again, model)


def _drawn_again(model: nn.Module, samples: int) -> Batch:
    """Like the example, other values."""
    example: dict[str, Tensor] = model.example_batch(samples)  # type: ignore[operator]
    return {
        key: torch.rand_like(x, dtype=torch.float64) if x.is_floating_point() else x[torch.randperm(len(x))]
        for key, x in example.items()
    }


NARROW = {"channels": 2, "widths": (2, 4, 8, 16, 16)}
"""Half of the channels of the first 3-D convolutions, which take most of the time."""

_BUILDERS: Mapping[str, Callable[[], tuple[nn.Module, Callable[[int], Batch]]]] = {
    "plain": _plain,
    "zoo-gpt": lambda: _zoo("gpt-tiny"),
    "zoo-llama": lambda: _zoo("llama-tiny"),
    "gpt2": lambda: _hugging_face("gpt2"),
    "llama": lambda: _hugging_face("llama"),
    "qwen2": lambda: _hugging_face("qwen2"),
    "mixtral": lambda: _hugging_face("mixtral"),
    "mixtral-balanced": lambda: _hugging_face("mixtral", balanced=True),
    "mixtral-padded": lambda: (_hugging_face("mixtral", balanced=True)[0], _padded),
    "qwen2-moe": lambda: _hugging_face("qwen2-moe"),
    "bert": lambda: _hugging_face("bert"),
    "vit": lambda: _hugging_face("vit"),
    "resnet": lambda: _pictures("resnet-mini"),
    "vgg": lambda: _pictures("vgg-mini"),
    "convnext": lambda: _pictures("convnext-mini"),
    "unet": lambda: _pictures("unet-bilinear-mini"),
    "cosmoflow": lambda: _pictures("cosmoflow-mini", **NARROW),
    "t5": _encoder_decoder,
    "llama-adapters": lambda: _adapted(_zoo("llama-tiny"), ("q_proj", "v_proj", "down_proj")),
    "mixtral-adapters": lambda: _adapted(_hugging_face("mixtral"), ("q_proj", "o_proj")),
}
PICTURES = ("resnet", "vgg", "convnext", "unet", "cosmoflow")
APART = ("t5", "mixtral-balanced", "mixtral-padded", "llama-adapters", "mixtral-adapters")
"""Families that some plans only are for."""
BATCH_NORMS = ("resnet", "unet")
FAMILIES = tuple(name for name in _BUILDERS if name not in (*PICTURES, *APART))


def build_model(name: str, seed: int = 0) -> nn.Module:
    """A model with random weights, the same for the same seed."""
    torch.manual_seed(seed)
    return _BUILDERS[name]()[0].train()


def make_batches(name: str, samples: int, count: int) -> list[Batch]:
    """Different batches for a family; always the same ones."""
    make_batch = _maker(name)
    torch.manual_seed(1)
    return [make_batch(samples) for _ in range(count)]


@cache
def _maker(name: str) -> Callable[[int], Batch]:
    return _BUILDERS[name]()[1]


def build_family(name: str, samples: int) -> tuple[nn.Module, Batch, tuple[Layer, ...]]:
    """A model, a batch, and the model's layers; always the same ones."""
    from galvatron_lite.model.discover import discover_layers

    model, (batch,) = build_model(name), make_batches(name, samples, 1)
    return model, batch, discover_layers(model, batch)


RANK = 4


class Adapter(nn.Module):
    """A frozen linear layer plus the product of two small matrices that train."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        device = base.weight.device
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False, device=device)
        self.up = nn.Linear(RANK, base.out_features, bias=False, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        adapted: Tensor = self.base(hidden) + 2.0 * self.up(self.down(hidden))
        return adapted


def with_adapters(model: nn.Module, targets: Collection[str]) -> nn.Module:
    """The model, changed in place: all of it frozen, adapters on linear layers of these names."""
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        parent, _, leaf = path.rpartition(".")
        if isinstance(module, nn.Linear) and leaf in targets:
            setattr(model.get_submodule(parent), leaf, Adapter(module))
    return model
