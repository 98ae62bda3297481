"""A first lower bound on a shape of plan, from compute alone: cheap enough for every shape, before anything is priced.

Of every kind of layer the least seconds of compute that the profile holds for any tensor degree and choice of
recomputation, with the samples shared out over all other devices. Communication, host work and memory are left out.
With r and c of ``relax``, and p stages,

    T >= sum_l r_l + (m - 1) max(max_l c_l, sum_l c_l / p)

because the slowest stage has at least its share, and at least the slowest layer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from galvatron_lite.arrays import FloatArray, IntArray
from galvatron_lite.cost.points import Curves, index_points, slices_of
from galvatron_lite.cost.schedule import form_of
from galvatron_lite.cost.stage import Shape, weight_seconds
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.profiler.schema import LayerPoint, Profile
from galvatron_lite.search.figures import TICKS

_ROUNDING = 1e-6


@dataclass(slots=True)
class Glance:
    """Least compute of kinds of layers; answers are remembered."""

    profile: Profile  # what was measured or estimated; of devices of several types, the quickest counts for each kind
    _numbers: dict[str, int] = field(init=False)
    _groups: dict[int, tuple[IntArray, Curves]] = field(init=False)
    _known: dict[tuple[int, float], tuple[FloatArray, FloatArray]] = field(default_factory=dict)
    _least: dict[tuple[int, int, float], tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Indexes the profile: by devices that work on the same samples, the kinds of layers and what was run."""
        self._numbers = {kind: number for number, kind in enumerate(self.profile.graph.kinds)}
        found: dict[int, list[tuple[int, tuple[LayerPoint, ...]]]] = {}
        types = [own.layers for own in self.profile.types] or [self.profile.layers]
        for key, own in (pair for layers in types for pair in index_points(layers).items()):
            if key[0] in self._numbers:
                found.setdefault(slices_of(key), []).append((self._numbers[key[0]], own))
        self._groups = {
            degree: (np.array([kind for kind, _ in own]), Curves.stacked(range(len(own)), [rows for _, rows in own]))
            for degree, own in found.items()
        }

    def least(self, devices: int, microbatch: int, freed: float) -> tuple[FloatArray, FloatArray]:
        """(kinds,) seconds of each kind of layer, at the least: of a micro-batch (c), and what it delays the step by
        (r)."""
        key = (devices, microbatch, freed)
        if key not in self._least:
            self._least[key] = self._bounds_at(*key)
        return self._least[key]

    def _bounds_at(self, devices: int, microbatch: int, freed: float) -> tuple[FloatArray, FloatArray]:
        both, ramp = np.full(len(self._numbers), np.inf), np.full(len(self._numbers), np.inf)
        for degree, (kinds, _) in self._groups.items():
            if devices % degree == 0:
                seconds, weight = self._at(degree, microbatch * degree / devices)
                np.minimum.at(both, kinds, seconds)
                np.minimum.at(ramp, kinds, seconds - freed * weight)
        return both, ramp

    def _at(self, degree: int, samples: float) -> tuple[FloatArray, FloatArray]:
        """Seconds of a micro-batch, and of the gradients of weights in it, of all that was run on so many devices."""
        key = (degree, samples)
        if key not in self._known:
            forward, backward = self._groups[degree][1].seconds(samples)
            self._known[key] = forward + backward, weight_seconds(forward, backward)
        return self._known[key]

    def bound(self, graph: ModelGraph, shape: Shape) -> float:
        """Picoseconds that no plan of a shape is below; see the module."""
        overlap = self.profile.steps_overlap
        form = form_of(shape.schedule, shape.stages, shape.microbatches, shape.virtual, steps_overlap=overlap)
        counts = Counter(self._numbers[layer.kind] for layer in graph.layers)
        used, times = np.array(list(counts)), np.array(list(counts.values()))
        both, ramp = (own[used] for own in self.least(shape.stage_devices, shape.microbatch, form.freed))
        slowest = max(float(times @ both) / shape.stages, float(both.max()))
        return (float(times @ ramp) * form.share + (form.microbatches - 1) * slowest) * TICKS * (1 - _ROUNDING)
