"""The extents along which a layer can be split, from its operators and the model's config."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import nn

from galvatron_lite.model.graph import Operator, OperatorClass, Role, SplitDims
from galvatron_lite.model.sides import SIDES, sides_of

_NAMES = {
    "heads": ("num_attention_heads", "n_head", "num_heads", "heads"),
    "kv_heads": ("num_key_value_heads", "kv_heads"),
    "hidden": ("hidden_size", "n_embd", "d_model", "hidden"),
    "ffn_hidden": ("intermediate_size", "n_inner", "d_ff", "ffn_hidden"),
    "vocab": ("vocab_size", "vocab"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}
"""What configs call each dim: those of Hugging Face first, then our own."""


_MIXING = (OperatorClass.MATMUL, OperatorClass.ATTENTION)


def split_dims(
    model: nn.Module,
    modules: Sequence[nn.Module],
    role: Role,
    operators: Sequence[Operator],
    sequence: int,
    entering: Sequence[int] = (),
) -> SplitDims:
    """Dims of one layer; those the config does not give are read off its operators and modules.

    Args:
        model: the whole model; its ``config`` is looked at where it has one.
        modules: what the layer is made of.
        role: where it stands; only blocks have heads and an MLP, only edges a vocabulary.
        operators: what it calls.
        sequence: tokens per sample.
        entering: shape of one sample of what enters.
    """
    config = getattr(model, "config", None)
    found = {name: value for name in _NAMES if (value := _from_config(config, name))}
    dims = _structure(modules, operators) | found
    if role is Role.BLOCK:
        heavy = _block_dims(dims, operators)
    else:
        heavy = {name: dims[name] for name in ("hidden", "vocab") if name in dims}
    return SplitDims(sequence=sequence, **heavy, **_picture_dims(modules, operators, entering))


def _from_config(config: Any, name: str) -> int:
    for alias in _NAMES[name]:
        value = getattr(config, alias, None)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def _structure(modules: Sequence[nn.Module], operators: Sequence[Operator]) -> dict[str, int]:
    parts = [part for module in modules for part in module.modules()]
    tables = [(part.num_embeddings, part.embedding_dim) for part in parts if isinstance(part, nn.Embedding)]
    matmuls = [operator.shape for operator in operators if operator.kind is OperatorClass.MATMUL]
    found = dict(zip(("vocab", "hidden"), max(tables), strict=True)) if tables else {}
    if matmuls:
        found |= {"hidden": matmuls[0][1], "ffn_hidden": max(shape[2] for shape in matmuls)}
    return found


def _block_dims(dims: dict[str, int], operators: Sequence[Operator]) -> dict[str, int]:
    kept = {name: dims[name] for name in ("hidden", "ffn_hidden", "experts") if name in dims}
    attention = [operator.shape for operator in operators if operator.kind is OperatorClass.ATTENTION]
    heads, kv_heads = attention[0][:2] if attention else (0, 0)
    heads = dims.get("heads", heads)
    return kept | {"heads": heads, "kv_heads": dims.get("kv_heads", min(kv_heads, heads) or heads)}


def _picture_dims(
    modules: Sequence[nn.Module], operators: Sequence[Operator], entering: Sequence[int]
) -> dict[str, int]:
    """Channels in and out, and extents of the picture or volume that enters; nothing where none does.

    A layer with convolutions works on one. One without does where it passes windows over what enters or sums over its
    pixels, or has no weights but one for each channel. Where something else enters, the first convolution's input is
    the picture.
    """
    convolutions = [operator for operator in operators if operator.kind is OperatorClass.CONVOLUTION]
    light = not any(one.kind in _MIXING for one in operators) and _scales(modules, entering)
    taken = [operator.shape[0] for operator in convolutions[:1]] + _pooled_channels(operators)
    taken += entering[:1] if light or _flattens(operators, entering) else ()
    if entering and entering[0] in taken and len(entering) - 1 in (2, 3):
        inner, extents = entering[0], tuple(entering[1:])
    elif convolutions:
        inner, extents = convolutions[0].shape[0], tuple(side.extent for side in sides_of(convolutions[0]))
    else:
        return {}
    named = zip(SIDES[-len(extents) :], extents, strict=True)
    return {"in_channels": inner, "out_channels": _leaving(operators, inner), **dict(named)}


def _flattens(operators: Sequence[Operator], entering: Sequence[int]) -> bool:
    """Whether the first matmul takes all pixels of a picture as one row."""
    inner = [operator.shape[1] for operator in operators if operator.kind is OperatorClass.MATMUL]
    return len(entering) > 2 and inner[:1] == [prod(entering)]


def _scales(modules: Sequence[nn.Module], entering: Sequence[int]) -> bool:
    """Whether all weights of a layer are vectors of an item for each channel (normalisation, learned scales)."""
    return all(tuple(p.shape) == tuple(entering[:1]) for module in modules for p in module.parameters())


def _pooled_channels(operators: Sequence[Operator]) -> list[int]:
    """Channels that windows pass over, or of which the mean is taken."""
    memory = [operator for operator in operators if operator.kind is OperatorClass.MEMORY]
    found = [operator.shape[1] for operator in memory if len(operator.shape) > 1]
    return found + [operator.statistics for operator in memory if operator.statistics]


def _leaving(operators: Sequence[Operator], inner: int) -> int:
    """Output channels of the last operator with weights; those that enter where there is none."""
    heavy = [
        operator.shape[1] if operator.kind is OperatorClass.CONVOLUTION else operator.shape[2]
        for operator in operators
        if operator.kind is OperatorClass.CONVOLUTION
        or (operator.kind is OperatorClass.MATMUL and operator.weight_bytes)
    ]
    return heavy[-1] if heavy else inner
