"""Random numbers by their place in a tensor: any rank makes those of its share alone, and they are the whole's.

A number is ``splitmix64`` (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators") at the
position of the item, in a stream of the draw's own: integer arithmetic, hence the same on every device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """64 bits as torch has them."""
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
_LAST, _OTHER = 31, 0x5DEECE66D
_SINGLE, _DOUBLE = 24, 53
"""Bits of a uniform number in single and in double precision."""


def stream_of(*what: object) -> int:
    """The stream of a draw that these values tell apart; 64 bits."""
    text = "\0".join(map(str, what)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)


def positions(places: Sequence[Tensor], major: int, extents: Sequence[int]) -> Tensor:
    """The numbers of items by which they are drawn, of the shape that the places span; int64.

    Args:
        places: of each dim of the share: where its items are in the whole (n).
        major: the dim that counts most (samples), so that the others' extents alone matter.
        extents: of the whole.
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
    one = (_bits(_mixed(where, stream), _DOUBLE).to(torch.float64) + 0.5) * 2.0**-_DOUBLE
    other = _bits(_mixed(where, stream ^ _OTHER), _DOUBLE).to(torch.float64) * 2.0**-_DOUBLE
    made: Tensor = (-2.0 * one.log()).sqrt() * (2.0 * math.pi * other).cos()
    return made


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
