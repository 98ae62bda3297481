"""Builds the graph of a published run's model."""

from __future__ import annotations

import re
from functools import lru_cache

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.kernels import Kernels
from galvatron_lite.model.shapes import DecoderShape, EncoderDecoderShape, EncoderShape, MoeShape, Shape
from galvatron_lite.model.shapes.images.layout import channels_last, fused_norms, partitioned
from galvatron_lite.model.shapes.images.names import (
    canonical,
    graph_of_name,
    normalises_inplace,
    once_a_batch,
    works_on_tokens,
)
from galvatron_lite.model.shapes.images.summary import ImageTotals, summary_graph
from galvatron_lite.model.shapes.registry import load_model, load_shape, model_names
from galvatron_lite.stacks.schema import Stack
from galvatron_lite.validate.plans import argument, integer_argument
from galvatron_lite.validate.results import SkipError
from galvatron_lite.validate.rows import PublishedRun

_TOTALS = re.compile(r"fwd gmacs ([\d.]+), m-activations ([\d.]+)")
_BALANCE = re.compile(r"layer balance \[(\d+(?:, *\d+)*)\]")
_LAST = re.compile(r"\bnhwc\b|channels[ _-]last")

_LAST_STACKS = ("tensorflow", "mxnet", "paddle", "oneflow", "pytorch-ddp", "mxnet-ngc", "mxnet-release")
"""Software whose mixed-precision recipes use channels last: NVIDIA DeepLearningExamples (``--memory-format nhwc``,
``--data-layout NHWC``, MXNet's NHWC input layout) and TensorFlow's layout optimizer on tensor cores."""

_SHIPPED = ("alexnet",)  # networks of ``configs/models`` that ``graph_of_name`` does not build

_LAST_RECIPES = (("pytorch-ddp", "ssd300_resnet50"),)
"""Recipes with channels last in any precision (DeepLearningExamples, PyTorch/Detection/SSD, main.py: ``--data-layout``
is ``channels_last``)."""

_FIRST_RECIPES = (("pytorch-ddp", "nnunet_2d"), ("pytorch-ddp", "nnunet_3d"))
"""Recipes with channels first in any precision (PyTorch/Segmentation/nnUNet)."""

_PARTITIONING = ("torchgpipe",)
"""Software that recomputes a partition of its pipeline as a whole (``partitioned``)."""


_PICTURES = ("cnn", "conv", "vit", "unet", "u-net", "image", "vision", "resnet", "segment")
"""Words of ``arch`` for networks of pictures."""


def is_image(run: PublishedRun) -> bool:
    """Whether a run trains an image network, as its ``arch`` says or, without one, its model's name."""
    if run.arch:
        return any(word in run.arch.lower() for word in _PICTURES)
    name = canonical(run.model or "")
    return run.hidden is None and _named(name, 224, "fp16", Kernels(), False, False, ()) is not None


def image_model(run: PublishedRun, stack: Stack) -> ModelGraph:
    """Return the graph of a run's image network.

    Raises:
        SkipError: an unknown network.
    """
    if not run.model:
        raise SkipError("no model named", "Give model.")
    words = (run.precision or "bf16").lower()
    # a precision of the run's item size: activations of TF32 runs are fp32
    precision = "fp16" if re.search("fp16|bf16|fp8", words) or "32" not in words else "fp32"
    side = run.image_size or 224
    last = _LAST.search(run.remarks) is not None or (precision == "fp16" and stack.name in _LAST_STACKS)
    recipe = (stack.name, canonical(run.model))
    last = (last or recipe in _LAST_RECIPES) and recipe not in _FIRST_RECIPES
    balance = layer_balance(run.remarks) if stack.name in _PARTITIONING else ()
    fused = not balance and ("xla" in run.remarks or (stack.fuses_norms and last and precision == "fp16"))
    graph = _named(canonical(run.model), side, precision, stack.kernels, last, fused, balance)
    match = _TOTALS.search(run.remarks)
    if graph is None and match and run.params_b:
        totals = (float(match[1]) * 1e9, float(match[2]) * 1e6, run.params_b * 1e9)
        graph = _summed(canonical(run.model), totals, side, precision, last) if min(totals) > 0 else None
    if graph is None:
        remedy = "Give a network's name, such as resnet50 or unet3d, or its GMACs, activations and params_b."
        raise SkipError(
            "image network known neither by name nor by totals", str(InputError("model", run.model, remedy))
        )
    return graph


