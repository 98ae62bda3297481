"""Functions that change the size of images whose pixels are sharded: padding, pixel shuffles and interpolation.

Sides are resized in turn. Along a sharded side a rank receives the input rows that its output rows depend on
(``sharded.collectives``) and computes these; along the other sides torch's function runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, wraps
from math import prod
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.calls import (
    argument,
    arguments,
    input_first,
    named_arguments,
    on_locals,
    wrap_like,
)
from galvatron_lite.parallelism.sharded.collectives import exchange_rows, linear_map, redistribute, resized
from galvatron_lite.parallelism.sharded.groups import AxisGroup, Pieces, length_of, shards_of
from galvatron_lite.parallelism.sharded.tensor import (
    PIXELS,
    Call,
    Handler,
    ShardSpec,
    from_local,
    global_shape,
    specs_of,
    to_local,
)
from galvatron_lite.parallelism.shares import Range
from galvatron_lite.parallelism.spatial.grids import shard_range
from galvatron_lite.parallelism.spatial.norms import as_autocast

P = ParamSpec("P")
R = TypeVar("R")

# Padding


def pad(call: Call) -> Any:
    """Run ``torch.nn.functional.pad`` and ``torch.constant_pad_nd`` of a sharded tensor, in any mode.

    Raises:
        InputError: a side is padded by more than torch allows.
    """
    options = named_arguments(call, {"input": None, "pad": (), "mode": "constant", "value": None})
    tensor, amounts, mode, value = options.values()
    if not isinstance(mode, str):  # constant_pad_nd's third argument is its value
        mode, value = "constant", mode
    local, specs = to_local(tensor), specs_of(tensor)
    pads = {local.dim() - 1 - index: (amounts[2 * index], amounts[2 * index + 1]) for index in range(len(amounts) // 2)}
    extents = {spec.dim: spec.extent + sum(pads.get(spec.dim, ())) for spec in specs}
    moved = [spec for spec in specs if any(pads.get(spec.dim, ()))]
    too_small = any(extents[spec.dim] < spec.group.size for spec in moved)
    if mode not in _SOURCES or too_small or (mode != "constant" and any(min(pads[spec.dim]) < 0 for spec in moved)):
        return call.rules.otherwise(call)
    dims = {spec.dim for spec in moved}
    others = [0 if local.dim() - 1 - index // 2 in dims else amount for index, amount in enumerate(amounts)]
    for spec in moved:
        most = {"reflect": spec.extent - 1, "circular": spec.extent}.get(mode)
        if most is not None and max(pads[spec.dim]) > most:
            field = f"pad ({mode}): dim {spec.dim} of {spec.extent} shared by {spec.group.size}"
            raise InputError(field, pads[spec.dim], f"Pad by at most {most}.")
    if any(others):
        local = functional.pad(local, others, mode, value)
    for spec in moved:
        group = spec.group
        rows = [_padded_rows(spec.extent, *pads[spec.dim], mode, group.size, rank) for rank in range(group.size)]
        index, padding, _ = rows[group.rank]
        wanted = tuple(pieces for _, _, pieces in rows)
        local = redistribute(local, spec.dim, shards_of(spec.extent, group), wanted, group)
        if index is not None:
            local = local.index_select(spec.dim, torch.tensor(index, device=local.device))
        local = functional.pad(local, [0, 0] * (local.dim() - 1 - spec.dim) + [*padding], value=value or 0.0)
    after = [ShardSpec(spec.dim, extents[spec.dim], spec.group) for spec in specs]
    # torch returns a new tensor even if it pads by nothing
    return from_local(local if moved or any(others) else local.clone(), after, call.rules)


@lru_cache(maxsize=4096)
def _padded_rows(
    extent: int, before: int, after: int, mode: str, degree: int, rank: int
) -> tuple[tuple[int, ...] | None, Range, Pieces]:
    """How a rank pads its side.

    Returns:
        The wanted row for each row of its result (None: all in order), the rows of the constant value before and after
        them, and the wanted rows.
    """
    start, stop = shard_range(extent + before + after, degree, rank)
    positions = range(start - before, stop - before)
    inside = (max(positions.start, 0), min(positions.stop, extent))
    if mode == "constant":
        count = len(positions)
        padding = (min(max(-positions.start, 0), count), min(max(positions.stop - extent, 0), count))
        return None, padding, (inside,) if inside[0] < inside[1] else ()
    source = _SOURCES[mode]
    rows = [source(position, extent) for position in positions]
    wanted = sorted(set(rows))
    breaks = [index for index in range(1, len(wanted)) if wanted[index] != wanted[index - 1] + 1]
    pieces = tuple(
        (wanted[first], wanted[last - 1] + 1) for first, last in zip([0, *breaks], [*breaks, len(wanted)], strict=True)
    )
    position = {row: number for number, row in enumerate(wanted)}
    return tuple(position[row] for row in rows), (0, 0), pieces


_SOURCES: Mapping[str, Callable[[int, int], int]] = {
    "constant": lambda position, extent: position,  # noqa: ARG005
    "reflect": lambda position, extent: extent - 1 - abs(extent - 1 - abs(position)),
    "replicate": lambda position, extent: min(max(position, 0), extent - 1),
    "circular": lambda position, extent: position % extent,
}
"""Row of an image at a position that may be outside, by mode of padding."""

# Pixel shuffles

UNEVEN_REASON = "gathers pictures of this size by design, as ranks have not as many pixels each"


def _shuffled(call: Call) -> Any:
    """``pixel_shuffle`` and ``pixel_unshuffle``, on shards if ranks have equally many pixels; else gathered."""
    inner = input_first(call)
    grows = call.name == "pixel_shuffle"
    factor = Fraction(argument(inner, 1, "upscale_factor" if grows else "downscale_factor"))
    image = inner.args[0]
    local, specs = to_local(image), specs_of(image)
    extents = [spec.extent * (factor if grows else 1 / factor) for spec in specs]
    if specs[0].dim < local.dim() - 2:
        return call.rules.otherwise(call)
    if any(
        extent % spec.group.size or spec.extent % spec.group.size for extent, spec in zip(extents, specs, strict=True)
    ):
        return call.rules.otherwise(call._replace(gather_reason=UNEVEN_REASON))
    after = [ShardSpec(spec.dim, int(extent), spec.group) for spec, extent in zip(specs, extents, strict=True)]
    return from_local(call.function(local, *inner.args[1:], **inner.kwargs), after, call.rules)


# Interpolation


@dataclass(frozen=True, slots=True)
class ResampledSide:
    """The resampling of one side of an image."""

    mode: str  # along this side: nearest, nearest-exact, linear, bicubic or area
    extent: int  # input rows
    result: int  # output rows
    factor: float | None  # scale; None for the ratio of the extents
    align: bool | None  # ``align_corners``; None for modes without it


Taps = tuple[Tensor, Tensor | None]
"""Input rows (taps, outputs) of a rank's output rows, counted from the first that it needs, and their weights; None if
all are 1."""


def interpolate(call: Call) -> Any:
    """Run ``torch.nn.functional.interpolate`` and ``upsample`` of a sharded image; with antialiasing it is gathered.

    All modes can be applied to one side after another. An output row is a weighted sum of input rows; the weights are
    torch's results for an identity matrix. The function is linear and saves nothing for backward.

    Raises:
        ValueError, NotImplementedError: from torch, for arguments that it refuses.
    """
    options = {"recompute_scale_factor": None, "antialias": False, **arguments(call, call.function)}
    tensor = options.pop("input")
    specs = specs_of(tensor)
    pixels = [spec for spec in specs if spec.dim >= PIXELS]
    if specs and not pixels:
        return wrap_like(call, on_locals(call), tensor)
    if not specs or options["antialias"]:
        return call.rules.otherwise(call)
    shape = global_shape(tensor)
    result = functional.interpolate(torch.empty(shape, device="meta"), **options).shape
    # mode area is a mean pool, which autocast does not cast
    local = to_local(tensor) if options["mode"] == "area" else as_autocast(to_local(tensor))
    mode = "linear" if options["mode"].endswith("linear") else options["mode"]
    factors = _factors(options, len(shape) - PIXELS) or (None,) * (len(shape) - PIXELS)
    extents = zip(shape[PIXELS:], result[PIXELS:], factors, strict=True)
    sides = [ResampledSide(mode, *side, options["align_corners"]) for side in extents]
    sharded = {spec.dim for spec in pixels}
    for spec in pixels:
        local = _resampled(local, spec.dim, sides[spec.dim - PIXELS], spec.group)
    others = [dim for dim in range(PIXELS, len(shape)) if dim not in sharded]
    if prod(local.shape) == 0:  # torch refuses empty tensors
        for dim in others:
            local = _resampled(local, dim, sides[dim - PIXELS], None)
    elif others:
        local = functional.interpolate(local, **_without_sides(options, sharded, local.shape, result))
    return from_local(local, [ShardSpec(spec.dim, result[spec.dim], spec.group) for spec in specs], call.rules)


def _factors(options: Mapping[str, Any], sides: int) -> tuple[float, ...] | None:
    """The scale of each side, if torch uses the scales that were passed."""
    factor = options["scale_factor"]
    if factor is None or options["recompute_scale_factor"]:
        return None
    return tuple(factor) if isinstance(factor, (tuple, list)) else (factor,) * sides


def _without_sides(
    options: Mapping[str, Any], done: set[int], shape: Sequence[int], result: Sequence[int]
) -> dict[str, Any]:
    """The arguments with which torch does not change the sides that are done."""
    dims = range(PIXELS, len(shape))
    factors = _factors(options, len(dims))
    if factors is None:
        size = [shape[dim] if dim in done else result[dim] for dim in dims]
        return {**options, "size": size, "scale_factor": None, "recompute_scale_factor": None}
    return {**options, "scale_factor": [1.0 if dim in done else factors[dim - PIXELS] for dim in dims]}


def _in_thread(function: Callable[P, R]) -> Callable[P, R]:
    """Run in a thread, so that cached tensors have values whatever modes this thread is in (dry runs)."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *args, **kwargs).result()

    return run


