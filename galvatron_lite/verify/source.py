"""Sources of models: a name, a user's function, or a module; built when needed, with or without storages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from galvatron_lite.capture.huggingface import build_model, find_config
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.model.batch import LossFn
from galvatron_lite.model.example import example_batch
from galvatron_lite.model.shapes import (
    DecoderShape,
    EncoderDecoderShape,
    EncoderShape,
    MoeShape,
    Shape,
    VitShape,
    load_shape,
)
from galvatron_lite.model.shapes.fields import PictureShape, TransformerShape
from galvatron_lite.model.trace.meta import copy_with
from galvatron_lite.model.zoo import build, build_image, size_named


def build_named(name: str, sequence: int | None = None) -> nn.Module:
    """Build a model by its name.

    Args:
        name: of the zoo (``gpt-tiny``), of ``configs/models`` (``llama3-70b``), or the path of such a YAML file; or a
            configuration of transformers, see ``capture.huggingface.find_config``.
        sequence: tokens per sample; by default the model's. Ignored for transformers, where the batch decides.
    """
    config = find_config(name)
    if config is not None:
        return build_model(config)
    zoo_name = size_named(name)
    if zoo_name is not None and not name.endswith((".yaml", ".yml", ".json")):
        return build(zoo_name, **({} if sequence is None else {"sequence": sequence}))
    return build_shape(load_shape(name), sequence)


def build_shape(shape: Shape, sequence: int | None = None) -> nn.Module:
    """Build a module of a published shape.

    Raises:
        InputError: no module of the zoo or of transformers has this shape.
    """
    match shape:
        case MoeShape() | DecoderShape():
            return _decoder(shape, sequence or shape.seq_len)
        case EncoderShape():
            dropout = {"hidden_dropout_prob": shape.dropout, "attention_probs_dropout_prob": shape.dropout}
            return _transformers(
                "BertForMaskedLM", "BertConfig", vocab_size=shape.entries, hidden_size=shape.hidden,
                num_hidden_layers=shape.layers, num_attention_heads=shape.heads, type_vocab_size=shape.segments,
                intermediate_size=shape.ffn_hidden or 4 * shape.hidden,
                max_position_embeddings=max(sequence or shape.seq_len, shape.position_entries), **dropout,
            )  # fmt: skip
        case EncoderDecoderShape():
            return _transformers(
                "T5ForConditionalGeneration", "T5Config", vocab_size=shape.entries, d_model=shape.hidden,
                d_kv=shape.head_dim or shape.hidden // shape.heads, d_ff=shape.ffn_hidden or 4 * shape.hidden,
                num_layers=shape.layers, num_decoder_layers=shape.decoder_layers or shape.layers,
                num_heads=shape.heads, dropout_rate=shape.dropout, use_cache=False, decoder_start_token_id=0,
                tie_word_embeddings=shape.tied_embeddings, relative_attention_num_buckets=shape.buckets,
            )  # fmt: skip
        case VitShape():
            dropout = {"hidden_dropout_prob": shape.dropout, "attention_probs_dropout_prob": shape.dropout}
            return _transformers(
                "ViTForImageClassification", "ViTConfig", hidden_size=shape.hidden, num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads, intermediate_size=shape.ffn_hidden or 4 * shape.hidden,
                image_size=shape.image_size, patch_size=shape.patch, num_channels=shape.channels,
                num_labels=shape.classes, **dropout,
            )  # fmt: skip
        case PictureShape():
            return build_image(shape)


def _transformers(model: str, config: str, **fields: Any) -> nn.Module:
    transformers: Any = import_module("transformers")
    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**fields))
    return built


def _refuse(shape: TransformerShape, why: str) -> InputError:
    remedy = f"No module is built here of {why}. Give the model itself: --model SCRIPT.py:FACTORY."
    return InputError("--model", shape.name, remedy)


def _decoder(shape: DecoderShape | MoeShape, tokens: int) -> nn.Module:
    if shape.kv_rank or shape.window or shape.head_dim not in (0, shape.hidden // shape.heads):
        raise _refuse(shape, "latent attention, of windows, or of heads of another width")
    sizes = {
        "vocab": shape.entries, "layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads,
        "sequence": tokens, "dropout": shape.dropout, "kv_heads": shape.kv_heads or shape.heads,
    }  # fmt: skip
    kinds = (shape.gated_mlp, shape.activation, shape.norm, shape.biases, shape.positions)
    is_llama = kinds == (True, "silu", "rmsnorm", False, "rotary") and not shape.qkv_bias
    if isinstance(shape, MoeShape):
        plain = not (shape.shared_ffn or shape.dense_layers or shape.head_norm or shape.sinks)
        if not (is_llama and plain and shape.router == "softmax"):
            raise _refuse(shape, "such mixtures")
        experts = {"experts": shape.n_experts, "choices": shape.moe_topk, "tied": shape.tied_embeddings}
        return build("moe-tiny", **sizes, ffn_hidden=shape.moe_ffn or shape.ffn_hidden, **experts)
    if is_llama:
        return build("llama-tiny", **sizes, ffn_hidden=shape.ffn_hidden, tied=shape.tied_embeddings)
    if kinds == (False, "gelu", "layernorm", True, "learned") and shape.tied_embeddings:
        return build("gpt-tiny", **sizes, ffn_hidden=shape.ffn_hidden)
    raise _refuse(shape, "these kinds of MLP, norm and positions together")


ModelParts = tuple[nn.Module, Any, LossFn | None]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be built any number of times."""

    name: str  # in messages
    # builds the model on the current default device, and returns it with an example batch and a
    # ``loss_fn(output, batch)``; either may be None, and a model without a batch makes one
    make: Callable[[], ModelParts]
    configured: bool = False  # whether the model is known to be built from its ``config`` alone

    def on_meta(self) -> ModelParts:
        """Return the result of ``make`` with a copy of the model on the meta device.

        The batch may be on the meta device, too, unless ``make`` needs values (of files, say).
        """
        try:
            with torch.device("meta"):
                model, batch, loss_fn = self.make()
        except GalvatronError:
            raise
        except Exception:  # a user's function may fail in any way on the meta device
            model, batch, loss_fn = self.make()
        return copy_with(model, partial(torch.empty_like, device="meta")), batch, loss_fn


def example_of(parts: ModelParts) -> Any:
    """Return the example batch of a model: its source's, or else the model's."""
    model, batch, _ = parts
    return example_batch(model) if batch is None else batch


def named_source(name: str, sequence: int | None = None) -> ModelSource:
    """Return the source of a named model; see ``build_named``."""
    return ModelSource(name, lambda: (build_named(name, sequence), None, None), configured=True)


def factory_source(factory: Callable[[], Any], name: str = "the model") -> ModelSource:
    """Return the source of what a user's function returns: a model, (model, batch) or (model, batch, loss_fn)."""

    def make() -> ModelParts:
        built = factory()
        model, batch, loss_fn = (*built, None, None)[:3] if isinstance(built, tuple) else (built, None, None)
        if not isinstance(model, nn.Module):
            raise InputError("MODEL", name, f"It returned {type(model).__name__}, not an nn.Module.")
        return model, batch, loss_fn

    return ModelSource(name, make)


def module_source(model: nn.Module, batch: Any = None, loss_fn: LossFn | None = None) -> ModelSource:
    """Return the source of an existing model, which is copied and not changed."""

    def make() -> ModelParts:
        without_values = torch.get_default_device().type == "meta"  # ``on_meta`` copies it without its values
        return model if without_values else copy.deepcopy(model), batch, loss_fn

    return ModelSource(type(model).__name__, make)
