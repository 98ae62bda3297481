"""The extents along which a layer can be split, from its operators and the model's config."""

from __future__ import annotations

from collections.abc import Sequence
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


def split_dims(
    model: nn.Module, modules: Sequence[nn.Module], role: Role, operators: Sequence[Operator], sequence: int
) -> SplitDims:
    """Dims of one layer; those the config does not give are read off its operators and modules.

    Args:
        model: the whole model; its ``config`` is looked at where it has one.
        modules: what the layer is made of.
        role: where it stands; only blocks have heads and an MLP, only edges a vocabulary.
        operators: what it calls.
        sequence: tokens per sample.
    """
    config = getattr(model, "config", None)
    found = {name: value for name in _NAMES if (value := _from_config(config, name))}
    dims = _structure(modules, operators) | found
    if role is Role.BLOCK:
        heavy = _block_dims(dims, operators)
    else:
        heavy = {name: dims[name] for name in ("hidden", "vocab") if name in dims}
    return SplitDims(sequence=sequence, **heavy, **_convolution_dims(operators))


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


def _convolution_dims(operators: Sequence[Operator]) -> dict[str, int]:
    convolutions = [operator for operator in operators if operator.kind is OperatorClass.CONVOLUTION]
    if not convolutions:
        return {}
    sides = sides_of(convolutions[0])
    extents = zip(SIDES[-len(sides) :], (side.extent for side in sides), strict=True)
    return {"in_channels": convolutions[0].shape[0], "out_channels": convolutions[-1].shape[1], **dict(extents)}
