"""Collectives on sharded tensors whose backward is their exact adjoint; ``sharded.tensor`` says what gradients mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from galvatron_lite.parallelism.sharded.groups import (
    AxisGroup,
    OrderedGroup,
    Parcel,
    Pieces,
    length_of,
    merge_pieces,
    rank_order,
    shards_of,
    take_pieces,
)
from galvatron_lite.parallelism.sharded.tensor import Rules, ShardSpec, ShardSpecs, from_local, specs_of, to_local


def full_tensor(tensor: Tensor) -> Tensor:
    """The global tensor on every rank; in backward the ranks' gradients are summed and sharded."""
    return gather_dims(to_local(tensor), specs_of(tensor))


def gather_dims(tensor: Tensor, specs: Iterable[ShardSpec]) -> Tensor:
    """A shard gathered along some dims, within ``locals_only``; a plain tensor, or itself where there are none."""
    for spec in specs:
        tensor = linear_map(tensor, partial(gathered, spec=spec), partial(scattered, spec=spec))
    return tensor


def full_replica(tensor: Tensor) -> Tensor:
    """``full_tensor`` for code in which each rank has the complete gradient: in backward it takes its shard of it."""
    full = to_local(tensor)
    for spec in specs_of(tensor):
        full = linear_map(full, partial(gathered, spec=spec), partial(local_part, spec=spec))
    return full


def scatter_sum(partial_sum: Tensor, spec: ShardSpec) -> Tensor:
    """This rank's shard, a plain tensor, of the sum of the ranks' full tensors; gradients are gathered."""
    return linear_map(partial_sum, partial(scattered, spec=spec), partial(gathered, spec=spec))


def local_part(tensor: Tensor, spec: ShardSpec, dim: int | None = None) -> Tensor:
    """This rank's items of a full tensor; along another dim than the spec's, if given."""
    return take_pieces(tensor, spec.dim if dim is None else dim, spec.pieces)


def distribute(tensor: Tensor, specs: ShardSpecs, rules: Rules) -> Tensor:
    """This rank's shard of a tensor that every rank holds; in backward the rest of the gradient is zero."""
    for spec in specs:
        tensor = local_part(tensor, spec)
    return from_local(tensor, specs, rules)


def sum_over(tensor: Tensor, groups: Iterable[AxisGroup]) -> Tensor:
    """The sum of a plain tensor over the ranks of groups, on each of them; so are the gradients."""
    for group in groups:
        tensor = linear_map(tensor, group.all_reduce, group.all_reduce)
    return tensor


def enter(tensor: Tensor, groups: Iterable[AxisGroup]) -> Tensor:
    """A full tensor comes from code in which every rank has its complete gradient: sums the gradient's parts."""
    for group in groups:
        tensor = linear_map(tensor, _same, group.all_reduce)
    return tensor


def leave(tensor: Tensor, groups: Iterable[AxisGroup]) -> Tensor:
    """A full tensor goes to code in which every rank has its complete gradient: each rank takes its part of it."""
    for group in groups:
        tensor = linear_map(tensor, _same, partial(torch.div, other=group.size))
    return tensor


def redistribute(
    local: Tensor, dim: int, held: Sequence[Pieces], wanted: Sequence[Pieces], group: AxisGroup | None
) -> Tensor:
    """``exchange_rows`` with gradients, which go the way back; ``local`` itself where no rank wants other rows."""
    if held == wanted:
        return local
    there = partial(exchange_rows, dim=dim, held=held, wanted=wanted, group=group)
    return linear_map(local, there, partial(exchange_rows, dim=dim, held=wanted, wanted=held, group=group))


LinearMap = Callable[[Tensor], Tensor]