@lru_cache(maxsize=128)
@_in_thread
def _matrix(side: ResampledSide, dtype: torch.dtype, device: str) -> Tensor:
    """The weights (input rows, output rows) of torch for this dtype on this device."""
    with torch.inference_mode(False), torch.no_grad():
        # images of two sides, as some modes do not take one
        rows = torch.eye(side.extent, dtype=dtype, device=device)[None, :, :, None]
        mode = "bilinear" if side.mode == "linear" else side.mode
        options: dict[str, Any] = {"mode": mode, "align_corners": side.align}
        options |= {"size": (side.result, 1)} if side.factor is None else {"scale_factor": (side.factor, 1.0)}
        return functional.interpolate(rows, **options)[0, :, :, 0].cpu()


@lru_cache(maxsize=128)
@_in_thread
def _needed_rows(side: ResampledSide, degree: int, dtype: torch.dtype, device: str) -> tuple[Pieces, ...]:
    """The input rows that the output rows of every rank need."""
    used = _matrix(side, dtype, device) != 0
    shares = [shard_range(side.result, degree, rank) for rank in range(degree)]
    rows = [used[:, start:stop].any(1).nonzero().flatten().tolist() for start, stop in shares]
    return tuple(((row[0], row[-1] + 1),) if row else () for row in rows)


