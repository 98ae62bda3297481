"""Make a model smaller without changing its structure: narrower by its configuration, shorter by fewer blocks."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import GalvatronError
from galvatron_lite.model.batch import batch_size, map_tensors, sequence_length
from galvatron_lite.parallelism.divisors import divisors

PROBABILITIES = ("drop", "jitter", "stochastic_depth", "mask_time_prob", "mask_feature_prob")
"""Floating-point fields and attributes with one of these in their names are probabilities, as of dropout."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
HEAD = 8  # width of an attention head of a narrow model
PATCH = 8  # pixels on a side of a patch of a narrow model


def _targets(divisor: int) -> dict[str, int]:
    """Return the largest value of each size of a narrow model, by field name; ``divisor`` divides what plans split."""
    hidden = 2 * divisor * HEAD
    return {
        **dict.fromkeys(("vocab", "vocab_size", "n_vocab"), 16 * divisor),
        **dict.fromkeys(("hidden", "hidden_size", "n_embd", "d_model", "dim", "embedding_size"), hidden),
        **dict.fromkeys(("heads", "num_attention_heads", "n_head", "n_heads", "num_heads"), 2 * divisor),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2 * divisor),
        **dict.fromkeys(("kv_heads", "num_key_value_heads", "num_kv_heads"), divisor),
        **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "kv_channels"), HEAD),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim", "ffn_hidden"), 2 * hidden),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "shared_expert_intermediate_size"), 2 * hidden),
        **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), hidden),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "sequence"), 8 * divisor),
        **dict.fromkeys(("experts", "num_experts", "num_local_experts", "n_routed_experts"), 2 * divisor),
    }


def narrowed(model: nn.Module, divisor: int, configured: bool = False) -> tuple[nn.Module, list[str]] | None:
    """Return a model built from a configuration of smaller sizes, and lines on what changed; None if it cannot be.

    Args:
        model: the large one. It is not changed; the new one is on the current default device.
        divisor: of the new sizes.
        configured: whether ``model`` is known to be built from ``model.config`` alone.
    """
    config = getattr(model, "config", None)
    if config is None or not (configured or _is_built_from(model, config)):
        return None
    smaller, changes = _narrow_config(config, divisor)
    try:
        rebuilt: nn.Module = type(model)(smaller)
    except (GalvatronError, ValueError, RuntimeError, TypeError, AttributeError, IndexError, ZeroDivisionError):
        return None
    return rebuilt.train(model.training), changes


def _is_built_from(model: nn.Module, config: Any) -> bool:
    """Whether the model's class builds the same structure from its configuration alone."""
    try:
        with torch.device("meta"):
            again = type(model)(config)
    except Exception:  # a class that wants other arguments
        return False
    shapes, again_shapes = ({name: p.shape for name, p in each.named_parameters()} for each in (model, again))
    return shapes == again_shapes and [n for n, _ in model.named_modules()] == [n for n, _ in again.named_modules()]


def _narrow_config(config: Any, divisor: int) -> tuple[Any, list[str]]:
    changed = _image_changes(config, divisor) | _changes(config, divisor)
    lines = [f"{name} {getattr(config, name)} -> {value}" for name, value in changed.items()]
    if is_dataclass(config) and not isinstance(config, type):
        return replace(config, **changed), lines
    smaller = copy.deepcopy(config)
    for name, value in changed.items():
        setattr(smaller, name, value)
    for name in getattr(smaller, "sub_configs", {}):  # a text and a vision tower
        part = getattr(smaller, name, None)
        if part is not None:
            inner, inner_lines = _narrow_config(part, divisor)
            setattr(smaller, name, inner)
            lines += [f"{name}.{line}" for line in inner_lines]
    return smaller, lines


def _items(config: Any) -> Mapping[str, Any]:
    if is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in fields(config)}
    return dict(vars(config))


def _changes(config: Any, divisor: int) -> dict[str, Any]:
    """Return the fields that change: sizes, probabilities, and special tokens that the small vocabulary lacks."""
    items, targets = _items(config), _targets(divisor)
    changed: dict[str, Any] = {}
    for name in {*items, *getattr(config, "attribute_map", {}).values()}:
        value = getattr(config, name, None)
        if _is_probability(name, value):
            changed[name] = 0.0
        elif name in targets and isinstance(value, int) and not isinstance(value, bool) and value > targets[name]:
            changed[name] = targets[name]
    vocab: int = changed.get("vocab_size", changed.get("vocab", 0))
    for name, value in items.items() if vocab else ():
        if name.endswith("_token_id") and (isinstance(value, list) or (isinstance(value, int) and value >= vocab)):
            changed[name] = 0
    return dict(sorted(changed.items()))


