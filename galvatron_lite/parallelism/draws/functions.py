"""What random functions make of numbers that are given, item by item."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cuts.calls import argument, arguments
from galvatron_lite.parallelism.cuts.functions import gather_cuts
from galvatron_lite.parallelism.cuts.laying import own_part
from galvatron_lite.parallelism.cuts.tensor import Call, Cut, Cuts, CutTensor, cut_like, cuts_of, local_of, shares_only
from galvatron_lite.parallelism.cuts.tensor import Rules as CutRules


class NumberSource(Protocol):
    """Numbers for a draw: of a share's shape, on a device; by how the share is cut."""

    drawn: int  # draws so far

    def uniform(self, name: str, shape: torch.Size, cuts: Cuts, device: torch.device) -> Tensor:
        """In [0, 1); float32."""
        ...

    def normal(self, name: str, shape: torch.Size, cuts: Cuts, device: torch.device) -> Tensor:
        """Of mean 0 and variance 1; float64."""
        ...


Random = Callable[[Call, NumberSource], Any]
"""Does a call of a random function; NotImplemented where it draws nothing, or from a generator of the user's."""

CHANNELS = 2
"""Dims in front, by which ``dropout2d`` and its kind drop."""


def _dropout(call: Call, source: NumberSource) -> Any:
    tensor, rate = argument(call, 0, "input"), argument(call, 1, "p", 0.5)
    training = argument(call, 2, "training" if call.name.startswith("dropout") else "train", True)
    if not training or rate == 0:
        return NotImplemented
    with shares_only():
        return _dropped(tensor, tensor.shape, cuts_of(tensor), rate, call, source)


def _channel_dropout(call: Call, source: NumberSource) -> Any:
    tensor, rate = argument(call, 0, "input"), argument(call, 1, "p", 0.5)
    if not argument(call, 2, "training", True) or rate == 0:
        return NotImplemented
    with shares_only():
        shape = torch.Size([*tensor.shape[:CHANNELS], *[1] * (tensor.dim() - CHANNELS)])
        cuts = tuple(cut for cut in cuts_of(tensor) if cut.dim < CHANNELS)
        return _dropped(tensor, shape, cuts, rate, call, source)


def _dropped(tensor: Tensor, shape: torch.Size, cuts: Cuts, rate: float, call: Call, source: NumberSource) -> Any:
    """Items are kept with a probability, and scaled; the mask takes a byte an item until the backward pass."""
    kept = source.uniform(call.name, shape, cuts, tensor.device) >= rate
    scale = 1 / (1 - rate) if rate < 1 else 0.0
    if call.name == "dropout_":
        return tensor.mul_(kept).mul_(scale)
    return _like(tensor, local_of(tensor) * kept * scale)


def _like(tensor: Tensor, result: Tensor) -> Tensor:
    if not isinstance(tensor, CutTensor):
        return result
    cut: Tensor = cut_like(result, tensor.cuts, tensor.rules)
    return cut


