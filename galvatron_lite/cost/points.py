"""Looks layers up in a profile: piecewise linear between the samples that were measured or estimated."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np

from galvatron_lite.arrays import (
    BoolArray,
    Flag,
    FloatArray,
    IntArray,
    Real,
    Whole,
    is_option,
    largest,
    least,
    never,
    up,
    where,
)
from galvatron_lite.model.graph import LayerKind, OperatorClass, Recompute
from galvatron_lite.parallelism.axes import SLICES
from galvatron_lite.parallelism.base import LayerWork
from galvatron_lite.parallelism.ranks import Either, sharded_items
from galvatron_lite.parallelism.registry import dimensions, run_fields
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.schema import LayerPoint, Profile
from galvatron_lite.units import ITEM_BYTES, activation_bytes

RUN = run_fields()
_values_of = attrgetter(*RUN)
"""Fields of strategies on which it depends what one device runs of a layer; points have them too."""
_PLAIN = Strategy()
_STANDING_IN = tuple(getattr(_PLAIN, name) for one in dimensions() if one.stands_in for name in one.runs)
_SLICES = frozenset(axis.degree for one in dimensions() for axis in one.axes if axis.part in SLICES)
PointKey = tuple[Any, ...]
"""A kind of layer, and the values of ``RUN``."""
Points = Mapping[PointKey, Sequence[LayerPoint]]
_MOST = 2**14
"""More ways than any layer is split along one axis."""


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """What one layer costs one device at a number of samples, see ``LayerPoint``; arrays under several strategies."""

    forward: Real  # forward, backward: seconds
    backward: Real
    kept: Whole  # kept, working, forward_working: bytes
    working: Whole
    forward_working: Whole

    def beside(self, lasting: Whole, working: Whole = 0, forward_working: Whole = 0) -> LayerFigures:
        """The same with bytes that are kept besides from forward to backward, and others that each pass works with."""
        if never(lasting):
            return self
        sizes = (
            self.kept + lasting,
            self.working + lasting + working,
            self.forward_working + lasting + forward_working,
        )
        return LayerFigures(self.forward, self.backward, *sizes)

    def times(self, factor: float) -> LayerFigures:
        """The same with all seconds times a factor."""
        if factor == 1.0:
            return self
        return LayerFigures(
            factor * self.forward, factor * self.backward, self.kept, self.working, self.forward_working
        )

    def again(self, plain: Real) -> Real:
        """Seconds of backward that are computing again, from those of a backward that does not."""
        return least(largest(self.backward - plain, 0.0), self.backward)

    def no_quicker_than(self, plain: Real) -> LayerFigures:
        """The same with a backward that takes no less than one that computes nothing again: noise may measure less."""
        backward = largest(self.backward, plain)
        return LayerFigures(self.forward, backward, self.kept, self.working, self.forward_working)


def index_points(points: tuple[LayerPoint, ...]) -> dict[PointKey, tuple[LayerPoint, ...]]:
    """Points by what was run, ascending in samples; of equal ones the last counts."""
    groups: dict[PointKey, dict[float, LayerPoint]] = {}
    for point in points:
        groups.setdefault(key_of(point.kind, point), {})[point.samples] = point
    return {key: tuple(group[samples] for samples in sorted(group)) for key, group in groups.items()}


def key_of(kind: str, strategy: Strategy | LayerPoint) -> PointKey:
    """What a device runs for a kind of layer."""
    return (kind, *_values_of(strategy))


def points_of(points: Points, key: PointKey) -> Sequence[LayerPoint] | None:
    """The points of a key, or those that stand in for them (``Dimension.stands_in``); None where there are none."""
    return points.get(key) or points.get((*key[: len(key) - len(_STANDING_IN)], *_STANDING_IN))


def slices_of(key: PointKey) -> int:
    """Devices that work on the same samples."""
    return prod(value for name, value in zip(RUN, key[1:], strict=True) if name in _SLICES)


def figures_at(points: Sequence[LayerPoint], samples: float) -> LayerFigures:
    """Figures at a number of samples: a straight line through the two nearest points, in proportion where there is one.

    Outside the points the line goes on; it never falls below zero nor, left of the points, below proportion.
    """
    return _mix(*_around(points, samples))


def _around(points: Sequence[LayerPoint], samples: float) -> tuple[LayerPoint, LayerPoint, float, float]:
    """The two nearest points, the place between them, and the share of the first where samples are fewer."""
    if len(points) == 1:
        return points[0], points[0], 0.0, samples / points[0].samples
    place = bisect_left(points, samples, key=attrgetter("samples"))
    right = min(max(place, 1), len(points) - 1)
    low, high = points[right - 1], points[right]
    weight = (samples - low.samples) / (high.samples - low.samples)
    return low, high, weight, samples / points[0].samples if place == 0 else 1.0


FIGURES = ("forward", "backward", "kept", "working", "forward_working")
_ALL = attrgetter("samples", *FIGURES)


def _mix(low: LayerPoint, high: LayerPoint, weight: float, share: float) -> LayerFigures:
    ends = [(getattr(low, name), getattr(high, name)) for name in FIGURES]
    return _figures([_between(*pair, weight, share, low is high) for pair in ends])


def _between(low: Real, high: Real, weight: Real, share: Real, alone: Flag) -> Real:
    """A figure on the line through two points; see ``figures_at``."""
    proportional = where((share < 1) | alone, low * share, 0.0)
    line = where(alone, 0.0, low + weight * (high - low))
    return largest(line, proportional, 0.0)


def _figures(values: Sequence[Real]) -> LayerFigures:
    forward, backward, *sizes = values
    return LayerFigures(forward, backward, *(up(size - 1e-6) for size in sizes))


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """The points of one kind of layer as arrays: R things that were run, each at up to P numbers of samples."""

    codes: IntArray  # (R,) what was run, ascending; see ``code_of``
    samples: FloatArray  # (R, P) ascending; infinite beyond a row's last
    counts: IntArray  # (R,) points of each row
    values: FloatArray  # (F, R, P) figures in the order of ``FIGURES``

    @staticmethod
    def of(kind: str, points: Points) -> Curves:
        """The curves of a kind of layer."""
        coded = sorted((int(code_of(rows[0])), rows) for key, rows in points.items() if key[0] == kind)
        return Curves.stacked([code for code, _ in coded], [rows for _, rows in coded])

    @staticmethod
    def stacked(codes: Sequence[int], rows: Sequence[Sequence[LayerPoint]]) -> Curves:
        """Points of several things that were run; their codes ascend."""
        counts = np.array([len(row) for row in rows], dtype=np.int64)
        filled = np.arange(max(counts, default=1)) < counts[:, None]
        figures = np.array([_ALL(point) for row in rows for point in row]).reshape(-1, 1 + len(FIGURES))
        samples, values = np.full(filled.shape, np.inf), np.zeros((len(FIGURES), *filled.shape))
        samples[filled], values[:, filled] = figures[:, 0], figures[:, 1:].T
        return Curves(np.array(codes, dtype=np.int64), samples, counts, values)

    def seconds(self, samples: float) -> tuple[FloatArray, FloatArray]:
        """Seconds of forward and of backward of all that was run, (R,) each, with so many samples (``figures_at``)."""
        (forward, backward), _ = self._values(self.codes, np.full(len(self.codes), samples), FIGURES[:2])
        return forward, backward

    def at(self, codes: IntArray, samples: FloatArray) -> tuple[LayerFigures, BoolArray]:
        """``figures_at`` for n things that were run, and which of them were (``points_of``); others have any figures.

        Args:
            codes: (n,) what was run.
            samples: (n,) samples of each.
        """
        values, valid = self._values(codes, samples, FIGURES)
        return _figures(values), valid

    def backward(self, codes: IntArray, samples: FloatArray) -> tuple[FloatArray, BoolArray]:
        """The seconds of backward alone; as ``at``."""
        (seconds,), valid = self._values(codes, samples, ("backward",))
        return seconds, valid

    def _values(
        self, codes: IntArray, samples: FloatArray, wanted: Sequence[str]
    ) -> tuple[list[FloatArray], BoolArray]:
        row, valid = self._rows(codes)
        points = self.samples[row]
        place = (points < samples[:, None]).sum(axis=1)
        alone = self.counts[row] == 1
        right = np.where(alone, 0, np.minimum(np.maximum(place, 1), self.counts[row] - 1))
        left = np.maximum(right - 1, 0)
        every = np.arange(len(row))
        low, high, first = points[every, left], points[every, right], points[:, 0]
        weight = (samples - low) / np.where(alone, 1.0, high - low)
        share = np.where((place == 0) | alone, samples / first, 1.0)
        places = np.array([FIGURES.index(name) for name in wanted])[:, None]
        ends = zip(self.values[places, row, left], self.values[places, row, right], strict=True)
        return [_between(*pair, weight, share, alone) for pair in ends], valid

    def _rows(self, codes: IntArray) -> tuple[IntArray, BoolArray]:
        """The row of each code, else of the one that stands in for it, and whether there is either."""
        row = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        present = self.codes[row] == codes
        if present.all():
            return row, present
        plain = codes - codes % _MOST ** len(_STANDING_IN) + code_of(_PLAIN) % _MOST ** len(_STANDING_IN)
        other = np.minimum(np.searchsorted(self.codes, plain), len(self.codes) - 1)
        return np.where(present, row, other), present | (self.codes[other] == plain)


def code_of(strategy: Either | LayerPoint, **instead: Enum) -> Whole:
    """A number for what a device runs, or for what it runs with other choices ``instead``."""
    code: Whole = 0
    for name in RUN:
        value, plain = instead.get(name, getattr(strategy, name)), getattr(_PLAIN, name)
        options = tuple(type(plain)) if isinstance(plain, Enum) else ()
        place = options.index(value) if isinstance(value, Enum) else value
        code = code * (len(options) or (2 if isinstance(plain, bool) else _MOST)) + place
    return code


_CAST = frozenset({OperatorClass.MATMUL, OperatorClass.CONVOLUTION})
"""Operators whose weights autocast casts; tables of embeddings are looked up as they are."""


def copied_bytes(profile: Profile, kind: LayerKind, work: LayerWork, strategy: Either) -> tuple[Whole, Whole, Whole]:
    """Bytes of a layer's copies on one device: those held through a step, those among them that get no gradient, and
    those that a pass makes for itself. Parameters in the precision of compute (ZeRO-1's) need none.

    Args:
        profile: says of how many bytes an item of a copy is (``Profile.copied_bytes``); 0: there are none.
        kind: of the layer.
        work: what the device does for it.
        strategy: of the layer, or of many.
    """
    if not profile.copied_bytes:
        return 0, 0, 0
    wrapped = strategy.parameter_shards > 1
    left, share = work.parameters - sharded_items(work, strategy), _frozen_share(kind)
    cast = _items(profile, kind, work, strategy)
    beside = cast * share + work.parameters - work.frozen_items - work.narrow_items
    items = where(wrapped, left, where(strategy.keeps_masters, beside, cast))
    frozen = where(wrapped, left, cast) * share
    held, copies = is_option(work.recompute, Recompute.NONE), up(items * profile.copied_bytes)
    return where(held, copies, 0), where(held, up(frozen * profile.copied_bytes), 0), where(held, 0, copies)


def _frozen_share(kind: LayerKind) -> float:
    """Share of a layer's copies of weights that get no gradient."""
    cast = [operator for operator in kind.operators if operator.kind in _CAST]
    total = sum(operator.weight_bytes for operator in cast)
    return sum(operator.weight_bytes for operator in cast if operator.frozen) / total if total else 0.0


def new_gradient_bytes(
    profile: Profile, kind: LayerKind, work: LayerWork, strategy: Either
) -> tuple[Whole, Whole, Whole]:
    """Bytes of the largest gradient of one weight of a layer on one device: in the buffer it is added to; of its own,
    in the precision of its parameters; and with the one in that of compute which it is cast from, as tables that are
    looked up, and parameters in that precision, have none. Where nothing is cast only the first counts.

    Args as ``copied_bytes``.
    """
    if profile.unbuffered or (profile.stack and not profile.copied_bytes):
        return 0, 0, 0
    item, total = activation_bytes(profile.graph.precision), kind.trainable
    wide, narrow = ITEM_BYTES[profile.parameter_precision], strategy.keeps_masters
    trained = [operator for operator in kind.operators if operator.weight_bytes and not operator.frozen]
    read = max([operator.weight_bytes / operator.count / item for operator in trained], default=0.0)
    looked_up = total - sum(operator.weight_bytes for operator in trained) / item
    wrapped = strategy.parameter_shards > 1

    def on_device(most: float) -> Real:
        if most <= 0:  # a layer without weights
            return 0.0
        return where(
            wrapped, 0.0, work.gradient_items * (most / total) if most <= total else most / strategy.weight_slices
        )

    table, weight = on_device(looked_up), on_device(read)
    most = largest(table, weight)
    if not profile.copied_bytes:
        return up(most * wide), 0, 0
    copied, cast = most * profile.copied_bytes, largest(table * wide, weight * (wide + profile.copied_bytes))
    return up(most * wide), up(where(narrow, copied, most * wide)), up(where(narrow, copied, cast))


def _items(profile: Profile, kind: LayerKind, work: LayerWork, strategy: Either) -> Whole:
    """Items of weights that are cast; those that another layer owns are shared over the tensor group alone. Where more
    are read than there are, calls of one module read the same ones (those of a recurrence)."""
    item, total = activation_bytes(profile.graph.precision), kind.parameters.total
    read = [operator for operator in kind.operators if operator.kind in _CAST]
    cast = sum(operator.weight_bytes for operator in read) / item
    if 0 < cast <= total:
        return cast * (work.parameters / total)
    return sum(operator.weight_bytes / operator.count for operator in read) / item / strategy.weight_slices
