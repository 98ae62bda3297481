"""What repeated questions about one profile have in common: prices and tables, which no budget or batch changes."""

from __future__ import annotations

from dataclasses import dataclass, field

from galvatron_lite.cost.forward_only import for_mode
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.parallelism.backends import Backend, in_mode
from galvatron_lite.plans.schema import Mode
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.shapes import PriceCache
from galvatron_lite.search.space import Space


@dataclass(slots=True)
class Session:
    """Give the same one to ``find_plan`` again and again: answers are the same, only sooner."""

    profile: Profile  # what layers and communication cost
    mode: Mode = Mode.TRAINING  # what plans are for
    pricer: LayerPricer = field(init=False)  # of the profile in that mode
    _known: dict[str, tuple[Space, PriceCache]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pricer = LayerPricer(for_mode(self.profile, self.mode))

    def space(self, backend: Backend) -> tuple[Space, PriceCache]:
        """The strategies that a backend runs, and the figures known of them."""
        if backend.name not in self._known:
            cluster, offered = self.profile.cluster, in_mode(backend, self.mode)
            space = Space(self.profile.graph, cluster.levels[0].size, offered, cluster.device.host_bandwidth > 0)
            self._known[backend.name] = (space, PriceCache())
        return self._known[backend.name]
