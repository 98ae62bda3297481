"""A dimension of its own: pods of devices split the samples once more, outside of all other dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.axes import MeshAxis, Part
from galvatron_lite.parallelism.base import Dimension, DimensionContext, LayerWork
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.ranks import Either


@dataclass(frozen=True, slots=True)
class PodDimension(Dimension):
    """Pods that each take a share of the samples and hold the same states."""

    name: str = "pods"
    degree: str = "pods"
    means: str = "pods of devices, each with its own samples"
    aliases: tuple[str, ...] = ("islands",)

    axes = (MeshAxis("pods", Part.SAMPLES, replicates=True),)

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:
        """Every divisor of the devices."""
        return [{"pods": degree} for degree in divisors(devices)]

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:
        """Fewer samples; gradients are summed with those of data-parallel ranks."""
        return replace(work, samples=work.samples / getattr(strategy, self.name))


PODS = PodDimension()
