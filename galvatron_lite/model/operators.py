"""A layer's operator calls, merged into few entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from galvatron_lite.model.graph import Operator, OperatorClass, Sharding
from galvatron_lite.model.trace_figures import CallFigures

_Key = tuple[str, OperatorClass, tuple[int, ...]]


Shardings = Mapping[tuple[str, OperatorClass], Sharding]
"""How tensor parallelism divides the calls of one module and class; not at all where it is not given."""


def merge(calls: Sequence[CallFigures], shardings: Shardings) -> tuple[Operator, ...]:
    """Operators of one layer from its calls, in running order.

    Heavy calls of one module and shape are one entry; so are all memory-bound calls of one module, but for those that
    pass a window over a picture, of which those of one window are. Backward calls add
    to the forward entries of their module and class, by share of forward FLOPs or bytes; where there is none (the sum
    that makes a bias gradient), to the module's first entry, or its parent's.
    """
    forward = _grouped([call for call in calls if not call.backward])
    backward = dict.fromkeys(forward, (0, 0))
    for homes, (flops, moved) in _booked([call for call in calls if call.backward], list(forward)).items():
        _share_out(flops, moved, homes, forward, backward)
    return tuple(
        replace(_operator(key, forward[key], *backward[key]), sharding=shardings.get(key[:2], Sharding.NONE))
        for key in forward
    )


def _grouped(calls: Sequence[CallFigures]) -> dict[_Key, list[CallFigures]]:
    groups: dict[_Key, list[CallFigures]] = {}
    for call in calls:
        shape = call.shape[1:] if call.kind is OperatorClass.MEMORY else call.shape
        groups.setdefault((call.path, call.kind, shape), []).append(call)
    return groups


def _booked(calls: Sequence[CallFigures], keys: list[_Key]) -> dict[tuple[_Key, ...], tuple[int, int]]:
    """FLOPs and bytes of backward calls by the forward entries they belong to."""
    sums: dict[tuple[_Key, ...], tuple[int, int]] = {}
    for call in calls:
        homes = tuple(_homes(call, keys))
        flops, moved = sums.get(homes, (0, 0))
        sums[homes] = (flops + call.flops, moved + call.moved)
    return sums


def _share_out(
    flops: int,
    moved: int,
    homes: Sequence[_Key],
    forward: Mapping[_Key, list[CallFigures]],
    backward: dict[_Key, tuple[int, int]],
) -> None:
    shares = [sum(part.flops or part.moved for part in forward[key]) or 1 for key in homes]
    left = sum(shares)
    for key, share in zip(homes, shares, strict=True):
        part = (flops * share // left, moved * share // left)
        backward[key] = (backward[key][0] + part[0], backward[key][1] + part[1])
        flops, moved, left = flops - part[0], moved - part[1], left - share


def _homes(call: CallFigures, keys: list[_Key]) -> list[_Key]:
    """Entries a backward call belongs to: those of its module and class, else the nearest of its module or parents."""
    same = [key for key in keys if key[0] == call.path and key[1] is call.kind]
    path = call.path
    while not same:
        same = [key for key in keys if key[0] == path][:1]
        if not path:
            break
        path = path.rpartition(".")[0]
    return same or keys[:1]


def _operator(key: _Key, calls: list[CallFigures], backward_flops: int, backward_moved: int) -> Operator:
    path, kind, shape = key
    largest = max(calls, key=lambda call: (call.moved, call.shape)).name
    name = path if kind is OperatorClass.MATMUL and path else ".".join(filter(None, (path, largest)))
    return Operator(
        name=name,
        kind=kind,
        shape=shape if kind is not OperatorClass.MEMORY else max(call.shape for call in calls),
        count=sum(call.groups for call in calls),
        flops=sum(call.flops for call in calls),
        backward_flops=backward_flops,
        moved=sum(call.moved for call in calls),
        backward_moved=backward_moved,
        weight_bytes=sum(call.weight_bytes for call in calls),
        causal=all(call.causal for call in calls),
        statistics=sum(call.statistics for call in calls),
    )