def linear_map(tensor: Tensor, function: LinearMap, adjoint: LinearMap) -> Tensor:
    """A linear function of a tensor whose backward is its adjoint."""
    result: Tensor = _Linear.apply(tensor, function, adjoint)  # type: ignore[no-untyped-call]
    return result


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, function: LinearMap, adjoint: LinearMap) -> Tensor:
        ctx.adjoint = adjoint
        # Detached, as autograd forbids writes to results that are views of an input. Memory and version are shared, so
        # writes to what is saved for backward are still noticed.
        return function(tensor).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(gradient), None, None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def exchange_rows(
    local: Tensor, dim: int, held: Sequence[Pieces], wanted: Sequence[Pieces], group: AxisGroup | None
) -> Tensor:
    """The rows that this rank wants: of each, the sum of what the ranks hold of it. No autograd.

    With ``held`` and ``wanted`` swapped it is its own adjoint.

    Args:
        local: the rows that this rank holds, piece after piece.
        dim: of the rows.
        held: rows of every rank; those of several ranks may overlap, a rank's own ascend.
        wanted: likewise.
        group: the ranks; None for this one alone.
    """
    if held == wanted:
        return local
    rank = group.rank if group else 0
    peers = [one for one in range(len(held)) if one != rank]
    outgoing = {peer: _common(held[rank], wanted[peer]) for peer in peers}
    incoming = {peer: _common(wanted[rank], held[peer]) for peer in peers}
    sent = [(peer, take_pieces(local, dim, rows).contiguous()) for peer, rows in outgoing.items() if rows]
    arriving: list[Parcel] = [
        (peer, local.new_empty(resized(local, dim, length_of(rows)))) for peer, rows in incoming.items() if rows
    ]
    arrival = group.exchange(sent, arriving) if group else None
    result = local.new_zeros(resized(local, dim, length_of(wanted[rank])))
    _add_pieces(
        result, dim, _common(wanted[rank], held[rank]), take_pieces(local, dim, _common(held[rank], wanted[rank]))
    )
    if arrival is not None:
        arrival.wait()
    for peer, rows in arriving:
        _add_pieces(result, dim, incoming[peer], rows)
    return result


def _common(pieces: Pieces, others: Pieces) -> Pieces:
    """Where the rows that both have lie in the first one's."""
    common, before = [], 0
    for start, stop in pieces:
        both = ((max(start, low), min(stop, high)) for low, high in others)
        common += [(before + low - start, before + high - start) for low, high in both if low < high]
        before += stop - start
    return tuple(common)


def _add_pieces(target: Tensor, dim: int, pieces: Pieces, rows: Tensor) -> None:
    place = 0
    for start, stop in pieces:
        target.narrow(dim, start, stop - start).add_(rows.narrow(dim, place, stop - start))
        place += stop - start


def resized(tensor: Tensor, dim: int, extent: int) -> list[int]:
    """The shape of a tensor with another extent along a dim."""
    shape = list(tensor.shape)
    shape[dim] = extent
    return shape


def gathered(local: Tensor, spec: ShardSpec) -> Tensor:
    """The full tensor from the ranks' shards. No autograd."""
    group, dim, local = spec.group, spec.dim, local.contiguous()
    held = shards_of(spec.extent, group)
    lengths = [length_of(pieces) for pieces in held]
    longest = max(lengths)
    if min(lengths) == longest:
        joined = group.all_gather(local, dim)
    else:
        padding = [0, 0] * (local.dim() - 1 - dim) + [0, longest - local.shape[dim]]
        padded = group.all_gather(torch.nn.functional.pad(local, padding), dim)
        joined = torch.cat([padded.narrow(dim, n * longest, length) for n, length in enumerate(lengths)], dim)
    if not isinstance(group, OrderedGroup):
        return joined
    order = rank_order(held)
    return joined if len(order) == 1 else take_pieces(joined, dim, order)


def scattered(tensor: Tensor, spec: ShardSpec) -> Tensor:
    """This rank's items of the sum of the ranks' full tensors. No autograd."""
    held = spec.shards
    if len({length_of(pieces) for pieces in held}) > 1:
        return local_part(spec.group.all_reduce(tensor), spec).contiguous()
    by_rank = take_pieces(tensor, spec.dim, merge_pieces([piece for pieces in held for piece in pieces]))
    return spec.group.reduce_scatter(by_rank.contiguous(), spec.dim)
