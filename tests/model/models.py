"""Tiny models for the tests of model capture."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from galvatron_lite.capture.trace import trace
from galvatron_lite.model.graph import LayerKind, ModelGraph
from galvatron_lite.model.zoo import build

VOCAB, HIDDEN, HEADS, FFN, LAYERS, TOKENS, SAMPLES = 96, 32, 4, 80, 3, 16, 2


class Mixer(nn.Module):
    """A user's own block: two convolutions over tokens and a residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(hidden, hidden, 3, padding=1)
        self.out = nn.Conv1d(hidden, hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.relu(self.mix(x)))


class Plain(nn.Module):
    """A user's own module: a Sequential of blocks inside, and a parameter and a buffer of its own."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.stem = nn.Conv1d(3, HIDDEN, 1)
        self.scale = nn.Parameter(torch.ones(HIDDEN, 1))
        self.register_buffer("shift", torch.zeros(HIDDEN, 1))
        self.body = nn.Sequential(*(Mixer(HIDDEN) for _ in range(layers)))
        self.head = nn.Linear(HIDDEN, 5)

    def forward(self, signal: Tensor, target: Tensor) -> Tensor:
        hidden = self.body(self.stem(signal) * self.scale + self.shift)
        return nn.functional.cross_entropy(self.head(hidden.mean(-1)), target)


def tokens(samples: int = SAMPLES) -> Tensor:
    return torch.randint(VOCAB, (samples, TOKENS), generator=torch.Generator().manual_seed(0))


def plain() -> tuple[nn.Module, Any]:
    return Plain(), (torch.randn(SAMPLES, 3, TOKENS), torch.tensor([0, 4]))


def zoo(name: str) -> tuple[nn.Module, Any]:
    fields = {"kv_heads": 2, "ffn_hidden": FFN} if name == "llama-tiny" else {}
    sizes = {"vocab": VOCAB, "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "sequence": TOKENS}
    return build(name, **sizes, **fields), (tokens(), tokens())


def hugging_face(family: str, **options: Any) -> tuple[nn.Module, Any]:
    import transformers

    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    common = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "intermediate_size": FFN} | options
    text = {"vocab_size": VOCAB, **special}
    if family == "GPT2":
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(
            n_embd=HIDDEN, n_head=HEADS, n_layer=LAYERS, n_positions=TOKENS, **text, **still, **options
        )
        model = transformers.GPT2LMHeadModel(config)
    elif family == "Bert":
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = transformers.BertForMaskedLM(
            transformers.BertConfig(num_hidden_layers=LAYERS, **common, **text, **still)
        )
    elif family == "ViT":
        config = transformers.ViTConfig(num_hidden_layers=LAYERS, image_size=16, patch_size=4, **common)
        images = torch.randn(SAMPLES, 3, 16, 16)
        return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": torch.tensor([0, 1])}
    else:
        config = getattr(transformers, f"{family}Config")(
            num_hidden_layers=LAYERS, num_key_value_heads=2, **common, **text
        )
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    return model, {"input_ids": tokens(), "labels": tokens()}


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt": lambda: zoo("gpt-tiny"),
    "llama": lambda: zoo("llama-tiny"),
    "hf-gpt2": lambda: hugging_face("GPT2"),
    "hf-llama": lambda: hugging_face("Llama"),
    "hf-qwen2": lambda: hugging_face("Qwen2", tie_word_embeddings=True),
    "hf-bert": lambda: hugging_face("Bert"),
    "hf-vit": lambda: hugging_face("ViT"),
    "plain": plain,
}


@cache
def captured(family: str) -> ModelGraph:
    """The captured graph of a family's model."""
    return trace(*FAMILIES[family](), name=family)


def captured_block(family: str) -> LayerKind:
    """The kind of its blocks."""
    return captured(family).kinds["block"]


def saved_storages(run: Callable[[], object], module: nn.Module) -> dict[int, Tensor]:
    """A tensor of every storage that autograd keeps of a run, by address; parameters and buffers left out."""
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = run()
    del output
    own = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    return {place: tensor for place, tensor in saved.items() if place not in own}


def saved_bytes(run: Callable[[], object], module: nn.Module) -> int:
    """Bytes of these storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in saved_storages(run, module).values())


def assert_learns(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Some steps of gradient descent lower the loss of a batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses: list[Tensor] = []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(model(**batch))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
