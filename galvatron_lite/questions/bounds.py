"""What no plan can beat: the seconds that a model's layers compute, shared by all devices without any loss.

A layer under tensor degree t on x samples takes t devices f(x) + b(x) seconds, so that a sample takes
t (f(x) + b(x)) / x device-seconds. The cost model draws straight lines between the points of a profile
(``cost.points``), so that this quotient is least at a point, or where the greatest number of samples lies. Recompute,
communication, host work, updates and waiting only add to it, and the busiest device is no less busy than the mean.
"""

from __future__ import annotations

from galvatron_lite.cost.points import PointKey, figures_at, index_points, slices_of
from galvatron_lite.profiler.schema import LayerPoint, Profile


def least_seconds(profile: Profile, devices: int, batch: int) -> float:
    """Seconds of a step that no plan for so many devices and samples beats; 0 where the devices are not all alike."""
    return batch * device_seconds(profile, batch) / devices


def device_seconds(profile: Profile, batch: int) -> float:
    """Device-seconds that no plan needs less of for one sample of a batch."""
    if len(profile.cluster.groups) > 1:
        return 0.0
    known = index_points(profile.layers)
    kinds = {kind: _least(kind, known, batch) for kind in {layer.kind for layer in profile.graph.layers}}
    return sum(kinds[layer.kind] for layer in profile.graph.layers)


def _least(kind: str, known: dict[PointKey, tuple[LayerPoint, ...]], batch: int) -> float:
    own = [(slices_of(key), points) for key, points in known.items() if key[0] == kind]
    return min((slices * _quotient(points, batch) for slices, points in own), default=0.0)


def _quotient(points: tuple[LayerPoint, ...], batch: int) -> float:
    """Least seconds a sample on one device that works on at most the whole batch at once."""
    sizes = [batch, *(point.samples for point in points if point.samples < batch)]
    figures = [(figures_at(points, size), size) for size in sizes]
    return float(min((figure.forward + figure.backward) / size for figure, size in figures))
