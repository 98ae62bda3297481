"""A model's costs on a cluster of any number of devices, from data sheets. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.stacks.catalog import GALVATRON
from galvatron_lite.stacks.schema import Stack

WIDEST = 512
"""Devices among which the channels of convolutions are split at most."""
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Samples a device that are estimated."""


@dataclass(slots=True)
class Machine:
    """A model's costs on a cluster of any number of devices; answers are remembered.

    Attributes:
        cluster: name or path.
        profile: of the largest number of devices asked for.
        free: whether flows never share an adapter.
    """

    cluster: str
    profile: Profile
    free: bool = False
    _alone: Machine | None = None
    _pricers: dict[int, LayerPricer] = field(default_factory=dict)

    @property
    def graph(self) -> ModelGraph:
        """The model."""
        return self.profile.graph

    def pricer(self, devices: int) -> LayerPricer:
        """Prices on the first so many devices.

        Raises:
            InputError: a number of devices that the cluster does not have.
        """
        if devices not in self._pricers:
            found = load_cluster(self.cluster, devices)
            self._pricers[devices] = LayerPricer(self.profile.on(_unshared(found) if self.free else found))
        return self._pricers[devices]

    @property
    def alone(self) -> Machine:
        """The same where every device has an adapter of its own: what the real one takes longer is congestion."""
        if self._alone is None:
            self._alone = Machine(self.cluster, self.profile, free=True)
        return self._alone


def _unshared(cluster: Cluster) -> Cluster:
    """As many adapters in a node as it has devices, each as fast as one of the real ones."""
    near, *far = cluster.levels
    wider = []
    for level in far:
        lanes = max(near.size, level.lanes)
        wider.append(replace(level, bandwidth=level.bandwidth / level.lanes * lanes, lanes=lanes, contention=1.0))
    return replace(cluster, levels=(near, *wider))


def machine_of(
    graph: ModelGraph, cluster: str, devices: int, precision: str, batch: int, stack: Stack = GALVATRON
) -> Machine:
    """The costs of a model from data sheets, for up to so many devices.

    Args:
        graph: the model, in ``precision``.
        cluster: name or path.
        devices: the most that are asked about.
        precision: of compute.
        batch: samples of a replica, which are estimated beside ``SAMPLES``.
        stack: the training software.
    """
    return Machine(cluster, profile_on(graph, load_cluster(cluster, devices), precision, batch, stack))


def profile_on(
    graph: ModelGraph,
    cluster: Cluster,
    precision: str,
    batch: int,
    stack: Stack,
    calibration: Calibration | None = None,
) -> Profile:
    """A model's figures from data sheets, with channels shared by up to ``WIDEST`` devices; see ``machine_of``."""
    found = estimate_profile(
        graph,
        _flat(cluster),
        precision=precision,
        name=graph.name,
        samples=sorted({*SAMPLES, batch}),
        optimizer=stack.optimizer,
        stack=stack,
        calibration=calibration,
    )
    return found.on(cluster)


def _flat(cluster: Cluster) -> Cluster:
    """The cluster with wide nodes: slices of convolutions are estimated within a node only, whatever its links."""
    near, *far = cluster.levels
    return replace(cluster, levels=(replace(near, size=max(near.size, WIDEST)), *far))
