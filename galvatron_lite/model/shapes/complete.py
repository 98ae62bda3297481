"""Fill in the sizes of a shape that follow from others, and check that they fit one another."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

from galvatron_lite.errors import InputError
from galvatron_lite.limits import LAYERS, SAMPLES, is_name
from galvatron_lite.model.shapes.fields import (
    ConvNextShape,
    EncoderDecoderShape,
    MoeShape,
    Shape,
    TransformerShape,
    VitShape,
)
from galvatron_lite.model.shapes.picture_fields import PictureShape, check_pictures

T = TypeVar("T", bound=TransformerShape)
_MAY_BE_ZERO = {
    "kv_heads", "head_dim", "ffn_hidden", "moe_ffn", "decoder_layers", "decoder_seq_len", "position_entries",
    "kv_rank", "q_rank", "rope_dim", "value_dim", "predicted", "shared_ffn", "dense_layers", "image_height",
    "image_width",
}  # fmt: skip


_LARGEST = {"layers": LAYERS, "decoder_layers": LAYERS, "depths": LAYERS // 4, "levels": 24, "n_experts": 2**16}
"""The largest sizes that count layers or halvings."""


def complete(shape: Shape) -> Shape:
    """The shape with sizes that follow from others filled in."""
    _check_sizes(shape)
    match shape:
        case EncoderDecoderShape():
            whole = replace(
                shape,
                decoder_layers=shape.decoder_layers or shape.layers,
                decoder_seq_len=shape.decoder_seq_len or shape.seq_len,
            )
            return _complete_transformer(whole)
        case MoeShape():
            return _complete_moe(shape)
        case VitShape():
            return _complete_vit(shape)
        case ConvNextShape():
            return _checked_convnext(shape)
        case PictureShape():
            check_pictures(shape)
        case TransformerShape():
            return _complete_transformer(shape)
    return shape


def _check_sizes(shape: Shape) -> None:
    for item in fields(shape):
        value = getattr(shape, item.name)
        sizes = value if isinstance(value, tuple) else (value,)
        low = 0 if item.name in _MAY_BE_ZERO else 1
        high = _LARGEST.get(item.name, SAMPLES)
        wrong = any(isinstance(size, int) and not isinstance(size, bool) and not low <= size <= high for size in sizes)
        if wrong or not 0 < len(sizes) <= LAYERS:
            number = "numbers" if isinstance(value, tuple) else "a number"
            raise InputError(item.name, value, f"Give {number} from {low} to {high}.")
    try:
        is_name(shape.name)
    except ValueError as error:
        raise InputError("name", shape.name, f"{error}.") from error
    probability = getattr(shape, "dropout", 0.0)
    if not 0 <= probability < 1:
        raise InputError("dropout", probability, "Give a probability from 0 up to, not including, 1.")


def _complete_transformer(shape: T) -> T:
    kv_heads = shape.kv_heads or shape.heads
    if not shape.head_dim and shape.hidden % shape.heads:
        raise InputError("heads", shape.heads, f"Choose a number that divides {shape.hidden}, or give head_dim.")
    if shape.heads % kv_heads:
        raise InputError("kv_heads", kv_heads, f"Choose a number that divides the {shape.heads} heads.")
    if shape.kv_rank and not 0 < shape.rope_dim < (shape.head_dim or shape.hidden // shape.heads):
        raise InputError("rope_dim", shape.rope_dim, "Latent attention turns part of head_dim; give a smaller number.")
    entries = shape.position_entries or shape.seq_len
    if shape.positions == "learned" and shape.seq_len > entries:
        raise InputError("seq_len", shape.seq_len, f"The table of learned positions has {entries} (position_entries).")
    return replace(
        shape,
        kv_heads=kv_heads,
        head_dim=shape.head_dim or shape.hidden // shape.heads,
        ffn_hidden=shape.ffn_hidden or 4 * shape.hidden,
        position_entries=entries,
    )


def _complete_moe(shape: MoeShape) -> MoeShape:
    if shape.moe_topk > shape.n_experts:
        raise InputError("moe_topk", shape.moe_topk, f"There are {shape.n_experts} experts a block.")
    if shape.dense_layers >= shape.layers:
        raise InputError("dense_layers", shape.dense_layers, f"Choose fewer than the {shape.layers} layers.")
    if shape.capacity < 1:
        raise InputError("capacity", shape.capacity, "Give a factor of 1 or more on an expert's even share.")
    whole = _complete_transformer(shape)
    return replace(whole, moe_ffn=whole.moe_ffn or whole.ffn_hidden)


def _complete_vit(shape: VitShape) -> VitShape:
    if shape.hidden % shape.heads:
        raise InputError("heads", shape.heads, f"Choose a number that divides the hidden size {shape.hidden}.")
    if shape.image_size % shape.patch:
        raise InputError("patch", shape.patch, f"Choose a number that divides the image size {shape.image_size}.")
    return replace(shape, ffn_hidden=shape.ffn_hidden or 4 * shape.hidden)


def _checked_convnext(shape: ConvNextShape) -> ConvNextShape:
    if len(shape.depths) != len(shape.widths):
        raise InputError("depths", shape.depths, f"Give as many as widths ({len(shape.widths)}).")
    return shape
