"""A first lower bound on a shape of plan, from compute alone: cheap enough for every shape, before anything is priced.

Of every kind of layer the least seconds of compute that the profile holds for any tensor degree and choice of
recomputation, with the samples shared out over all other devices. Communication, host work and memory are left out.
With r and c of ``relax``, and p stages,

    T >= sum_l r_l + (m - 1) max(max_l c_l, sum_l c_l / p)

because the slowest stage has at least its share, and at least the slowest layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from math import inf

from galvatron_lite.cost.points import PointKey, index_points, seconds_at, slices_of
from galvatron_lite.cost.schedule import form_of
from galvatron_lite.cost.stage import Shape, weight_seconds
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.profiler.schema import LayerPoint, Profile
from galvatron_lite.search.figures import TICKS

_ROUNDING = 1e-6


@dataclass(slots=True)
class Glance:
    """Least compute of kinds of layers; answers are remembered.

    Attributes:
        profile: what was measured or estimated; of devices of several types, the quickest counts for each kind.
    """

    profile: Profile
    _points: dict[str, dict[int, list[tuple[LayerPoint, ...]]]] = field(init=False)
    _known: dict[tuple[str, int, float], tuple[tuple[float, float], ...]] = field(default_factory=dict)
    _least: dict[tuple[str, int, int, float], tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Indexes the profile."""
        self._points = {}
        types = [own.layers for own in self.profile.types] or [self.profile.layers]
        for points in (index_points(layers) for layers in types):
            for key, own in points.items():
                self._add(key, own)

    def _add(self, key: PointKey, points: tuple[LayerPoint, ...]) -> None:
        self._points.setdefault(key[0], {}).setdefault(slices_of(key), []).append(points)

    def least(self, kind: str, devices: int, microbatch: int, freed: float) -> tuple[float, float]:
        """Seconds of a layer, at the least: of a micro-batch (c), and what it delays the step by (r)."""
        key = (kind, devices, microbatch, freed)
        if key not in self._least:
            self._least[key] = self._found(kind, devices, microbatch, freed)
        return self._least[key]

    def _found(self, kind: str, devices: int, microbatch: int, freed: float) -> tuple[float, float]:
        found = [
            pair
            for degree in self._points.get(kind, {})
            if devices % degree == 0
            for pair in self._at(kind, degree, microbatch * degree / devices)
        ]
        both = min((both for both, _ in found), default=inf)
        return both, min((both - freed * weight for both, weight in found), default=inf)

    def _at(self, kind: str, degree: int, samples: float) -> tuple[tuple[float, float], ...]:
        """Seconds of a micro-batch, and of the gradients of weights in it, of every choice with so many samples."""
        key = (kind, degree, samples)
        if key not in self._known:
            every = [seconds_at(points, samples) for points in self._points[kind][degree]]
            self._known[key] = tuple((sum(passes), weight_seconds(*passes)) for passes in every)
        return self._known[key]

    def bound(self, graph: ModelGraph, shape: Shape) -> float:
        """Picoseconds that no plan of a shape is below; see the module."""
        form = form_of(shape.schedule, shape.stages, shape.microbatches, shape.virtual)
        counts: dict[str, int] = reduce(_counted, (layer.kind for layer in graph.layers), {})
        own = {kind: self.least(kind, shape.stage_devices, shape.microbatch, form.freed) for kind in counts}
        ramp = sum(count * own[kind][1] for kind, count in counts.items()) * form.share
        work = sum(count * own[kind][0] for kind, count in counts.items())
        slowest = max(work / shape.stages, max(both for both, _ in own.values()))
        return (ramp + (form.microbatches - 1) * slowest) * TICKS * (1 - _ROUNDING)


def _counted(counts: dict[str, int], kind: str) -> dict[str, int]:
    counts[kind] = counts.get(kind, 0) + 1
    return counts
