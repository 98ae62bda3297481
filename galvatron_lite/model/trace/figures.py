"""Figures for one sample, from recordings of a region at two batch sizes.

A figure for one sample is its growth per sample; what does not grow (weights, causal masks, position tables) is left
out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from galvatron_lite.model.graph import Operator, OperatorClass, Sharding
from galvatron_lite.model.trace.record import OperatorCall, Recording, UnlikeRunsError
from galvatron_lite.model.trace.run import RegionRun

SAMPLES = (2, 4)  # the two batch sizes a region is run at


@dataclass(frozen=True, slots=True)
class RegionFigures:
    """One region for one sample; all in bytes, fields as in ``LayerKind``."""

    calls: tuple[OperatorCall, ...]  # in order
    kept: int  # without recompute; outputs are left out, as they count with the next layer
    handed: int  # part of ``kept`` that the previous layer made
    held: int  # kept outputs
    overwrites: bool  # whether it overwrites its input
    overwrites_heavy: bool  # whether it overwrites the output of a matmul, convolution or attention
    selective: int  # kept if the input and the outputs of matmuls, convolutions and attention are saved
    side: int  # kept inputs that all layers share (position tables, masks)
    working: int  # beyond ``kept`` in backward
    forward_working: int  # beyond ``kept`` in forward


def figures(small: RegionRun, large: RegionRun, *, rows: Collection[str] = (), degree: int = 1) -> RegionFigures:
    """Compute figures for one sample from runs at the two batch sizes ``SAMPLES``.

    Args:
        small: run at the first size.
        large: run at the second size.
        rows: paths of row-split matmuls, whose sums selective recomputation keeps (``recompute.sums``).
        degree: devices over which the tokens of these sums are sharded.
    """
    _check_alike(small.recording, large.recording)
    sizes = {number: slope(small.recording.sizes[number], size) for number, size in large.recording.sizes.items()}
    recording = large.recording
    events = {event for event in recording.events if event > 0}.difference(large.leaving)
    taken = set(large.chain).difference(large.leaving)

    def kept_of(storages: Collection[int]) -> int:
        return sum(sizes[number] for number in recording.kept if number in storages)

    kept, entering = kept_of(events), sum(sizes.get(number, 0) for number in large.chain)
    # storages that forward matmuls, convolutions and attention write, and the number of devices that shard each
    heavy, overwrites, overwrites_heavy = dict[int, int](), False, False
    for call in (call for call in recording.calls if not call.backward):
        overwrites = overwrites or not set(large.chain).isdisjoint(call.outputs)
        overwrites_heavy = overwrites_heavy or not heavy.keys().isdisjoint(call.outputs)
        if call.kind is not OperatorClass.MEMORY:
            heavy |= dict.fromkeys(call.outputs, degree if call.path in rows else 1)
    forward, backward = _peaks(recording, sizes)
    return RegionFigures(
        calls=tuple(_per_sample(a, b) for a, b in zip(small.recording.calls, recording.calls, strict=True)),
        kept=kept + kept_of(taken),
        handed=kept_of(taken.intersection(large.handed)),
        held=kept_of(large.leaving),
        overwrites=overwrites,
        overwrites_heavy=overwrites_heavy,
        selective=entering + sum(sizes[number] // share for number, share in heavy.items()),
        side=kept_of(large.side),
        working=max(0, backward - kept),
        forward_working=max(0, forward - kept),
    )


def _check_alike(small: Recording, large: Recording) -> None:
    names = [[(call.path, call.name) for call in recording.calls] for recording in (small, large)]
    if names[0] == names[1] and small.sizes.keys() == large.sizes.keys():
        return
    pairs = zip_longest(*names, fillvalue=("", "nothing"))
    unlike = next((f"{a[1]} and {b[1]} in {a[0] or b[0] or 'it'}" for a, b in pairs if a != b), "tensors kept")
    raise UnlikeRunsError("model", f"batch sizes {SAMPLES}", f"With them it runs unlike operators ({unlike} differ)")


def slope(small: int, large: int) -> int:
    """Return the growth of a figure per sample, from its values at the batch sizes ``SAMPLES``."""
    return (large - small) // (SAMPLES[1] - SAMPLES[0])


def _peaks(recording: Recording, sizes: Mapping[int, int]) -> tuple[int, int]:
    """Peak bytes in forward and in backward, of storages made in the region except gradients of parameters."""
    most, live = [0, 0], 0
    for place, event in enumerate(recording.events):
        backward = place >= recording.forward_events
        if abs(event) not in recording.gradients:
            live += sizes[event] if event > 0 else -sizes[-event]
        most[backward] = max(most[backward], live)
        if place == recording.forward_events - 1:
            most[1] = live
    return most[0], most[1]


def _per_sample(small: OperatorCall, large: OperatorCall) -> OperatorCall:
    moved = slope(small.moved, large.moved)
    shape = tuple(slope(a, b) or b for a, b in zip(small.shape, large.shape, strict=True))
    return replace(
        large,
        shape=shape[1:] if large.kind is OperatorClass.ATTENTION else shape,
        flops=slope(small.flops, large.flops),
        moved=moved,
        weight_bytes=0 if large.name == "embedding" else max(0, large.moved - SAMPLES[1] * moved),
    )


_Key = tuple[str, OperatorClass, tuple[int, ...]]
Shardings = Mapping[tuple[str, OperatorClass], Sharding]
"""How tensor parallelism divides the calls of a module and class; those that are missing are not divided."""


def merge(calls: Sequence[OperatorCall], shardings: Shardings, frozen: Collection[str] = ()) -> tuple[Operator, ...]:
    """Merge the calls of one layer into operators, in running order.

    Heavy calls of one module and shape form one operator, and so do the memory-bound calls of one module; windows that
    pass over a picture form one for each kind of window. Backward calls add to the forward operators of their module
    and class, by share of forward FLOPs or bytes; without such an operator (the sum that makes a bias gradient), to the
    first one of the module or of its parent. ``frozen``: paths of modules whose weights do not train.
    """
    forward: dict[_Key, list[OperatorCall]] = {}
    for call in (call for call in calls if not call.backward):
        shape = call.shape[1:] if call.kind is OperatorClass.MEMORY else call.shape
        forward.setdefault((call.path, call.kind, shape), []).append(call)
    booked: dict[tuple[_Key, ...], tuple[int, int]] = {}  # FLOPs and bytes of backward by the entries they belong to
    for call in (call for call in calls if call.backward):
        homes = tuple(_homes(call, list(forward)))
        flops, moved = booked.get(homes, (0, 0))
        booked[homes] = (flops + call.flops, moved + call.moved)
    backward = dict.fromkeys(forward, (0, 0))
    for homes, (flops, moved) in booked.items():
        shares = [sum(part.flops or part.moved for part in forward[key]) or 1 for key in homes]
        left = sum(shares)
        for key, share in zip(homes, shares, strict=True):
            part = (flops * share // left, moved * share // left)
            backward[key] = (backward[key][0] + part[0], backward[key][1] + part[1])
            flops, moved, left = flops - part[0], moved - part[1], left - share
    operators = (_operator(key, forward[key], *backward[key], shardings.get(key[:2], Sharding.NONE)) for key in forward)
    return tuple(
        replace(operator, frozen=True) if key[0] in frozen and operator.weight_bytes else operator
        for key, operator in zip(forward, operators, strict=True)
    )


def _homes(call: OperatorCall, keys: list[_Key]) -> list[_Key]:
    """Keys of a backward call: those of its module and class, else the first of its module or nearest parent."""
    same = [key for key in keys if key[0] == call.path and key[1] is call.kind]
    path = call.path
    while not same:
        same = [key for key in keys if key[0] == path][:1]
        if not path:
            break
        path = path.rpartition(".")[0]
    return same or keys[:1]


def _operator(
    key: _Key, calls: list[OperatorCall], backward_flops: int, backward_moved: int, sharding: Sharding
) -> Operator:
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
        sharding=sharding,
        causal=all(call.causal for call in calls),
        statistics=sum(call.statistics for call in calls),
        reads=calls[0].reads if any(call.weight_bytes for call in calls) else 0,
    )
