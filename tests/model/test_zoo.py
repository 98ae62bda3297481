from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.errors import InputError
from galvatron_lite.model.zoo import SIZES, build
from tests.model.models import assert_learns


def test_llama_equals_hugging_face() -> None:
    """The same weights give the same logits as transformers' own Llama."""
    import transformers

    ours = build("llama-tiny").eval()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=176, rms_norm_eps=1e-5, rope_theta=10000.0,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    names = {
        "embed.": "model.embed_tokens.",
        "blocks.": "model.layers.",
        "attention.": "self_attn.",
        "head.": "lm_head.",
    }
    names |= {"norm1.": "input_layernorm.", "norm2.": "post_attention_layernorm."}
    state = {}
    for name, value in ours.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        state["model.norm.weight" if name == "norm.weight" else name] = value
    theirs.load_state_dict(state)
    tokens = torch.randint(256, (2, 17))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in SIZES if name.startswith(("gpt", "llama", "moe"))])
def test_the_loss_is_the_mean_cross_entropy_and_later_tokens_are_not_seen(name: str) -> None:
    torch.manual_seed(0)
    model, tokens = build(name, layers=1), torch.randint(256, (2, 12))
    logits = model(tokens)
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 256), tokens.reshape(-1))
    torch.testing.assert_close(model(tokens, tokens), expected)
    changed = tokens.clone()
    changed[:, 6:] = 0
    torch.testing.assert_close(model(changed)[:, :6], logits[:, :6])


def test_embeddings_are_tied_as_the_config_says() -> None:
    gpt, tied, untied = build("gpt-tiny"), build("llama-tiny", tied=True), build("llama-tiny")
    assert gpt.head.weight is gpt.embed.weight
    assert tied.head.weight is tied.embed.weight
    assert untied.head.weight is not untied.embed.weight


def test_wrong_names_and_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="Did you mean gpt-tiny"):
        build("gpt-tyny")
    with pytest.raises(InputError, match="gpt-tiny"):
        build("nobody's")
    with pytest.raises(InputError, match="kv_heads"):
        build("gpt-tiny", width=3)
    with pytest.raises(InputError, match="divides the hidden size"):
        build("gpt-tiny", heads=5)
    with pytest.raises(InputError, match="divides the 4 heads"):
        build("llama-tiny", kv_heads=3)


# Of shipped files, see ``test_shapes_pictures``. U-Net: github.com/milesial/Pytorch-UNet
# (3 channels, normalised: 31,037,698 with 2 classes; 31,037,633 and bilinear 17,262,977 with 1) and
# github.com/mateuszbuda/brain-segmentation-pytorch (32 channels, 7,763,041).
PUBLISHED: list[tuple[str, dict[str, Any], int]] = [
    ("unet", {"norm": True, "channels": 3}, 31_037_698),
    ("unet", {"norm": True, "channels": 3, "classes": 1}, 31_037_633),
    ("unet", {"norm": True, "channels": 3, "classes": 1, "bilinear": True}, 17_262_977),
    ("unet", {"norm": True, "channels": 3, "classes": 1, "base": 32}, 7_763_041),
]
MINI = [name for name in SIZES if name.endswith("-mini") and not name.startswith("perception")]


def on_meta(name: str, **fields: Any) -> nn.Module:
    with torch.device("meta"):
        return build(name, **fields)


@pytest.mark.parametrize(("name", "fields", "parameters"), PUBLISHED)
def test_published_parameters(name: str, fields: dict[str, Any], parameters: int) -> None:
    assert sum(parameter.numel() for parameter in on_meta(name, **fields).parameters()) == parameters


@pytest.mark.parametrize("name", MINI)
def test_small_sizes_learn_their_example_batch(name: str) -> None:
    """The loss is that of the outputs, and some steps of gradient descent lower it."""
    torch.manual_seed(0)
    model = build(name)
    batch = model.example_batch(4)
    entering, labels = batch.values()
    expected = (F.mse_loss if "targets" in batch else F.cross_entropy)(model(entering), labels)
    torch.testing.assert_close(model(**batch), expected)
    assert_learns(model, batch)


def test_a_convnext_on_the_meta_device_can_be_initialised() -> None:
    model = on_meta("convnext-mini").to_empty(device="cpu")
    model.apply(model._init_weights)
    assert torch.equal(model.stages[0][0].gamma, torch.full((8,), 1e-6))
