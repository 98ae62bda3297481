"""Pads of pictures whose pixels ranks share, by any mode, and crops (pads of less than nothing).

The result is shared as any picture of its extent is, so what every rank holds moves a little. Sides are done in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cuts.tensor import Call, Cut, Handler, cut_tensor, cuts_of, local_of
from galvatron_lite.parallelism.spatial.windows import (
    PAD_MODES,
    IndexRun,
    Loan,
    Range,
    SideWindow,
    borrows,
    covered,
    items,
    layout,
    lends,
    output_extent,
    own_range,
    refusal,
    travels,
)


def pad(call: Call) -> Any:
    """``torch.nn.functional.pad`` (and ``torch.constant_pad_nd``) of a cut tensor: a cut tensor.

    Raises:
        InputError: a side is padded by more than torch allows, or its ranks need more than the ranks beside them hold.
    """
    tensor, amounts, mode, value = _arguments(*call.args, **call.kwargs)
    share, cuts = local_of(tensor), cuts_of(tensor)
    pads = {share.dim() - 1 - index: (amounts[2 * index], amounts[2 * index + 1]) for index in range(len(amounts) // 2)}
    moved = [cut for cut in cuts if any(pads.get(cut.dim, ()))]
    if mode not in PAD_MODES or (mode != "constant" and any(min(pads[cut.dim]) < 0 for cut in moved)):
        return call.rules.otherwise(call)
    local = _without(amounts, share.dim(), [cut.dim for cut in moved])
    if any(local):
        share = functional.pad(share, local, mode, value)
    windows = {cut.dim: SideWindow(before=pads[cut.dim][0], after=pads[cut.dim][1], mode=mode) for cut in moved}
    for cut in moved:
        _check(cut, windows[cut.dim])
        share = _Pad.apply(share, cut, windows[cut.dim], value or 0.0)  # type: ignore[no-untyped-call]
    extents = (output_extent(windows.get(cut.dim, SideWindow()), cut.extent) for cut in cuts)
    after = [Cut(cut.dim, extent, cut.line) for cut, extent in zip(cuts, extents, strict=True)]
    # what torch pads is never the tensor itself, even where it pads by nothing
    return cut_tensor(share if moved or any(local) else share.clone(), after, call.rules)


def _arguments(
    input: Tensor,  # noqa: A002 - as torch names it
    pad: Sequence[int],
    mode: str | float = "constant",
    value: float | None = None,
) -> tuple[Tensor, tuple[int, ...], str, float | None]:
    if isinstance(mode, str):
        return input, tuple(pad), mode, value
    return input, tuple(pad), "constant", mode  # constant_pad_nd's third argument is its value


def _without(amounts: Sequence[int], dims: int, left_out: Sequence[int]) -> list[int]:
    """Amounts of a pad with nothing for some dims."""
    return [0 if dims - 1 - index // 2 in left_out else amount for index, amount in enumerate(amounts)]


def _check(cut: Cut, window: SideWindow) -> None:
    most = {"reflect": cut.extent - 1, "circular": cut.extent}.get(window.mode)
    field = f"pad ({window.mode}): dim {cut.dim} of {cut.extent} shared by {cut.line.size}"
    if most is not None and max(window.before, window.after) > most:
        raise InputError(field, (window.before, window.after), f"Pad by at most {most}.")
    reason = refusal(window, cut.extent, cut.line.size)
    if reason:
        remedy = f"Share it over fewer ranks, or make the picture larger: {reason}."
        raise InputError(field, (window.before, window.after), remedy)


class _Pad(Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, cut: Cut, window: SideWindow, value: float) -> Tensor:
        ctx.cut, ctx.window = cut, window
        held = _borrow(share, cut, window)
        runs = layout(window, cut.extent, cut.line.size, cut.line.rank)
        return torch.cat([_run(held, share, run, cut, window, value) for run in runs], cut.dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cut, window = ctx.cut, ctx.window
        held = {cut.line.rank: _zeros(gradient, cut, cut.length)}
        for peer, ranges in borrows(window, cut.extent, cut.line.size, cut.line.rank):
            held[peer] = _zeros(gradient, cut, items(ranges))
        start = 0
        for run in layout(window, cut.extent, cut.line.size, cut.line.rank):
            _add_run(held, gradient.narrow(cut.dim, start, run.length), run, cut, window)
            start += run.length
        return _give_back(held, cut, window), None, None, None


Held = dict[int, Tensor]
"""By rank: what is here of its share, one range after the other; of this rank all of it."""


def _borrow(share: Tensor, cut: Cut, window: SideWindow) -> Held:
    whose = window, cut.extent, cut.line.size
    sent = [(peer, _taken(share, cut, ranges).contiguous()) for peer, ranges in lends(*whose, cut.line.rank)]
    borrowed = borrows(*whose, cut.line.rank)
    wanted = [(peer, _zeros(share, cut, items(ranges))) for peer, ranges in borrowed]
    if travels(*whose):
        cut.line.exchange(sent, wanted).wait()
    return {cut.line.rank: share, **dict(wanted)}


def _give_back(held: Held, cut: Cut, window: SideWindow) -> Tensor:
    """The gradient of this rank's share: what its own outputs gave, and the others'."""
    own = held.pop(cut.line.rank)
    whose = window, cut.extent, cut.line.size
    lent = lends(*whose, cut.line.rank)
    wanted = [(peer, _zeros(own, cut, items(ranges))) for peer, ranges in lent]
    if travels(*whose):
        cut.line.exchange(list(held.items()), wanted).wait()
    for (_, tensor), (_, ranges) in zip(wanted, lent, strict=True):
        place = 0
        for start, stop in ranges:
            own.narrow(cut.dim, start - cut.start, stop - start).add_(tensor.narrow(cut.dim, place, stop - start))
            place += stop - start
    return own


def _taken(share: Tensor, cut: Cut, ranges: Sequence[Range]) -> Tensor:
    return torch.cat([share.narrow(cut.dim, start - cut.start, stop - start) for start, stop in ranges], cut.dim)


def _zeros(like: Tensor, cut: Cut, length: int) -> Tensor:
    shape = list(like.shape)
    shape[cut.dim] = length
    return like.new_zeros(shape)


def _run(held: Held, like: Tensor, run: IndexRun, cut: Cut, window: SideWindow, value: float) -> Tensor:
    """The places of a run."""
    if run.step is None:
        return _zeros(like, cut, run.length).fill_(value)
    found = [held[peer].narrow(cut.dim, place, length) for peer, place, length in _sources(run, cut, window)]
    made = torch.cat(found, cut.dim)
    if run.step == 0:
        shape = list(made.shape)
        shape[cut.dim] = run.length
        return made.expand(shape)
    return made.flip(cut.dim) if run.step < 0 else made


def _add_run(held: Held, gradient: Tensor, run: IndexRun, cut: Cut, window: SideWindow) -> None:
    """Add the gradient of a run to that of where its places came from."""
    if run.step is None:
        return
    if run.step == 0:
        gradient = gradient.sum(cut.dim, keepdim=True)
    elif run.step < 0:
        gradient = gradient.flip(cut.dim)
    start = 0
    for peer, place, length in _sources(run, cut, window):
        held[peer].narrow(cut.dim, place, length).add_(gradient.narrow(cut.dim, start, length))
        start += length


def _sources(run: IndexRun, cut: Cut, window: SideWindow) -> Iterator[tuple[int, int, int]]:
    """(rank, place in what is here of its share, length) of what a run covers, in the order of places."""
    rank, size = cut.line.rank, cut.line.size
    own: Loan = (rank, (own_range(cut.extent, size, rank),))
    for peer, ranges in sorted((own, *borrows(window, cut.extent, size, rank))):
        place = 0
        for start, stop in ranges:
            low, high = max(start, covered(run)[0]), min(stop, covered(run)[1])
            if low < high:
                yield peer, place + low - start, high - low
            place += stop - start


HANDLERS: Mapping[str, Handler] = {"pad": pad, "constant_pad_nd": pad}
"""Pads."""
