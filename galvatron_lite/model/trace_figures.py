"""From two recordings of one region, at two batch sizes, to figures for one sample.

What grows with the batch is the sample's; what does not (weights, causal masks, tables of positions) is not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from galvatron_lite.errors import TraceError
from galvatron_lite.model.graph import OperatorClass
from galvatron_lite.model.trace_record import Call, Recording
from galvatron_lite.model.trace_run import RegionRun

SAMPLES = (2, 4)
"""The two batch sizes a region is run at."""


@dataclass(frozen=True, slots=True)
class CallFigures:
    """One operator call for one sample; fields as in ``Call``, ``weight_bytes`` being what does not grow."""

    path: str
    name: str
    kind: OperatorClass
    shape: tuple[int, ...]
    flops: int
    moved: int
    weight_bytes: int
    backward: bool
    causal: bool
    statistics: int = 0
    groups: int = 1


@dataclass(frozen=True, slots=True)
class RegionFigures:
    """One region for one sample; all in bytes, fields as in ``LayerKind``."""

    calls: tuple[CallFigures, ...]  # every call, in order
    kept: int  # with no recompute; what leaves counts with the layer that it enters, and is not among it
    handed: int  # part of ``kept`` that the layer before made
    held: int  # kept of what leaves
    overwrites: bool  # whether it changes in place what enters it
    overwrites_heavy: bool  # whether it changes in place what a matmul, convolution or attention gave
    selective: int  # kept where outputs of matmuls, convolutions and attention are saved beside the input
    side: int  # kept of what enters at the side (position tables, masks), which all layers share
    working: int  # beyond ``kept`` in backward
    forward_working: int  # beyond ``kept`` in forward


def figures(small: RegionRun, large: RegionRun) -> RegionFigures:
    """Figures for one sample from runs at the two batch sizes ``SAMPLES``.

    Raises:
        TraceError: the region does other things at another batch size.
    """
    _check_alike(small.recording, large.recording)
    sizes = _growth(small.recording.sizes, large.recording.sizes)
    recording = large.recording
    made = {event for event in recording.events if event > 0}.difference(large.leaving)
    taken = set(large.chain).difference(large.leaving)

    def kept_of(storages: Collection[int]) -> int:
        return sum(sizes[number] for number in recording.kept if number in storages)

    kept, overwrites = kept_of(made), _overwritten(recording, large.chain)
    entering = sum(sizes.get(number, 0) for number in large.chain)
    forward, backward = _peaks(recording, sizes)
    return RegionFigures(
        calls=tuple(_per_sample(a, b) for a, b in zip(small.recording.calls, recording.calls, strict=True)),
        kept=kept + kept_of(taken),
        handed=kept_of(taken.intersection(large.handed)),
        held=kept_of(large.leaving),
        overwrites=overwrites[0],
        overwrites_heavy=overwrites[1],
        selective=entering + sum(sizes[number] for number in _heavy_outputs(recording)),
        side=kept_of(large.side),
        working=max(0, backward - kept),
        forward_working=max(0, forward - kept),
    )


def _check_alike(small: Recording, large: Recording) -> None:
    names = [[(call.path, call.name) for call in recording.calls] for recording in (small, large)]
    if names[0] != names[1] or small.sizes.keys() != large.sizes.keys():
        remedy = "The model must run the same operators whatever the batch size; name its blocks yourself (blocks=)."
        raise TraceError("model", f"batch sizes {SAMPLES}", remedy)


def _growth(small: Mapping[int, int], large: Mapping[int, int]) -> dict[int, int]:
    return {number: _slope(small[number], size) for number, size in large.items()}


def _slope(small: int, large: int) -> int:
    return (large - small) // (SAMPLES[1] - SAMPLES[0])


def _heavy_outputs(recording: Recording) -> set[int]:
    """Storages that forward matmuls, convolutions and attention write."""
    heavy = [call for call in recording.calls if call.kind is not OperatorClass.MEMORY and not call.backward]
    return {number for call in heavy for number in call.outputs}


def _overwritten(recording: Recording, entering: Collection[int]) -> tuple[bool, bool]:
    """Whether forward calls write into storages that enter, and into those that a heavy call before them wrote."""
    heavy, into = set[int](), [False, False]
    for call in (call for call in recording.calls if not call.backward):
        into = [into[0] or bool(set(entering) & {*call.outputs}), into[1] or bool(heavy & {*call.outputs})]
        heavy |= set(call.outputs) if call.kind is not OperatorClass.MEMORY else set()
    return into[0], into[1]


def _peaks(recording: Recording, sizes: Mapping[int, int]) -> tuple[int, int]:
    """Most bytes live at once in forward and in backward, of storages made meanwhile that are no parameter gradient."""
    events = [event for event in recording.events if abs(event) not in recording.gradients]
    first = [event for event in recording.events[: recording.forward_events] if abs(event) not in recording.gradients]
    forward, live = _peak(first, sizes, 0)
    backward, _ = _peak(events[len(first) :], sizes, live)
    return forward, backward


def _peak(events: Iterable[int], sizes: Mapping[int, int], live: int) -> tuple[int, int]:
    most = live
    for event in events:
        live += sizes[event] if event > 0 else -sizes[-event]
        most = max(most, live)
    return most, live


def _per_sample(small: Call, large: Call) -> CallFigures:
    moved = _slope(small.moved, large.moved)
    weights = 0 if large.name == "embedding" else max(0, large.moved - SAMPLES[1] * moved)
    return CallFigures(
        path=large.path,
        name=large.name,
        kind=large.kind,
        shape=_sample_shape(small, large),
        flops=_slope(small.flops, large.flops),
        moved=moved,
        weight_bytes=weights,
        backward=large.backward,
        causal=large.causal,
        statistics=large.statistics,
        groups=large.groups,
    )


def _sample_shape(small: Call, large: Call) -> tuple[int, ...]:
    sizes = [_slope(a, b) or b for a, b in zip(small.extents, large.extents, strict=True)]
    return tuple(sizes[1:]) if large.kind is OperatorClass.ATTENTION else tuple(sizes)
