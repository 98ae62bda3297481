"""Random numbers by their place in a global tensor: any rank makes those of its shard alone.

A number is ``splitmix64`` (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators") at the
position of the item, in a stream of the draw's own: integer arithmetic, hence the same on every device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.calls import spec_at
from galvatron_lite.parallelism.sharded.tensor import ShardSpec, ShardSpecs
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
