"""Random numbers by their place in a global tensor: any rank makes those of its shard alone.

A number is ``splitmix64`` (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators") at the
position of the item, in a stream of the draw's own: integer arithmetic, hence the same on every device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.calls import ATTENTION, argument, arguments, named_arguments, spec_at
from galvatron_lite.parallelism.sharded.collectives import full_tensor, local_part
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Rules,
    ShardedTensor,
    ShardSpec,
    ShardSpecs,
    locals_only,
    specs_of,
    to_local,
    wrap_locals,
)
from galvatron_lite.parallelism.shares import Range, share


def _signed(value: int) -> int:
    """64 bits as torch has them."""
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
_LAST, _OTHER = 31, 0x5DEECE66D
_SINGLE, _DOUBLE = 24, 53
"""Bits of a uniform number in single and in double precision."""


def stream_of(*key: object) -> int:
    """The stream of a draw that these values identify; 64 bits."""
    text = "\0".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)


def positions(places: Sequence[Tensor], major: int, extents: Sequence[int]) -> Tensor:
    """The numbers of items by which they are drawn, of the shape that the places span; int64.

    Args:
        places: of each dim of the shard: where its items are in the global tensor (n).
        major: the dim that counts most (samples), so that the others' extents alone matter.
        extents: of the global tensor.
    """
    order = [dim for dim in range(len(places)) if dim != major]
    total, step = torch.zeros((1,) * len(places), dtype=torch.int64, device=places[0].device), 1
    for dim in [*reversed(order), major]:
        shape = [1] * len(places)
        shape[dim] = -1
        total = total + places[dim].view(shape) * step
        step *= extents[dim]
    return total


def uniform(stream: int, where: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) at positions; float32."""
    return _bits(_mixed(where, stream), _SINGLE).to(torch.float32) * 2.0**-_SINGLE


def normal(stream: int, where: Tensor) -> Tensor:
    """Standard normal numbers at positions (Box and Muller 1958); float64."""
    first = (_bits(_mixed(where, stream), _DOUBLE).to(torch.float64) + 0.5) * 2.0**-_DOUBLE
    second = _bits(_mixed(where, stream ^ _OTHER), _DOUBLE).to(torch.float64) * 2.0**-_DOUBLE
    numbers: Tensor = (-2.0 * first.log()).sqrt() * (2.0 * math.pi * second).cos()
    return numbers