@lru_cache(maxsize=128)
@_in_thread
def _taps(side: ResampledSide, degree: int, rank: int, dtype: torch.dtype, device: torch.device) -> Taps:
    """The taps of a rank's output rows, on a device."""
    pieces = _needed_rows(side, degree, dtype, _weights_device(device))[rank]
    rows = pieces[0] if pieces else (0, 0)
    start, stop = shard_range(side.result, degree, rank)
    with torch.inference_mode(False), torch.no_grad():
        matrix = _matrix(side, dtype, _weights_device(device))[rows[0] : rows[1], start:stop]
        used = matrix != 0
        count = int(used.sum(0).max()) if stop > start else 0
        taps = used.int().sort(dim=0, descending=True, stable=True).indices[:count]
        weights = matrix.gather(0, taps)
        # an output row with fewer taps repeats its first, with weight 0
        taps = torch.where(weights == 0, taps[:1], taps)
        selects = count == 1 and bool((weights == 1).all())
        return taps.to(device), None if selects else weights.to(device)


def _weights_device(device: torch.device) -> str:
    """Where weights are computed; for tensors without values, on the CPU."""
    return "cpu" if device.type == "meta" else str(device)


def _resampled(local: Tensor, dim: int, side: ResampledSide, group: AxisGroup | None) -> Tensor:
    """Resample along one side, sharded by a group or (None) full."""
    dtype = torch.promote_types(local.dtype, torch.float32)
    degree, rank = (group.size, group.rank) if group else (1, 0)
    taps, weights = _taps(side, degree, rank, dtype, local.device)
    held = tuple((shard_range(side.extent, degree, peer),) for peer in range(degree))
    wanted = _needed_rows(side, degree, dtype, _weights_device(local.device))
    weight_shape = [-1 if axis == dim else 1 for axis in range(local.dim())]

    def blend(shard: Tensor) -> Tensor:
        rows = exchange_rows(shard, dim, held, wanted, group)
        if weights is None:
            return rows.index_select(dim, taps[0])
        total = rows.new_zeros(resized(rows, dim, taps.shape[1]), dtype=dtype)
        for tap, weight in zip(taps, weights, strict=True):
            total.addcmul_(rows.index_select(dim, tap).to(dtype), weight.view(weight_shape))
        return total.to(rows.dtype)

    def spread(gradient: Tensor) -> Tensor:
        total = gradient.new_zeros(resized(gradient, dim, length_of(wanted[rank])), dtype=dtype)
        wide = gradient.to(dtype)
        for number, tap in enumerate(taps):
            total.index_add_(dim, tap, wide if weights is None else wide * weights[number].view(weight_shape))
        return exchange_rows(total.to(gradient.dtype), dim, wanted, held, group)

    return linear_map(local, blend, spread)


HANDLERS: Mapping[str, Handler] = {
    **dict.fromkeys(("pad", "constant_pad_nd"), pad),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), _shuffled),
    **dict.fromkeys(("interpolate", "upsample"), interpolate),
}
