"""Collectives on cut tensors whose backward is their exact adjoint; see ``cuts.tensor`` for what gradients mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd import Function

from galvatron_lite.parallelism.cuts.laying import gathered, own_part, scattered
from galvatron_lite.parallelism.cuts.line import Line
from galvatron_lite.parallelism.cuts.tensor import Cut, Cuts, Rules, cut_tensor, cuts_of, local_of
from galvatron_lite.parallelism.shares import share


def gather_cuts(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank: gathered along each cut; in backward the ranks' gradients are summed and cut."""
    everything = local_of(tensor)
    for cut in cuts_of(tensor):
        everything = gather(everything, cut)
    return everything


def gather(local: Tensor, cut: Cut) -> Tensor:
    """Shares gathered along one cut: plain tensor in, plain tensor out; the gradients are summed and cut."""
    return _apply(_Gather, local, cut)


def gathered_along(tensor: Tensor, cuts: Iterable[Cut]) -> Tensor:
    """A cut tensor gathered along some of its cuts, within ``shares_only``: plain, or itself where there are none."""
    for cut in cuts:
        tensor = gather(tensor, cut)
    return tensor


def slice_of(tensor: Tensor, cuts: Cuts, rules: Rules) -> Tensor:
    """This rank's share of a tensor that is whole on every rank; in backward the rest of the gradient is zero."""
    for cut in cuts:
        tensor = own_part(tensor, cut)
    return cut_tensor(tensor, cuts, rules)


def sum_over(tensor: Tensor, lines: Iterable[Line]) -> Tensor:
    """The sum of a plain tensor over the ranks of lines, on each of them; so are the gradients."""
    for line in lines:
        tensor = _apply(_Sum, tensor, line)
    return tensor


def enter(tensor: Tensor, lines: Iterable[Line]) -> Tensor:
    """A whole tensor comes from code in which the gradient of a replica is complete: sums its gradient's parts."""
    for line in lines:
        tensor = _apply(_Enter, tensor, line)
    return tensor


def leave(tensor: Tensor, lines: Iterable[Line]) -> Tensor:
    """A whole tensor goes to code in which the gradient of a replica is complete: each rank takes its part of it."""
    for line in lines:
        tensor = _apply(_Leave, tensor, line)
    return tensor


def _apply(function: type[Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def unviewed(tensor: Tensor) -> Tensor:
    """The tensor as a result of a ``Function`` that may be written to: autograd forbids that where it is a view.

    Memory and version are shared with the tensor, so what must not be written to is still noticed.
    """
    return tensor.detach()


def scatter_sum(tensor: Tensor, line: Line, extent: int, dim: int) -> Tensor:
    """This rank's share along ``dim`` of the sum of the ranks' whole tensors. No autograd."""
    if extent % line.size == 0:
        return line.reduce_scatter(tensor.contiguous(), dim)
    start, length = share(extent, line.size, line.rank)
    return line.all_reduce(tensor).narrow(dim, start, length).contiguous()


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return unviewed(gathered(local.contiguous(), cut))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        cut = ctx.cut
        return scattered(gradient, cut), None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return unviewed(line.all_reduce(tensor))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.line.all_reduce(gradient), None


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return unviewed(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.line.all_reduce(gradient), None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return unviewed(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.line.size, None