def _mixed(where: Tensor, stream: int) -> Tensor:
    value: Tensor = where * _GAMMA + stream
    for bits, factor in _ROUNDS:
        value = (value ^ _shifted(value, bits)) * factor
    return value ^ _shifted(value, _LAST)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    shifted: Tensor = (value >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _bits(value: Tensor, count: int) -> Tensor:
    return _shifted(value, 64 - count)


# Where numbers are drawn in a model, and which of the global tensor's items a rank holds there

REMEDY = "Take randomness='own', under which every rank draws for itself."


class DrawSite(NamedTuple):
    """A draw of a forward pass."""

    path: str  # of the module that draws, which a layer is made of; nothing for code between layers
    call: int  # how often the module was called before
    number: int  # how often it drew before, in this call


@dataclass(frozen=True, slots=True)
class Drawn:
    """A draw of the global model."""

    function: str
    shape: tuple[int, ...]  # of the global tensor, for some samples
    samples: int | None  # the dim along which they lie; None where the same is drawn for all
    each: int  # items of that dim for one sample


Sites = Mapping[DrawSite, Drawn]


@dataclass(frozen=True, slots=True)
class SampleSlice:
    """A rank's share of a layer's work."""

    batch: int = 1  # ranks' shares of the samples
    place: int = 0  # index of this rank's
    # number of ranks, and index, of those that share the rest of a sample evenly: tokens, heads, features
    inner: tuple[int, int] = (1, 0)


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Samples of a micro-batch that a rank has."""

    first: int  # its number in the global batch
    count: int


def places_of(
    site: DrawSite,
    drawn: Drawn,
    shape: Sequence[int],
    specs: ShardSpecs,
    slice_: SampleSlice,
    rows: SampleRows,
    device: torch.device,
) -> Tensor:
    """The positions in the global draw of a shard's items; see ``positions``.

    Args:
        site: which draw.
        drawn: the global one.
        shape: of the shard.
        specs: how it is sharded, as far as it says itself.
        slice_: of the rank.
        rows: of the rank.
        device: where to make them.

    Raises:
        InputError: the shard is not one of such a tensor.
    """
    places: list[Tensor] = []
    for dim, length in enumerate(shape) if len(shape) == len(drawn.shape) else ():
        spec = spec_at(specs, dim)
        if dim == drawn.samples:
            found = _of_samples(drawn.each, length, spec, slice_, rows)
        else:
            found = _along(drawn.shape[dim], length, spec, slice_)
        if found is None:
            break
        places.append(found)
    if len(places) < max(len(shape), len(drawn.shape)):
        where = f"{drawn.function} of {site.path or 'the model itself'}"
        unlike = f"It draws for {tuple(shape)}, which is no share of {drawn.shape} (two samples of the example)."
        raise InputError(f"randomness of {where}", "same", f"{unlike} {REMEDY}")
    major = 0 if drawn.samples is None else drawn.samples
    return (positions(places, major, drawn.shape) if places else torch.zeros((), dtype=torch.int64)).to(device)


def _of_samples(each: int, length: int, spec: ShardSpec | None, slice_: SampleSlice, rows: SampleRows) -> Tensor | None:
    """Items of a dim in which samples follow one another."""
    if not rows.count:
        return torch.zeros(0, dtype=torch.int64) if not length else None
    if spec is not None and spec.extent == rows.count * each:
        return _ranges(spec.pieces) + rows.first * each
    inside = _along(each, length // rows.count, None, slice_) if length % rows.count == 0 and spec is None else None
    if inside is None:
        return None
    starts = (torch.arange(rows.count) + rows.first) * each
    return (starts[:, None] + inside).flatten()


def _along(extent: int, length: int, spec: ShardSpec | None, slice_: SampleSlice) -> Tensor | None:
    """Items of any other dim: what its spec says, all, or an even share; None where it is nothing of these."""
    ranks, place = slice_.inner
    if spec is not None and spec.extent != extent:
        # a rank's pieces of a sequence, shared again by neighbours: they see as many tokens as all shares have
        if spec.extent * ranks != extent:
            return None
        raise InputError("randomness", "same", f"Tokens are shared twice where numbers are drawn. {REMEDY}")
    if spec is not None:
        return _ranges(spec.pieces)
    if length == extent:
        return torch.arange(extent)
    start, held = share(extent, ranks, place)
    return torch.arange(start, start + held) if held == length else None


def _ranges(pieces: Sequence[Range]) -> Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in pieces]) if pieces else torch.arange(0)


# Random functions of torch that take their numbers, item by item, from a source.


Distribution = Callable[[int, Tensor], Tensor]
"""``uniform`` or ``normal``."""


class NumberSource(Protocol):
    """Numbers for the draws of a module's call."""

    drawn: int  # draws so far

    def draw(
        self, numbers: Distribution, name: str, shape: torch.Size, specs: ShardSpecs, device: torch.device
    ) -> Tensor:
        """Those of a function's draw, of a shard's shape, on a device."""
        ...


RandomFunction = Callable[[Call, NumberSource], Any]
"""Does a call of a random function; NotImplemented where it draws nothing, or from a generator of the user's."""

_BY_CHANNEL = 2
"""Leading dims, by which ``dropout2d`` and its kind drop."""


def _dropout(call: Call, source: NumberSource) -> Any:
    """Items, or channels, are kept with a probability and scaled; the mask takes a byte an item until backward."""
    tensor, rate = argument(call, 0, "input"), argument(call, 1, "p", 0.5)
    by_item = call.name in ("dropout", "dropout_")
    if not argument(call, 2, "training", True) or rate == 0:
        return NotImplemented
    with locals_only():
        shape, specs = tensor.shape, specs_of(tensor)
        if not by_item:
            shape = torch.Size([*shape[:_BY_CHANNEL], *[1] * (tensor.dim() - _BY_CHANNEL)])
            specs = tuple(spec for spec in specs if spec.dim < _BY_CHANNEL)
        kept = source.draw(uniform, call.name, shape, specs, tensor.device) >= rate
        scale = 1 / (1 - rate) if rate < 1 else 0.0
        return (
            tensor.mul_(kept).mul_(scale) if call.name == "dropout_" else _like(tensor, to_local(tensor) * kept * scale)
        )


def _like(tensor: Tensor, result: Tensor) -> Tensor:
    if not isinstance(tensor, ShardedTensor):
        return result
    sharded: Tensor = wrap_locals(result, tensor.specs, tensor.rules)
    return sharded


def _attention(call: Call, source: NumberSource) -> Any:
    """Attention in which weights are dropped, by its definition: fused kernels draw numbers of their own.

    Where the tokens of queries are sharded, each rank works on its own with all keys and values.
    """
    options = named_arguments(call, ATTENTION)
    if not options["dropout_p"]:
        return NotImplemented
    key, value = full_tensor(options["key"]), full_tensor(options["value"])
    mask = None if options["attn_mask"] is None else full_tensor(options["attn_mask"])
    with locals_only():
        query = to_local(options["query"])
        specs = specs_of(options["query"])
        rows = spec_at(specs, query.dim() - 2)
        if any(spec is not rows for spec in specs):
            raise InputError("randomness", "same", "Attention drops weights of shared heads. Take randomness='own'.")
        if options["enable_gqa"]:
            key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
        scale = query.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
        scores = (query * scale) @ key.transpose(-2, -1)
        if options["is_causal"]:
            places = _ranges(((0, query.shape[-2]),) if rows is None else rows.pieces).to(query.device)
            scores = scores.masked_fill(places[:, None] < torch.arange(key.shape[-2], device=query.device), -torch.inf)
        if mask is not None:
            mask = local_part(mask, rows, mask.dim() - 2) if rows is not None and mask.shape[-2] > 1 else mask
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        rate, weights = options["dropout_p"], scores.softmax(-1)
        name = "scaled_dot_product_attention"
        kept = source.draw(uniform, name, weights.shape, specs, weights.device) >= rate
        result: Tensor = (weights * kept * (1 / (1 - rate) if rate < 1 else 0.0)).to(value.dtype) @ value
        return _like(options["query"], result)


def _filled(numbers: Distribution, names: tuple[str, str], first: float, second: float) -> RandomFunction:
    """``uniform_(from, to)`` and ``normal_(mean, std)``."""

    def fill(call: Call, source: NumberSource) -> Any:
        if call.kwargs.get("generator") is not None:
            return NotImplemented
        tensor, low, high = call.args[0], argument(call, 1, names[0], first), argument(call, 2, names[1], second)
        with locals_only(), torch.no_grad():
            drawn = source.draw(numbers, call.name, tensor.shape, specs_of(tensor), tensor.device)
            return tensor.copy_(drawn * (high - low) + low if numbers is uniform else drawn * high + low)

    return fill


def _bernoulli(call: Call, source: NumberSource) -> Any:
    """``bernoulli(probabilities)``, and ``x.bernoulli_(p)``."""
    if call.kwargs.get("generator") is not None:
        return NotImplemented
    tensor = argument(call, 0, "input")
    rate = argument(call, 1, "p", 0.5) if call.name == "bernoulli_" else tensor
    with locals_only(), torch.no_grad():
        kept = source.draw(uniform, call.name, tensor.shape, specs_of(tensor), tensor.device) < to_local(rate)
        return tensor.copy_(kept) if call.name == "bernoulli_" else _like(tensor, kept.to(tensor.dtype))


def _new(numbers: Distribution) -> RandomFunction:
    """``rand`` and ``randn`` of sizes, ``rand_like`` and ``randn_like``."""

    def draw(call: Call, source: NumberSource) -> Any:
        if call.kwargs.get("generator") is not None:
            return NotImplemented
        with locals_only():
            if call.name.endswith("_like"):
                tensor = argument(call, 0, "input")
                options = {name: one for name, one in call.kwargs.items() if name != "input"}
                empty = torch.empty_like(tensor, **options)
                drawn = source.draw(numbers, call.name, empty.shape, specs_of(tensor), empty.device)
                return _like(tensor, drawn.to(empty.dtype))
            like = torch.empty(*call.args, **call.kwargs)
            return like.copy_(source.draw(numbers, call.name, like.shape, (), like.device))

    return draw


RANDOM: Mapping[str, RandomFunction] = {
    **dict.fromkeys(["dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"], _dropout),
    "scaled_dot_product_attention": _attention,
    "uniform_": _filled(uniform, ("from", "to"), 0.0, 1.0),
    "normal_": _filled(normal, ("mean", "std"), 0.0, 1.0),
    **dict.fromkeys(("bernoulli", "bernoulli_"), _bernoulli),
    **dict.fromkeys(("rand", "rand_like"), _new(uniform)),
    **dict.fromkeys(("randn", "randn_like"), _new(normal)),
}
_REFUSED = """
randint randint_like randperm multinomial poisson exponential_ cauchy_ geometric_ log_normal_ random_ normal
alpha_dropout alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_ gumbel_softmax rrelu rrelu_
fractional_max_pool2d fractional_max_pool3d multi_head_attention_forward
"""
REFUSED = frozenset(_REFUSED.split())
"""Functions that draw numbers, too, but not by items of what they are given."""


def draws_nothing(call: Call) -> bool:
    """Whether a call of one of ``REFUSED`` draws nothing, or from a generator of the user's."""
    if call.kwargs.get("generator") is not None:
        return True
    if call.name == "multi_head_attention_forward":
        options = arguments(call, torch.nn.functional.multi_head_attention_forward)
        return not options["training"] or not options["dropout_p"]
    training = {"rrelu": 4, "rrelu_": 4, "alpha_dropout": 2, "alpha_dropout_": 2}.get(call.name)
    return training is not None and not argument(call, training, "training", False)


NO_RULES = Rules({}, lambda call: call.function(*call.args, **call.kwargs))
"""Of calls that need not be of sharded tensors."""
