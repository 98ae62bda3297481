"""Collectives on sharded tensors whose backward is their exact adjoint; see ``sharded.tensor`` for gradients."""

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
    """Gather the global tensor on every rank; in backward the ranks' gradients are summed and sharded."""
    return gather_dims(to_local(tensor), specs_of(tensor))


def gather_dims(tensor: Tensor, specs: Iterable[ShardSpec]) -> Tensor:
    """Gather a shard along some dims, within ``locals_only``; without specs, return it unchanged."""
    for spec in specs:
        tensor = linear_map(tensor, partial(gathered, spec=spec), partial(scattered, spec=spec))
    return tensor


def full_replica(tensor: Tensor) -> Tensor:
    """``full_tensor`` for code in which every rank has the complete gradient: backward takes its shard of that."""
    full = to_local(tensor)
    for spec in specs_of(tensor):
        full = linear_map(full, partial(gathered, spec=spec), partial(local_part, spec=spec))
    return full


def scatter_sum(partial_sum: Tensor, spec: ShardSpec) -> Tensor:
    """Sum the ranks' full tensors and return this rank's shard, a plain tensor; gradients are gathered."""
    return linear_map(partial_sum, partial(scattered, spec=spec), partial(gathered, spec=spec))


def local_part(tensor: Tensor, spec: ShardSpec, dim: int | None = None) -> Tensor:
    """Return this rank's items of a full tensor, along ``dim`` if that is not the spec's."""
    return take_pieces(tensor, spec.dim if dim is None else dim, spec.pieces)


def distribute(tensor: Tensor, specs: ShardSpecs, rules: Rules) -> Tensor:
    """Shard a tensor that every rank holds; in backward the rest of the gradient is zero."""
    for spec in specs:
        tensor = local_part(tensor, spec)
    return from_local(tensor, specs, rules)


def sum_over(tensor: Tensor, groups: Iterable[AxisGroup]) -> Tensor:
    """Sum a plain tensor over the ranks of groups, in forward and in backward."""
    for group in groups:
        tensor = linear_map(tensor, group.all_reduce, group.all_reduce)
    return tensor


def enter(tensor: Tensor, groups: Iterable[AxisGroup]) -> Tensor:
    """Take a full tensor from code in which every rank has its complete gradient: backward sums the parts of it."""
    for group in groups:
        tensor = linear_map(tensor, _same, group.all_reduce)
    return tensor


def leave(tensor: Tensor, groups: Iterable[AxisGroup]) -> Tensor:
    """Give a full tensor to code in which every rank has its complete gradient: backward takes a part of it."""
    for group in groups:
        tensor = linear_map(tensor, _same, partial(torch.div, other=group.size))
    return tensor


def redistribute(
    local: Tensor, dim: int, held: Sequence[Pieces], wanted: Sequence[Pieces], group: AxisGroup | None
) -> Tensor:
    """``exchange_rows`` with gradients, which go back; returns ``local`` unchanged if no rank wants other rows."""
    if held == wanted:
        return local
    forward = partial(exchange_rows, dim=dim, held=held, wanted=wanted, group=group)
    backward = partial(exchange_rows, dim=dim, held=wanted, wanted=held, group=group)
    return linear_map(local, forward, backward)


LinearMap = Callable[[Tensor], Tensor]


