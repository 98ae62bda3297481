"""The model a published run trains: from a row's figures to a shape."""

from __future__ import annotations

import re

from galvatron_lite.errors import InputError
from galvatron_lite.model.shapes import DecoderShape, EncoderDecoderShape, EncoderShape, MoeShape, Shape
from galvatron_lite.stacks.schema import Stack
from galvatron_lite.validate.plans import argument, integer_argument
from galvatron_lite.validate.results import Skipped
from galvatron_lite.validate.rows import PublishedRun

_NAMED: tuple[tuple[str, dict[str, int]], ...] = (
    # huggingface.co/Qwen/Qwen3-235B-A22B, Qwen3-30B-A3B and the dense ones: head_dim.
    ("qwen3-", {"head_dim": 128}),
    # huggingface.co/openai/gpt-oss-120b: head_dim.
    ("gpt-oss-", {"head_dim": 64}),
    # huggingface.co/deepseek-ai/DeepSeek-V3: n_shared_experts x moe_intermediate_size, first_k_dense_replace,
    # intermediate_size (of the dense layers).
    ("deepseek-v3", {"shared_ffn": 2048, "dense_layers": 3, "ffn_hidden": 18432}),
)


def named_figures(model: str | None) -> dict[str, int]:
    """Figures of a public model by its name, by field of a shape; none for a name that is not known."""
    name = (model or "").lower()
    return next((figures for start, figures in _NAMED if name.startswith(start)), {})


_NEEDED = ("layers", "hidden", "heads", "vocab", "seq_len")


def shape_of(run: PublishedRun, stack: Stack) -> Shape | Skipped:
    """The shape of a transformer, or why there is none.

    A gated MLP means a model after Llama (rotary positions, RMSNorm, no biases, SiLU, no dropout), a plain one a model
    after GPT (GELU, LayerNorm; positions, biases and dropout as the stack's recipes have them).
    """
    arch = (run.arch or "decoder").lower()
    if "memory" in arch or "hybrid" in arch or "mamba" in run.remarks or "hybrid-layer-pattern" in run.remarks:
        return Skipped("architecture not modelled", _unknown(run))
    missing = [name for name in _NEEDED if getattr(run, name) is None]
    if missing:
        return Skipped(f"model figures missing: {', '.join(missing)}", f"Give {', '.join(missing)}.")
    if run.heads and run.hidden and run.hidden % run.heads and integer_argument(run.remarks, "kv-channels") is None:
        said = f"heads: {run.heads} does not divide hidden ({run.hidden}). Mend it, or say kv-channels=... in notes."
        return Skipped("head size not stated", said)
    if "moe" in arch or (run.n_experts or 0) > 1:
        return _mixture(run, stack)
    if arch.startswith("encoder-decoder") or arch in ("t5", "bart"):
        return _two_stacks(run, stack)
    if arch.startswith("encoder") or arch == "bert":
        return _encoder(run, stack)
    if arch.startswith("decoder"):
        return DecoderShape(**_causal(run, stack))  # type: ignore[arg-type]
    return Skipped("architecture not modelled", _unknown(run))


def _unknown(run: PublishedRun) -> str:
    """What to give instead of an architecture that is not modelled."""
    return str(InputError("arch", run.arch, "Known: decoder, moe, encoder, encoder-decoder, cnn, vit, unet."))


def _common(run: PublishedRun, stack: Stack) -> dict[str, object]:
    """Fields that all transformers share; the vocabulary is padded as the stack pads it."""
    gated, named = bool(run.gated_mlp), named_figures(run.model)
    return {
        "name": "published",
        "layers": run.layers,
        "hidden": run.hidden,
        "heads": run.heads,
        "kv_heads": run.kv_heads or 0,
        "head_dim": integer_argument(run.remarks, "kv-channels") or named.get("head_dim", 0),
        "ffn_hidden": run.ffn_hidden or named.get("ffn_hidden", 0),
        "gated_mlp": gated,
        "vocab": run.vocab,
        "vocab_multiple": stack.vocab_multiple * (run.tp or 1) if stack.vocab_multiple > 1 else 1,
        "tied_embeddings": not gated if run.tied_embeddings is None else run.tied_embeddings,
        "seq_len": run.seq_len,
        "dropout": 0.0 if gated else stack.dropout,
        "split_vocabulary": stack.parallel_vocabulary,
    }