def layer_balance(notes: str) -> tuple[int, ...]:
    """Return the layers of each stage that a run states (``layer balance [9, 15]``); none if it does not."""
    match = _BALANCE.search(notes)
    return tuple(int(count) for count in match[1].split(",")) if match else ()


@lru_cache(maxsize=2048)
def _named(
    name: str, side: int, precision: str, kernels: Kernels, last: bool, fused: bool, balance: tuple[int, ...]
) -> ModelGraph | None:
    if name in _SHIPPED:
        graph: ModelGraph | None = load_model(name, overrides={"image_size": side}, precision=precision)
    else:
        graph = graph_of_name(name, side, precision, kernels)
    if graph is None:
        return None
    graph = channels_last(graph) if last else graph
    graph = fused_norms(graph) if fused else graph
    return partitioned(graph, balance) if balance else graph


@lru_cache(maxsize=2048)
def _summed(name: str, totals: tuple[float, float, float], side: int, precision: str, last: bool) -> ModelGraph:
    macs, activations, parameters = totals
    once = once_a_batch(name, side)
    activations, macs = max(activations - once[0], activations / 10), max(macs - once[1], macs / 10)
    shape = ImageTotals(
        name=name, macs=macs, activations=activations, parameters=parameters, image_size=side, channels_last=last,
        tokens=works_on_tokens(name), inplace=normalises_inplace(name),
    )  # fmt: skip
    return summary_graph(shape, precision)


_FORCED = ("force-balanced", "forced expert balance", "force-load-balancing", "fake balanced gate")
"""Words of notes for routers that are forced to send all experts the same number of tokens."""
_UNSTATED = (
    "biases",
    "head_norm",
    "window",
    "window_period",
    "sinks",
    "clamped",
    "router",
    "expert_groups",
    "chosen_groups",
)
"""Fields of ``MoeShape`` that rows do not have; they come from the shipped model of the run's name."""


def named_figures(model: str | None) -> dict[str, object]:
    """Return fields of the shape of a shipped mixture of experts by its name; none for an unknown name.

    Every Qwen3 has heads of 128 (huggingface.co/Qwen); gpt-oss-20b has fewer blocks and experts than gpt-oss-120b, all
    else is alike (arXiv:2508.10925, table 1).
    """
    name = "gpt-oss-120b" if (model or "").lower().startswith("gpt-oss") else (model or "").lower()
    shape = load_shape(name) if name in model_names() else None
    if not isinstance(shape, MoeShape):
        return {"head_dim": 128} if name.startswith("qwen3-") else {}
    named = ("head_dim", "ffn_hidden", "shared_ffn", "dense_layers", *_UNSTATED)
    return {field: getattr(shape, field) for field in named}


_NEEDED = ("layers", "hidden", "heads", "vocab", "seq_len")


def shape_of(run: PublishedRun, stack: Stack) -> Shape:
    """Return the shape of a run's transformer.

    A gated MLP means a model like Llama (rotary positions, RMSNorm, no biases, SiLU, no dropout), a plain one a model
    like GPT (GELU, LayerNorm; positions, biases and dropout of the stack's recipes).

    Raises:
        SkipError: missing figures, or an unknown architecture.
    """
    arch = (run.arch or "decoder").lower()
    if "memory" in arch or "hybrid" in arch or "mamba" in run.remarks or "hybrid-layer-pattern" in run.remarks:
        raise SkipError("architecture not modelled", _unknown(run))
    missing = [name for name in _NEEDED if getattr(run, name) is None]
    if missing:
        raise SkipError(f"model figures missing: {', '.join(missing)}", f"Give {', '.join(missing)}.")
    if run.heads and run.hidden and run.hidden % run.heads and integer_argument(run.remarks, "kv-channels") is None:
        message = f"heads: {run.heads} does not divide hidden ({run.hidden}). Mend it, or say kv-channels=... in notes."
        raise SkipError("head size not stated", message)
    if "moe" in arch or (run.n_experts or 0) > 1:
        return _mixture(run, stack)
    if arch.startswith("encoder-decoder") or arch in ("t5", "bart"):
        return _encoder_decoder(run, stack)
    if arch.startswith("encoder") or arch == "bert":
        return _encoder(run, stack)
    if arch.startswith("decoder"):
        return DecoderShape(**_causal(run, stack))  # type: ignore[arg-type]
    raise SkipError("architecture not modelled", _unknown(run))


def _unknown(run: PublishedRun) -> str:
    return str(InputError("arch", run.arch, "Known: decoder, moe, encoder, encoder-decoder, cnn, vit, unet."))


