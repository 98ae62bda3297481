"""Where random numbers are drawn in a model, and which of the whole tensor's items a rank holds there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cuts.tensor import Cuts
from galvatron_lite.parallelism.draws.numbers import positions
from galvatron_lite.parallelism.shares import share

REMEDY = "Take randomness='own', under which every rank draws for itself."


class DrawSite(NamedTuple):
    """A draw of a forward pass."""

    path: str  # of the module that draws, which a layer is made of; nothing for code between layers
    call: int  # how often the module was called before
    number: int  # how often it drew before, in this call


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a draw of the whole model is like."""

    function: str  # that draws
    shape: tuple[int, ...]  # of the whole tensor, for some samples
    samples: int | None  # the dim along which they lie; None where the same is drawn for all
    each: int  # items of that dim for one sample


Sites = Mapping[DrawSite, Drawn]


@dataclass(frozen=True, slots=True)
class Lot:
    """What a rank has of a layer's work."""

    batch: int = 1  # ranks' shares of the samples
    place: int = 0  # number of this rank's
    # ways, and place, of ranks that share the rest of a sample evenly: tokens, heads, features
    inner: tuple[int, int] = (1, 0)


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Samples of a micro-batch that a rank has."""

    first: int  # its number in the global batch
    count: int


def places_of(
    site: DrawSite, drawn: Drawn, shape: Sequence[int], cuts: Cuts, lot: Lot, rows: SampleRows, device: torch.device
) -> Tensor:
    """The positions in the whole draw of a share's items; see ``numbers.positions``.

    Args:
        site: which draw.
        drawn: what the whole one is like.
        shape: of the share.
        cuts: how it is cut, as far as it says itself.
        lot: of the rank.
        rows: of the rank.
        device: where to make them.

    Raises:
        InputError: the share is not one of such a whole.
    """
    if len(shape) != len(drawn.shape):
        raise _strange(site, drawn, shape)
    places, extents = [], list(drawn.shape)
    for dim, length in enumerate(shape):
        own = next((one for one in cuts if one.dim == dim), None)
        pieces = None if own is None else (own.extent, own.pieces)
        if dim == drawn.samples:
            found = _of_samples(drawn.each, length, pieces, lot, rows)
        else:
            found = _along(drawn.shape[dim], length, pieces, lot)
        if found is None:
            raise _strange(site, drawn, shape)
        places.append(found)
    major = 0 if drawn.samples is None else drawn.samples
    whole = positions(places, major, extents) if places else torch.zeros((), dtype=torch.int64)
    return whole.to(device)


Pieces = tuple[int, tuple[tuple[int, int], ...]] | None


def _of_samples(each: int, length: int, pieces: Pieces, lot: Lot, rows: SampleRows) -> Tensor | None:
    """Items of a dim in which samples lie one behind the other."""
    if not rows.count:
        return torch.zeros(0, dtype=torch.int64) if not length else None
    if pieces is not None and pieces[0] == rows.count * each:
        return _ranges(pieces[1]) + rows.first * each
    inside = _along(each, length // rows.count, None, lot) if length % rows.count == 0 and pieces is None else None
    if inside is None:
        return None
    starts = (torch.arange(rows.count) + rows.first) * each
    return (starts[:, None] + inside).flatten()


def _along(extent: int, length: int, pieces: Pieces, lot: Lot) -> Tensor | None:
    """Items of any other dim: what its cut says, all, or an even share; None where it is nothing of these."""
    ways, place = lot.inner
    if pieces is not None and pieces[0] != extent:
        # a rank's pieces of a sequence, shared again by neighbours: they see as many tokens as all shares have
        if pieces[0] * ways != extent:
            return None
        raise InputError("randomness", "same", f"Tokens are shared twice where numbers are drawn. {REMEDY}")
    if pieces is not None:
        return _ranges(pieces[1])
    if length == extent:
        return torch.arange(extent)
    start, own = share(extent, ways, place)
    return torch.arange(start, start + own) if own == length else None


def _ranges(pieces: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in pieces]) if pieces else torch.arange(0)


def _strange(site: DrawSite, drawn: Drawn, shape: Sequence[int]) -> InputError:
    where = f"{drawn.function} of {site.path or 'the model itself'}"
    remedy = f"It draws for {tuple(shape)}, which is no share of {drawn.shape} (two samples of the example). {REMEDY}"
    return InputError(f"randomness of {where}", "same", remedy)