def _encoder(run: PublishedRun, stack: Stack) -> Shape:
    """A BERT; heads of fine-tuning are as small as one token's logits."""
    if "fine-tun" in run.remarks:
        return EncoderShape(**_common(run, stack), predicted=1)  # type: ignore[arg-type]
    predicted = max(round((run.seq_len or 0) * stack.predicted_share), 1) if stack.predicted_share < 1 else 0
    return EncoderShape(**_common(run, stack), head="pretraining", predicted=predicted)  # type: ignore[arg-type]


def _causal(run: PublishedRun, stack: Stack) -> dict[str, object]:
    gated = bool(run.gated_mlp)
    return (
        _common(run, stack)
        | {
            "activation": "silu" if gated else "gelu",
            "norm": "rmsnorm" if gated else "layernorm",
            "positions": "rotary" if gated else stack.positions,
            "biases": not gated and stack.biases,
        }
        | _latent(run)
    )


def _latent(run: PublishedRun) -> dict[str, object]:
    """Multi-head latent attention, whose ranks no row states, as DeepSeek-V2 and V3 have it (arXiv 2412.19437, 4.2)."""
    if "mla" not in (run.arch or "").lower() and "multi-latent-attention=true" not in run.remarks:
        return {}
    return {
        "q_rank": 1536,
        "kv_rank": 512,
        "rope_dim": 64,
        "head_dim": 192,
        "value_dim": 128,
        "kv_heads": run.heads,
        "positions": "rotary",
    }


def _mixture(run: PublishedRun, stack: Stack) -> Shape | Skipped:
    experts, ways = run.n_experts, run.moe_topk or 2
    if experts is None:
        return Skipped("model figures missing: n_experts")
    named = named_figures(run.model)
    width = run.moe_ffn or integer_argument(run.remarks, "moe-ffn-hidden-size") or 0
    fields = _causal(run, stack) | {
        "n_experts": experts,
        "moe_topk": min(ways, experts),
        "moe_ffn": width,
        "shared_ffn": integer_argument(run.remarks, "moe-shared-expert-intermediate-size")
        or named.get("shared_ffn", 0),
        "dense_layers": dense_layers(argument(run.remarks, "moe-layer-freq")) or named.get("dense_layers", 0),
    }
    return MoeShape(**fields)  # type: ignore[arg-type]


def dense_layers(pattern: str | None) -> int:
    """Plain blocks before the first mixture, from Megatron-LM's ``--moe-layer-freq`` (``([0]*3+[1]*12)``)."""
    found = re.match(r"\(?\[0\]\*(\d+)\+", pattern or "")
    return int(found[1]) if found else 0


def _two_stacks(run: PublishedRun, stack: Stack) -> Shape:
    """An encoder-decoder; where its parameters say so, ``layers`` counts both stacks together."""
    fields = _common(run, stack)
    layers, hidden = run.layers or 1, run.hidden or 1
    ffn = run.ffn_hidden or 4 * hidden
    # Encoder block: 4 projections and the MLP; decoder block: 8 projections and the MLP (Vaswani et al. 2017).
    pair = 12 * hidden**2 + 2 * (3 if run.gated_mlp else 2) * hidden * ffn
    table = (run.vocab or 0) * hidden
    said = (run.params_b or 0.0) * 1e9
    if said and abs(said - table - layers * pair) > abs(said - table - layers / 2 * pair):
        fields |= {"layers": max(layers // 2, 1)}
    return EncoderDecoderShape(**fields)  # type: ignore[arg-type]