def linear_map(tensor: Tensor, function: LinearMap, adjoint: LinearMap) -> Tensor:
    """Apply a linear function to a tensor, with its adjoint as backward."""
    result: Tensor = _Linear.apply(tensor, function, adjoint)  # type: ignore[no-untyped-call]
    return result


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, function: LinearMap, adjoint: LinearMap) -> Tensor:
        ctx.adjoint = adjoint
        # autograd forbids writes to results that are views of an input; a detached one shares memory and version, so
        # that writes to what is saved for backward are still noticed
        return function(tensor).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(gradient), None, None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def exchange_rows(
    local: Tensor, dim: int, held: Sequence[Pieces], wanted: Sequence[Pieces], group: AxisGroup | None
) -> Tensor:
    """Return the rows that this rank wants, each summed over the ranks that hold it. No autograd.

    With ``held`` and ``wanted`` swapped it is its own adjoint.

    Args:
        local: the rows that this rank holds, piece after piece.
        dim: of the rows.
        held: rows that each rank holds, ascending; those of several ranks may overlap.
        wanted: rows that each rank wants, ascending; they may overlap too.
        group: the ranks; None for this rank alone.
    """
    if held == wanted:
        return local
    rank = group.rank if group else 0
    peers = [peer for peer in range(len(held)) if peer != rank]
    outgoing = {peer: _common(held[rank], wanted[peer]) for peer in peers}
    incoming = {peer: _common(wanted[rank], held[peer]) for peer in peers}
    sent = [(peer, take_pieces(local, dim, rows).contiguous()) for peer, rows in outgoing.items() if rows]
    arriving: list[Parcel] = [
        (peer, local.new_empty(resized(local, dim, length_of(rows)))) for peer, rows in incoming.items() if rows
    ]
    arrival = group.exchange(sent, arriving) if group else None
    result = local.new_zeros(resized(local, dim, length_of(wanted[rank])))
    kept = take_pieces(local, dim, _common(held[rank], wanted[rank]))
    _add_pieces(result, dim, _common(wanted[rank], held[rank]), kept)
    if arrival is not None:
        arrival.wait()
    for peer, rows in arriving:
        _add_pieces(result, dim, incoming[peer], rows)
    return result


def _common(pieces: Pieces, others: Pieces) -> Pieces:
    """The positions, in ``pieces``, of the rows that both have."""
    common, before = [], 0
    for start, stop in pieces:
        both = ((max(start, low), min(stop, high)) for low, high in others)
        common += [(before + low - start, before + high - start) for low, high in both if low < high]
        before += stop - start
    return tuple(common)


def _add_pieces(target: Tensor, dim: int, pieces: Pieces, rows: Tensor) -> None:
    position = 0
    for start, stop in pieces:
        target.narrow(dim, start, stop - start).add_(rows.narrow(dim, position, stop - start))
        position += stop - start


def resized(tensor: Tensor, dim: int, extent: int) -> list[int]:
    """Return the shape of a tensor with another extent along a dim."""
    shape = list(tensor.shape)
    shape[dim] = extent
    return shape


def gathered(local: Tensor, spec: ShardSpec) -> Tensor:
    """Return the full tensor from the ranks' shards. No autograd."""
    group, dim, local = spec.group, spec.dim, local.contiguous()
    held = shards_of(spec.extent, group)
    lengths = [length_of(pieces) for pieces in held]
    longest = max(lengths)
    if min(lengths) == longest:
        joined = group.all_gather(local, dim)
    else:
        padding = [0, 0] * (local.dim() - 1 - dim) + [0, longest - local.shape[dim]]
        padded = group.all_gather(torch.nn.functional.pad(local, padding), dim)
        shards = [padded.narrow(dim, rank * longest, length) for rank, length in enumerate(lengths)]
        joined = torch.cat(shards, dim)
    if not isinstance(group, OrderedGroup):
        return joined
    order = rank_order(held)
    return joined if len(order) == 1 else take_pieces(joined, dim, order)


def scattered(tensor: Tensor, spec: ShardSpec) -> Tensor:
    """Return this rank's items of the sum of the ranks' full tensors. No autograd."""
    held = spec.shards
    if len({length_of(pieces) for pieces in held}) > 1:
        return local_part(spec.group.all_reduce(tensor), spec).contiguous()
    by_rank = take_pieces(tensor, spec.dim, merge_pieces([piece for pieces in held for piece in pieces]))
    return spec.group.reduce_scatter(by_rank.contiguous(), spec.dim)
