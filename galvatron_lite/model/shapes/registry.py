"""Shapes from names, files, mappings and command-line flags; and the ``ModelGraph`` of a shape."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from galvatron_lite.errors import FileFormatError, InputError, suggestion, unknown
from galvatron_lite.files import from_data, kind_of, read_data
from galvatron_lite.folders import config_folder
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.kernels import EAGER, Kernels
from galvatron_lite.model.shapes.fields import (
    SHAPES,
    DecoderShape,
    EncoderDecoderShape,
    EncoderShape,
    MoeShape,
    PictureShape,
    Shape,
    TransformerShape,
    VitShape,
    complete,
)
from galvatron_lite.model.trainable import Trainable, with_trainable
from galvatron_lite.units import ITEM_BYTES

SUFFIXES = (".yaml", ".yml", ".json")
"""Suffixes of model files."""
_SHORT_FLAGS = {
    "seq": "seq_len", "sequence": "seq_len", "ffn": "ffn_hidden", "experts": "n_experts", "topk": "moe_topk",
    "image": "image_size", "tied": "tied_embeddings",
}  # fmt: skip
_LISTS = ("depths", "widths", "kernels", "strides")


def build_graph(
    shape: Shape,
    *,
    sequence: int | None = None,
    precision: str = "bf16",
    kernels: Kernels | None = None,
    trainable: Trainable | None = None,
) -> ModelGraph:
    """Compute the graph of a shape: layers and their figures for one sample, nothing measured.

    Args:
        shape: of any family.
        sequence: tokens per sample, of both stacks of an encoder-decoder; the shape's own if None.
        precision: of activations and compute, a key of ``units.ITEM_BYTES``; under ``fp8`` activations are bf16 and
            the blocks' matmuls run in fp8.
        kernels: that run; if None PyTorch's own on a CUDA device, with RMSNorm step by step if the shape says so.
        trainable: which parameters train; all if None.

    Raises:
        InputError: sizes that do not fit one another, an unknown precision, more tokens than learned positions, or a
            sequence for a model of images.
    """
    if precision not in ITEM_BYTES:
        raise InputError("precision", precision, f"Choose one of {', '.join(ITEM_BYTES)}.")
    shape = complete(shape if sequence is None else _with_sequence(shape, sequence))
    kernels = kernels or replace(EAGER, fused_norm=getattr(shape, "fused_norm", True))
    build = partial(_graph, shape, precision, replace(kernels, fp8=True) if precision == "fp8" else kernels)
    if trainable is None:
        return build()
    if isinstance(shape, PictureShape) and not isinstance(shape, VitShape):
        remedy = "Networks of convolutions by name train whole: give the model itself, FILE.py:FACTORY."
        raise InputError("--freeze", ", ".join(trainable.freeze) or None, remedy)
    return with_trainable(build, trainable)


def _with_sequence(shape: Shape, sequence: int) -> Shape:
    if not isinstance(shape, TransformerShape):
        raise InputError("sequence", sequence, "A model of images has none; change image_size.")
    entries = shape.position_entries or shape.seq_len
    if isinstance(shape, EncoderDecoderShape):
        return replace(shape, seq_len=sequence, decoder_seq_len=sequence, position_entries=entries)
    return replace(shape, seq_len=sequence, position_entries=entries)


def _graph(shape: Shape, precision: str, kernels: Kernels) -> ModelGraph:
    """The graph of a complete shape; modules are imported here, so that a model does not wait for other families."""
    if isinstance(shape, PictureShape) and not isinstance(shape, VitShape):
        from galvatron_lite.model.shapes.images.convnets import picture_graph

        return picture_graph(shape, precision, kernels)
    from galvatron_lite.model.shapes.encoder_decoder import encoder_decoder_graph, vit_graph
    from galvatron_lite.model.shapes.transformer import decoder_graph, encoder_graph

    match shape:
        case DecoderShape() | MoeShape():
            return decoder_graph(shape, precision, kernels)
        case EncoderShape():
            return encoder_graph(shape, precision, kernels)
        case EncoderDecoderShape():
            return encoder_decoder_graph(shape, precision, kernels)
        case VitShape():
            return vit_graph(shape, precision, kernels)


def model_names() -> tuple[str, ...]:
    """Return the names of the shipped models, sorted."""
    return tuple(sorted(path.stem for path in config_folder("models").glob("*.yaml")))


def match_name(name: str, names: Iterable[str]) -> str | None:
    """Return the one of several names that equals a name, apart from hyphens; None if none does."""
    plain = name.replace("-", "")
    return next((other for other in names if other.replace("-", "") == plain), None)


def load_model(
    name_or_path: str,
    *,
    overrides: Mapping[str, object] | None = None,
    sequence: int | None = None,
    precision: str = "bf16",
    kernels: Kernels | None = None,
    trainable: Trainable | None = None,
) -> ModelGraph:
    """Return the graph of a shipped model or of a model file; see ``build_graph``.

    Raises:
        InputError: an unknown name (lists the closest and all), or fields that do not fit.
        FileFormatError: the file cannot be read.
    """
    shape = load_shape(name_or_path, overrides=overrides)
    return build_graph(shape, sequence=sequence, precision=precision, kernels=kernels, trainable=trainable)


def load_shape(name_or_path: str, *, overrides: Mapping[str, object] | None = None) -> Shape:
    """Return the shape of a shipped model or of a model file; see ``load_model``."""
    path = Path(name_or_path)
    if path.suffix not in SUFFIXES:
        names = model_names()
        name = match_name(name_or_path, names)
        if name is None:
            raise unknown("model", name_or_path, names, "Or give a .yaml file.")
        path = config_folder("models") / f"{name}.yaml"
    data = read_data(path)
    if not isinstance(data, dict):
        raise FileFormatError(str(path), kind_of(data), "A model file holds one mapping of fields.")
    name = os.fsencode(path.stem).decode("utf-8", "replace")  # under LC_ALL=C paths hold surrogates for non-ASCII bytes
    return shape_from_data({"name": name} | data | dict(overrides or {}), str(path))


def shape_from_data(data: Mapping[str, object], field: str = "model", *, strict: bool = True) -> Shape:
    """Return the shape that a mapping describes; ``arch`` names its family (``decoder`` if missing)."""
    arch = data.get("arch", "decoder")
    if not isinstance(arch, str) or arch not in SHAPES:
        raise unknown(f"{field}, arch", arch, SHAPES)
    names = [item.name for item in fields(SHAPES[arch])]
    for name in [name for name in data if name not in names][:1]:
        hint = suggestion(str(name), names, _SHORT_FLAGS) or f"Known: {', '.join(names)}."
        raise FileFormatError(f"{field}, {name}", data[name], f"There is no such field. {hint}")
    return complete(from_data(SHAPES[arch], dict(data), field, strict=strict))


def shape_from_flags(flags: Mapping[str, str]) -> Shape:
    """Return the shape that command-line flags describe: ``{"layers": "32", "hidden": "4096", "seq": "2048", ...}``.

    Names are fields of the family that ``arch`` names (``decoder`` if missing), with ``-`` for ``_``, or short names:
    ``seq``, ``ffn``, ``experts``, ``topk``, ``image``, ``tied``. Lists are written ``3,4,6,3``.
    """
    names = {flag.lstrip("-").replace("-", "_"): value for flag, value in flags.items()}
    data: dict[str, Any] = {_SHORT_FLAGS.get(name, name): value for name, value in names.items()}
    kind = SHAPES.get(str(data.get("arch", "decoder")))
    if kind is not None:
        field_names = {item.name for item in fields(kind)}
        for name in data.keys() - field_names:
            raise InputError(f"--{name.replace('_', '-')}", data[name], f"Known: {', '.join(sorted(field_names))}.")
    lists = {name: tuple(str(value).split(",")) for name, value in data.items() if name in _LISTS or "," in str(value)}
    return shape_from_data({"name": "flags"} | data | lists, "shape flags", strict=False)