def _attention(call: Call, source: NumberSource) -> Any:
    """Attention in which weights are dropped, by its definition: fused kernels draw numbers of their own.

    Of queries whose tokens are shared, each rank works on its own with all keys and values.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given: dict[str, Any] = {
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    }
    given |= {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    if not given["dropout_p"]:
        return NotImplemented
    query = given["query"]
    cuts, rules = cuts_of(query), query.rules if isinstance(query, CutTensor) else None
    key, value, mask = (
        None if given[name] is None else gather_cuts(given[name]) for name in ("key", "value", "attn_mask")
    )
    assert key is not None
    assert value is not None
    with shares_only():
        made = _weighed(local_of(query), key, value, mask, cuts, given, source)
        return made if rules is None else cut_like(made, cuts, rules)


def _weighed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    cuts: Cuts,
    arguments: Mapping[str, Any],
    source: NumberSource,
) -> Tensor:
    rows = next((cut for cut in cuts if cut.dim == query.dim() - 2), None)
    if any(cut is not rows for cut in cuts):
        raise InputError("randomness", "same", "Attention drops weights of shared heads. Take randomness='own'.")
    if arguments["enable_gqa"]:
        key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
    scale = query.shape[-1] ** -0.5 if arguments["scale"] is None else arguments["scale"]
    scores = (query * scale) @ key.transpose(-2, -1)
    if arguments["is_causal"]:
        places = _row_places(rows, query)
        scores = scores.masked_fill(places[:, None] < torch.arange(key.shape[-2], device=query.device), -torch.inf)
    if mask is not None:
        mask = own_part(mask, rows, mask.dim() - 2) if rows is not None and mask.shape[-2] > 1 else mask
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    rate, weights = arguments["dropout_p"], scores.softmax(-1)
    kept = source.uniform("scaled_dot_product_attention", weights.shape, cuts, weights.device) >= rate
    dropped: Tensor = (weights * kept * (1 / (1 - rate) if rate < 1 else 0.0)).to(value.dtype) @ value
    return dropped


def _row_places(rows: Cut | None, query: Tensor) -> Tensor:
    if rows is None:
        return torch.arange(query.shape[-2], device=query.device)
    return torch.cat([torch.arange(start, stop, device=query.device) for start, stop in rows.pieces])


def _filled(kind: str, names: tuple[str, str], first: float, second: float) -> Random:
    """``uniform_(from, to)`` and ``normal_(mean, std)``."""

    def fill(call: Call, source: NumberSource) -> Any:
        if call.kwargs.get("generator") is not None:
            return NotImplemented
        tensor, low, high = call.args[0], argument(call, 1, names[0], first), argument(call, 2, names[1], second)
        with shares_only(), torch.no_grad():
            made = getattr(source, kind)(call.name, tensor.shape, cuts_of(tensor), tensor.device)
            return tensor.copy_(made * (high - low) + low if kind == "uniform" else made * high + low)

    return fill


def _bernoulli(call: Call, source: NumberSource) -> Any:
    """``bernoulli(probabilities)``, and ``x.bernoulli_(p)``."""
    if call.kwargs.get("generator") is not None:
        return NotImplemented
    tensor = argument(call, 0, "input")
    rate = argument(call, 1, "p", 0.5) if call.name == "bernoulli_" else tensor
    with shares_only(), torch.no_grad():
        made = source.uniform(call.name, tensor.shape, cuts_of(tensor), tensor.device) < local_of(rate)
        return tensor.copy_(made) if call.name == "bernoulli_" else _like(tensor, made.to(tensor.dtype))


def _like_another(kind: str) -> Random:
    """``rand_like`` and ``randn_like``."""

    def draw(call: Call, source: NumberSource) -> Any:
        tensor = argument(call, 0, "input")
        with shares_only():
            empty = torch.empty_like(tensor, **{name: one for name, one in call.kwargs.items() if name != "input"})
            made = getattr(source, kind)(call.name, empty.shape, cuts_of(tensor), empty.device)
            return _like(tensor, made.to(empty.dtype))

    return draw


def _new(kind: str) -> Random:
    """``rand`` and ``randn`` of sizes."""

    def draw(call: Call, source: NumberSource) -> Any:
        if call.kwargs.get("generator") is not None:
            return NotImplemented
        like = torch.empty(*call.args, **call.kwargs)
        return like.copy_(getattr(source, kind)(call.name, like.shape, (), like.device))

    return draw


RANDOM: Mapping[str, Random] = {
    **dict.fromkeys(("dropout", "dropout_"), _dropout),
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d", "feature_dropout"), _channel_dropout),
    "scaled_dot_product_attention": _attention,
    "uniform_": _filled("uniform", ("from", "to"), 0.0, 1.0),
    "normal_": _filled("normal", ("mean", "std"), 0.0, 1.0),
    **dict.fromkeys(("bernoulli", "bernoulli_"), _bernoulli),
    "rand_like": _like_another("uniform"),
    "randn_like": _like_another("normal"),
    "rand": _new("uniform"),
    "randn": _new("normal"),
}
REFUSED = frozenset(
    (
        *("randint", "randint_like", "randperm", "multinomial", "poisson", "exponential_", "cauchy_", "geometric_"),
        *("log_normal_", "random_", "normal", "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout"),
        *("feature_alpha_dropout_", "gumbel_softmax", "rrelu", "rrelu_", "fractional_max_pool2d"),
        *("fractional_max_pool3d", "multi_head_attention_forward"),
    )
)
"""Functions that draw numbers, too, but not by items of what they are given."""


def draws_nothing(call: Call) -> bool:
    """Whether a call of one of ``REFUSED`` draws nothing, or from a generator of the user's."""
    if call.kwargs.get("generator") is not None:
        return True
    if call.name == "multi_head_attention_forward":
        given = arguments(call, torch.nn.functional.multi_head_attention_forward)
        return not given["training"] or not given["dropout_p"]
    if call.name in ("gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d", "normal"):
        return False
    switch = {"rrelu": 3, "rrelu_": 3, "alpha_dropout": 1, "alpha_dropout_": 1}.get(call.name)
    return switch is not None and not argument(call, switch + 1, "training", False)


NO_RULES = CutRules({}, lambda call: call.function(*call.args, **call.kwargs))
"""Of calls that need not be of cut tensors."""
