"""What layers with windows have in common when ranks share the pixels of their pictures."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cuts.grid import PIXELS
from galvatron_lite.parallelism.cuts.line import ShapeOnlyLine
from galvatron_lite.parallelism.cuts.tensor import Call, Cut, Cuts, cut_tensor, shares_only, whole_shape
from galvatron_lite.parallelism.spatial.halo import Halo, HaloSide, checked
from galvatron_lite.parallelism.spatial.windows import SideWindow, output_extent, stays

Amount = int | Sequence[int]
"""One number for all sides, or one a side."""


def pixels(extents: Sequence[int], windows: Sequence[SideWindow], cuts: Sequence[Cut], layer: str) -> Halo:
    """The halo of windows that slide along the sides of a picture; sides that are whole are in it if padded unevenly.

    Raises:
        InputError: ranks cannot share the picture under these windows.
    """
    lines = {cut.dim: cut.line for cut in cuts}
    lines |= {dim: ALONE for dim, one in enumerate(windows, PIXELS) if one.before != one.after and dim not in lines}
    dims = sorted(lines)
    sides = tuple(
        HaloSide(dim, extents[dim - PIXELS], windows[dim - PIXELS], lines[dim].size, lines[dim].rank) for dim in dims
    )
    return checked(sides, tuple(lines[dim] for dim in dims), layer)


ALONE = ShapeOnlyLine(1, 0)
"""The line of a side that is whole."""


def cuts_after(cuts: Sequence[Cut], windows: Sequence[SideWindow]) -> tuple[Cut, ...]:
    """How what windows make of a picture is cut."""
    return tuple(Cut(cut.dim, output_extent(windows[cut.dim - PIXELS], cut.extent), cut.line) for cut in cuts)


def numbers(amount: Amount, sides: int) -> tuple[int, ...]:
    """One number a side: torch's functions take one for all."""
    given = (amount,) if isinstance(amount, int) else tuple(amount)
    return given * sides if len(given) == 1 else given


def check_batched(picture: Tensor, sides: int, layer: str) -> None:
    """Refuse a picture that is not (samples, channels, and its sides)."""
    if len(whole_shape(picture)) != PIXELS + sides:
        remedy = "Give (samples, channels, ...): pictures that are shared have a dim of samples."
        raise InputError(f"shape of the input of {layer}", whole_shape(picture), remedy)


def on_own_share(call: Call, cuts: Cuts, windows: Sequence[SideWindow]) -> Tensor | None:
    """A layer that every rank can do on its own share as it is; None where they need one another, or pad.

    The same on all ranks, and so is what autograd keeps.
    """
    if not all(stays(windows[cut.dim - PIXELS], cut.extent, cut.line.size) for cut in cuts):
        return None
    with shares_only():
        made: Tensor = call.function(*call.args, **call.kwargs)
    return cut_tensor(made, cuts_after(cuts, windows), call.rules)