def _common(run: PublishedRun, stack: Stack) -> dict[str, object]:
    """Return the fields that all transformers share; the stack decides how the vocabulary is padded."""
    gated, shipped = bool(run.gated_mlp), named_figures(run.model)
    return {
        "name": "published",
        "layers": run.layers,
        "hidden": run.hidden,
        "heads": run.heads,
        "kv_heads": run.kv_heads or 0,
        "head_dim": integer_argument(run.remarks, "kv-channels") or shipped.get("head_dim", 0),
        "ffn_hidden": run.ffn_hidden or shipped.get("ffn_hidden", 0),
        "gated_mlp": gated,
        "vocab": run.vocab,
        "vocab_multiple": stack.vocab_multiple * (run.tp or 1) if stack.vocab_multiple > 1 else 1,
        "tied_embeddings": not gated if run.tied_embeddings is None else run.tied_embeddings,
        "seq_len": run.seq_len,
        "dropout": 0.0 if gated else stack.dropout,
        "split_vocabulary": stack.parallel_vocabulary,
    }


def _encoder(run: PublishedRun, stack: Stack) -> Shape:
    """Return the shape of a BERT; a head of fine-tuning is as small as the logits of one token."""
    if "fine-tun" in run.remarks:
        return EncoderShape(**_common(run, stack), predicted=1)  # type: ignore[arg-type]
    predicted = max(round((run.seq_len or 0) * stack.predicted_share), 1) if stack.predicted_share < 1 else 0
    return EncoderShape(**_common(run, stack), head="pretraining", predicted=predicted)  # type: ignore[arg-type]


_LATENT = {"q_rank": 1536, "kv_rank": 512, "rope_dim": 64, "head_dim": 192, "value_dim": 128, "positions": "rotary"}
"""Multi-head latent attention of DeepSeek-V2 and V3 (arXiv 2412.19437, 4.2); rows do not state its ranks."""


def _causal(run: PublishedRun, stack: Stack) -> dict[str, object]:
    gated = bool(run.gated_mlp)
    fields = _common(run, stack) | {
        "activation": "silu" if gated else "gelu",
        "norm": "rmsnorm" if gated else "layernorm",
        "positions": "rotary" if gated else stack.positions,
        "biases": not gated and stack.biases,
    }
    latent = "mla" in (run.arch or "").lower() or "multi-latent-attention=true" in run.remarks
    return fields | _LATENT | {"kv_heads": run.heads} if latent else fields


def _mixture(run: PublishedRun, stack: Stack) -> Shape:
    if run.n_experts is None:
        raise SkipError("model figures missing: n_experts")
    shipped = named_figures(run.model)
    fields = _causal(run, stack) | {
        "n_experts": run.n_experts,
        "moe_topk": min(run.moe_topk or 2, run.n_experts),
        "moe_ffn": run.moe_ffn or integer_argument(run.remarks, "moe-ffn-hidden-size") or 0,
        "shared_ffn": integer_argument(run.remarks, "moe-shared-expert-intermediate-size")
        or shipped.get("shared_ffn", 0),
        "dense_layers": dense_layers(argument(run.remarks, "moe-layer-freq")) or shipped.get("dense_layers", 0),
    }
    fields |= {field: shipped[field] for field in _UNSTATED if field in shipped}
    if any(words in run.remarks for words in _FORCED):
        fields["expert_excess"] = 0.0
    return MoeShape(**fields)  # type: ignore[arg-type]


def dense_layers(pattern: str | None) -> int:
    """Return the dense blocks before the first mixture by Megatron-LM's ``--moe-layer-freq`` (``([0]*3+[1]*12)``)."""
    match = re.match(r"\(?\[0\]\*(\d+)\+", pattern or "")
    return int(match[1]) if match else 0


def _encoder_decoder(run: PublishedRun, stack: Stack) -> Shape:
    """Return the shape of an encoder-decoder; its parameters tell whether ``layers`` counts both stacks together."""
    fields = _common(run, stack)
    layers, hidden = run.layers or 1, run.hidden or 1
    ffn = run.ffn_hidden or 4 * hidden
    # Encoder block: 4 projections and the MLP; decoder block: 8 projections and the MLP (Vaswani et al. 2017).
    pair = 12 * hidden**2 + 2 * (3 if run.gated_mlp else 2) * hidden * ffn
    table = (run.vocab or 0) * hidden
    stated = (run.params_b or 0.0) * 1e9
    if stated and abs(stated - table - layers * pair) > abs(stated - table - layers / 2 * pair):
        fields |= {"layers": max(layers // 2, 1)}
    return EncoderDecoderShape(**fields)  # type: ignore[arg-type]