def _is_probability(name: str, value: Any) -> bool:
    return isinstance(value, float) and value > 0 and any(word in name for word in PROBABILITIES)


def _image_changes(config: Any, divisor: int) -> dict[str, Any]:
    """Return changed sizes of networks for images: channels (all by one factor), sides, patches."""
    items = _items(config)
    changed: dict[str, Any] = {}
    least = 2 * divisor
    widths = items.get("widths")
    if isinstance(widths, (tuple, list)) and widths and min(widths) > least:
        common = math.gcd(*widths, items.get("group", 1))
        factor = max(number for number in divisors(common) if number <= min(widths) // least)
        changed["widths"] = type(widths)(width // factor for width in widths)
        if "group" in items:
            changed["group"] = items["group"] // factor
    elif "depths" in items and "height" not in items and isinstance(items.get("width"), int):
        changed["width"] = min(items["width"], least)
    for name in ("base", "stem"):
        if isinstance(items.get(name), int):
            changed[name] = min(items[name], least)
    if "pooled" in items:
        changed["hidden"] = min(items["hidden"], 4 * least)
    for name in ("side", "height", "width") if "side" in items or "height" in items else ():
        if name in items and name not in changed and isinstance(items[name], int) and items[name] > 16 * divisor:
            changed[name] = 16 * divisor
    if isinstance(items.get("image_size"), int) and isinstance(items.get("patch_size"), int):
        changed["patch_size"] = min(items["patch_size"], PATCH)
        changed["image_size"] = min(items["image_size"], 4 * PATCH)
    return {name: value for name, value in changed.items() if value != items[name]}


def dropped(model: nn.Module, paths: Sequence[str]) -> nn.Module:
    """Remove blocks of ``ModuleList``s and ``Sequential``s from the model, in place; later blocks move up."""
    places = [(parent, int(number)) for parent, _, number in (path.rpartition(".") for path in paths)]
    for parent, number in sorted(places, reverse=True):
        holder = model.get_submodule(parent)
        assert isinstance(holder, (nn.ModuleList, nn.Sequential))
        del holder[number]
    return model


def can_drop(model: nn.Module, path: str) -> bool:
    """Whether ``dropped`` can remove a block."""
    parent, _, number = path.rpartition(".")
    return number.isdigit() and isinstance(model.get_submodule(parent), (nn.ModuleList, nn.Sequential))


def calmed(model: nn.Module) -> nn.Module:
    """Set dropout and other probabilities of the model to 0, in place."""
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if _is_probability(name, value):
                setattr(module, name, 0.0)
    return model


def cut_for(batch: Any, small: nn.Module) -> Any:
    """Crop a user's batch for a narrower model: to its number of tokens, with tokens of its vocabulary."""
    config = getattr(small, "config", None)
    sizes = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "sequence"))
    length = sequence_length(batch)
    tokens = min(next((size for size in sizes if isinstance(size, int)), length), length)
    vocab = getattr(config, "vocab_size", None) or getattr(config, "vocab", None)

    def cut(tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] == length:
                tensor = tensor.narrow(dim, 0, tokens)
        if vocab is not None and tensor.dtype in (torch.int64, torch.int32) and tensor.dim() > 1:
            tensor = torch.where(tensor >= 0, tensor % vocab, tensor)
        return tensor.contiguous()

    return map_tensors(batch, cut)


def with_samples(batch: Any, samples: int) -> Any:
    """Resize a batch to ``samples`` samples, spread evenly over it; repeated ones are changed so that all differ."""
    size = batch_size(batch)
    step = max(size // samples, 1)

    def resized(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != size:
            return tensor
        return torch.stack([_vary(tensor[row * step % size], row // size, row) for row in range(samples)])

    return map_tensors(batch, resized)


def _vary(sample: Tensor, repeat: int, seed: int) -> Tensor:
    """Return a sample changed for its ``repeat``-th use: noise on real numbers, whole numbers rolled."""
    if repeat == 0:
        return sample
    if sample.is_floating_point():
        generator = torch.Generator().manual_seed(1000 * repeat + seed)
        return sample + 0.1 * torch.randn(sample.shape, generator=generator, dtype=sample.dtype)
    return sample.roll(repeat, -1) if sample.dim() else sample
