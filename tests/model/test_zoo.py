import pytest
import torch

from galvatron_lite.errors import InputError
from galvatron_lite.model.zoo import SIZES, build


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


def test_errors() -> None:
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
