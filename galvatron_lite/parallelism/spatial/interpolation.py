"""Interpolation of cut pictures.

Every mode of ``torch.nn.functional.interpolate`` works side by side: an output row is a weighted sum of input rows, so
the weights of a side are what torch makes of the rows of an identity matrix. Along a cut side a rank borrows the input
rows that its output rows need, and sums them itself; along the others torch's own function runs. The map is linear:
nothing is kept for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, wraps
from math import prod
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from galvatron_lite.parallelism.cuts.calls import arguments
from galvatron_lite.parallelism.cuts.grid import PIXELS
from galvatron_lite.parallelism.cuts.line import Line, Parcel
from galvatron_lite.parallelism.cuts.tensor import Call, Cut, Handler, cut_tensor, cuts_of, local_of, whole_shape
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.spatial.statistics import as_autocast

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")
Range = tuple[int, int]
"""Rows [start, stop)."""


@dataclass(frozen=True, slots=True)
class ResampledSide:
    """How one side of a picture is resampled."""

    mode: str  # along this side alone: nearest, nearest-exact, linear, bicubic or area
    extent: int  # input rows
    result: int  # output rows
    factor: float | None  # the scale to take; None for that of the extents
    # whether the corners of first and last pixels are aligned; None where the mode has no such choice
    align: bool | None


@dataclass(frozen=True, slots=True)
class Taps:
    """What output rows of a rank are made of."""

    rows: Range  # the input rows that they need, of all of them
    places: Tensor  # input rows of each tap of each output row, counted from the first of ``rows`` (taps, outputs)
    weights: Tensor | None  # of those (taps, outputs); None where all are one


def interpolate(call: Call) -> Any:
    """``torch.nn.functional.interpolate`` and ``upsample``; pictures that are smoothed before they shrink are gathered.

    Raises:
        ValueError, NotImplementedError: torch's own, of arguments it refuses.
    """
    given = {"recompute_scale_factor": None, "antialias": False, **arguments(call, call.function)}
    tensor = given.pop("input")
    pixels = [cut for cut in cuts_of(tensor) if cut.dim >= PIXELS]
    if not cuts_of(tensor) or given["antialias"]:
        return call.rules.otherwise(call)
    shape = whole_shape(tensor)
    result = functional.interpolate(torch.empty(shape, device="meta"), **given).shape
    local, sides = _as_autocast(local_of(tensor), given["mode"]), _sides(given, shape, result)
    cut_dims = {cut.dim for cut in pixels}
    for cut in pixels:
        local = _resampled(local, cut.dim, sides[cut.dim - PIXELS], cut.line)
    if prod(local.shape) == 0:  # which torch refuses
        for dim in set(range(PIXELS, len(shape))) - cut_dims:
            local = _resampled(local, dim, sides[dim - PIXELS], None)
    elif cut_dims != set(range(PIXELS, len(shape))):
        local = functional.interpolate(local, **_but(given, cut_dims, local.shape, result))
    cuts = [Cut(cut.dim, result[cut.dim], cut.line) for cut in cuts_of(tensor)]
    return cut_tensor(local, cuts, call.rules)


HANDLERS: Mapping[str, Handler] = {"interpolate": interpolate, "upsample": interpolate}


def _as_autocast(local: Tensor, mode: str) -> Tensor:
    """Means of areas are no such function: they are pools."""
    return local if mode == "area" else as_autocast(local)


def _factors(arguments: Mapping[str, Any], sides: int) -> tuple[float, ...] | None:
    """The scale of each side, where scales were given."""
    factor = arguments["scale_factor"]
    if factor is None or isinstance(factor, (tuple, list)):
        return factor if factor is None else tuple(factor)
    return (factor,) * sides


def _sides(arguments: Mapping[str, Any], shape: Sequence[int], result: Sequence[int]) -> list[ResampledSide]:
    mode = "linear" if arguments["mode"].endswith("linear") else arguments["mode"]
    count = len(shape) - PIXELS
    factors = None if arguments["recompute_scale_factor"] else _factors(arguments, count)
    return [
        ResampledSide(
            mode, shape[dim], result[dim], factors[dim - PIXELS] if factors else None, arguments["align_corners"]
        )
        for dim in range(PIXELS, len(shape))
    ]


def _but(arguments: Mapping[str, Any], done: set[int], shape: Sequence[int], result: Sequence[int]) -> dict[str, Any]:
    """The arguments with which torch leaves the sides alone that are done."""
    dims = range(PIXELS, len(shape))
    factors = _factors(arguments, len(dims))
    if factors is None or arguments["recompute_scale_factor"]:
        size = [shape[dim] if dim in done else result[dim] for dim in dims]
        return {**arguments, "size": size, "scale_factor": None, "recompute_scale_factor": None}
    return {**arguments, "scale_factor": [1.0 if dim in done else factors[dim - PIXELS] for dim in dims]}


def _resampled(local: Tensor, dim: int, side: ResampledSide, line: Line | None) -> Tensor:
    result: Tensor = _Resample.apply(local, dim, side, line)  # type: ignore[no-untyped-call]
    return result


def _ranges(extent: int, size: int) -> tuple[Range, ...]:
    """The rows of every rank."""
    shares = (share(extent, size, rank) for rank in range(size))
    return tuple((start, start + length) for start, length in shares)


def _apart(function: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
    """In a thread of its own: what is remembered has values, whatever modes this thread is in (dry runs)."""

    @wraps(function)
    def run(*args: Asked.args, **kwargs: Asked.kwargs) -> Answer:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *args, **kwargs).result()

    return run


@lru_cache(maxsize=128)
@_apart
def _matrix(side: ResampledSide, dtype: torch.dtype, device: str) -> Tensor:
    """Weights (input rows, output rows) as torch has them for this type on this device."""
    with torch.inference_mode(False), torch.no_grad():
        # two sides, as not every mode has one
        rows = torch.eye(side.extent, dtype=dtype, device=device)[None, :, :, None]
        mode = "bilinear" if side.mode == "linear" else side.mode
        how: dict[str, Any] = {"mode": mode, "align_corners": side.align}
        how |= {"size": (side.result, 1)} if side.factor is None else {"scale_factor": (side.factor, 1.0)}
        return functional.interpolate(rows, **how)[0, :, :, 0].cpu()


@lru_cache(maxsize=128)
@_apart
def needs(side: ResampledSide, size: int, dtype: torch.dtype, device: str) -> tuple[Range, ...]:
    """The input rows that the output rows of every rank of ``size`` need."""
    used = _matrix(side, dtype, device) != 0
    found = []
    for start, stop in _ranges(side.result, size):
        rows = used[:, start:stop].any(1).nonzero().flatten().tolist()
        found.append((rows[0], rows[-1] + 1) if rows else (0, 0))
    return tuple(found)


@lru_cache(maxsize=128)
@_apart
def _taps(side: ResampledSide, size: int, rank: int, dtype: torch.dtype, device: torch.device) -> Taps:
    """Of a rank's output rows; ``device``: where they are to be."""
    rows = needs(side, size, dtype, _weights_device(device))[rank]
    start, stop = _ranges(side.result, size)[rank]
    with torch.inference_mode(False), torch.no_grad():
        matrix = _matrix(side, dtype, _weights_device(device))[rows[0] : rows[1], start:stop]
        used = matrix != 0
        count = int(used.sum(0).max()) if stop > start else 0
        places = used.int().sort(dim=0, descending=True, stable=True).indices[:count]
        weights = matrix.gather(0, places)
        # taps that an output row does not have: its first once more, of no weight
        places = torch.where(weights == 0, places[:1], places)
        plain = count == 1 and bool((weights == 1).all())
        return Taps(rows, places.to(device), None if plain else weights.to(device))


def _weights_device(device: torch.device) -> str:
    """Where weights are worked out: of tensors without values, on the CPU."""
    return "cpu" if device.type == "meta" else str(device)


def _along(weights: Tensor, dim: int, dims: int) -> Tensor:
    """Weights of rows, to multiply a picture with."""
    return weights.view([-1 if one == dim else 1 for one in range(dims)])


class _Resample(Function):
    """Along one side, cut along a line or (None) whole."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, side: ResampledSide, line: Line | None) -> Tensor:
        dtype = torch.promote_types(local.dtype, torch.float32)
        size, rank = (line.size, line.rank) if line else (1, 0)
        taps = _taps(side, size, rank, dtype, local.device)
        held, wanted = _ranges(side.extent, size), needs(side, size, dtype, _weights_device(local.device))
        ctx.how = (dim, held, wanted, line, taps)
        rows = collect(local, dim, held, wanted, line)
        shape = list(local.shape)
        shape[dim] = taps.places.shape[1]
        total = rows.new_zeros(shape, dtype=local.dtype if taps.weights is None else dtype)
        for tap, places in enumerate(taps.places):
            part = rows.index_select(dim, places)
            if taps.weights is None:
                return part
            total.addcmul_(part.to(dtype), _along(taps.weights[tap], dim, local.dim()))
        return total.to(local.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dim, held, wanted, line, taps = ctx.how
        shape = list(gradient.shape)
        shape[dim] = taps.rows[1] - taps.rows[0]
        total = gradient.new_zeros(shape, dtype=torch.promote_types(gradient.dtype, torch.float32))
        for tap, places in enumerate(taps.places):
            part = gradient.to(total.dtype)
            if taps.weights is not None:
                part = part * _along(taps.weights[tap], dim, gradient.dim())
            total.index_add_(dim, places, part)
        return collect(total.to(gradient.dtype), dim, wanted, held, line), None, None, None


def collect(local: Tensor, dim: int, held: Sequence[Range], wanted: Sequence[Range], line: Line | None) -> Tensor:
    """The rows that a rank wants: of each, the sum of what the ranks hold of it. No autograd.

    With ``held`` and ``wanted`` the other way round it is its own adjoint.

    Args:
        local: what this rank holds.
        dim: of the rows.
        held: rows of every rank; they may overlap.
        wanted: likewise.
        line: the ranks; None for this one alone.
    """
    rank, others = (line.rank, [one for one in range(line.size) if one != line.rank]) if line else (0, [])
    mine, asked = held[rank], wanted[rank]
    if tuple(held) == tuple(wanted):
        return local
    sent = [
        (peer, _rows(local, dim, mine, both).contiguous()) for peer in others if (both := _both(mine, wanted[peer]))
    ]
    result = local.new_zeros([asked[1] - asked[0] if one == dim else n for one, n in enumerate(local.shape)])
    arriving: list[tuple[Parcel, Tensor]] = []
    for peer in others:
        if both := _both(asked, held[peer]):
            place = _rows(result, dim, asked, both)
            arriving.append(((peer, torch.empty_like(place, memory_format=torch.contiguous_format)), place))
    arrival = line.exchange(sent, [parcel for parcel, _ in arriving]) if line else None
    if both := _both(mine, asked):
        _rows(result, dim, asked, both).add_(_rows(local, dim, mine, both))
    if arrival:
        arrival.wait()
    for (_, buffer), place in arriving:
        place.add_(buffer)
    return result


def _both(one: Range, other: Range) -> Range | None:
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else None


def _rows(tensor: Tensor, dim: int, first: Range, rows: Range) -> Tensor:
    """Rows of a tensor that holds those from the start of ``first`` on."""
    return tensor.narrow(dim, rows[0] - first[0], rows[1] - rows[0])
