"""What may be chosen: the strategies of a kind of layer, and what the user pinned.

The declared space. A layer takes all devices of its stage, split by any degrees that its dimensions offer, with two
exceptions that are never worth their time on a cluster of nodes:

- A tensor group stays within a node: its collectives block every layer twice a pass.
- Replicas and shards of states together (hybrid sharding, data > 1 and zero > 1) only where shards and tensor slices
  fill exactly one node. So ZeRO goes over the whole batch group or within a node.

A pinned strategy that the exceptions leave out is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import reduce

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, ModelGraph
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.registry import DIMENSIONS
from galvatron_lite.plans.schema import Schedule


@dataclass(frozen=True, slots=True)
class Fixed:
    """What is not left to the search.

    Attributes:
        pipeline: stages; None: searched.
        microbatches: a step; None: searched.
        schedule: of the pipeline, where there is one; None: searched.
        virtual: virtual stages of each group of devices; None: searched.
        strategy: attributes of ``Strategy`` (fields, or ``batch_degree``) and the value each must have in every layer.
        layers: (name or glob of layers, attribute of ``Strategy``, value): the same for some layers.
        forbidden: names of dimensions (``tensor``, ``pipeline``, ``recompute`` ...) that no layer may use.
    """

    pipeline: int | None = None
    microbatches: int | None = None
    schedule: Schedule | None = None
    virtual: int | None = None
    strategy: tuple[tuple[str, object], ...] = ()
    layers: tuple[tuple[str, str, object], ...] = ()
    forbidden: tuple[str, ...] = ()

    def allows(self, strategy: Strategy) -> bool:
        """Whether a strategy has the values pinned for every layer and uses nothing forbidden."""
        plain = (pair for dimension in self.forbidden for pair in _off(dimension))
        return all(getattr(strategy, name) == value for name, value in (*plain, *self.strategy))

    def allows_in(self, layer: str, strategy: Strategy) -> bool:
        """Whether a strategy also has the values pinned for one layer."""
        return all(getattr(strategy, name) == value for name, value in self.pins_of(layer))

    def pins_of(self, layer: str) -> tuple[tuple[str, object], ...]:
        """Fields and values pinned for one layer besides those for every layer."""
        return tuple((name, value) for names, name, value in self.layers if fnmatchcase(layer, names))


def _off(dimension: str) -> tuple[tuple[str, object], ...]:
    """The fields of ``Strategy`` that a dimension sets, with the values that mean it is not used."""
    if dimension not in STRATEGY_FIELDS:
        return ()
    plain = Strategy()
    return tuple((name, getattr(plain, name)) for name in STRATEGY_FIELDS[dimension])


STRATEGY_FIELDS: dict[str, tuple[str, ...]] = {
    "data": ("data",),
    "zero": ("zero", "zero_stage"),
    "tensor": ("tensor",),
    "sequence": ("sequence_parallel",),
    "context": ("context",),
    "ulysses": ("ulysses",),
    "expert": ("expert",),
    "recompute": ("recompute",),
    "offload": ("offload",),
}
"""What forbidding a dimension means for a strategy."""


def strategies_for(kind: LayerKind, devices: int, node_devices: int | None = None) -> tuple[Strategy, ...]:
    """Every strategy of a kind of layer on a stage, in a fixed order.

    Args:
        kind: of layer.
        devices: of the stage, all of them taken.
        node_devices: devices in a node, to leave out what the module says; None: every legal strategy.
    """

    def widen(partial: list[Strategy], options: Sequence[dict[str, object]]) -> list[Strategy]:
        wider = [replace(strategy, **option) for strategy in partial for option in options]  # type: ignore[arg-type]
        return [strategy for strategy in wider if devices % strategy.devices == 0]

    options = [dimension.choices(kind, devices) for dimension in DIMENSIONS]
    whole = reduce(widen, options, [Strategy()])
    wanted = (strategy for strategy in whole if strategy.devices == devices)
    return tuple(sorted(s for s in wanted if node_devices is None or sensible(s, node_devices)))


def sensible(strategy: Strategy, node_devices: int) -> bool:
    """Whether a strategy is in the declared space on nodes of so many devices; see the module."""
    hybrid = strategy.data > 1 and strategy.zero > 1
    return strategy.tensor <= node_devices and (not hybrid or strategy.zero * strategy.tensor == node_devices)


@dataclass(frozen=True, slots=True)
class Space:
    """The strategies of a model's layers on a cluster; answers are remembered.

    Attributes:
        graph: the model.
        node_devices: devices in a node.
    """

    graph: ModelGraph
    node_devices: int
    _known: dict[tuple[str, int, Fixed], tuple[Strategy, ...]] = field(default_factory=dict)

    def strategies(self, kind: str, devices: int, fixed: Fixed) -> tuple[Strategy, ...]:
        """What a kind of layer (key into the graph's kinds) may do on a stage of so many devices."""
        key = (kind, devices, fixed)
        if key not in self._known:
            known = self.graph.kinds[kind]
            lean = [s for s in strategies_for(known, devices, self.node_devices) if fixed.allows(s)]
            self._known[key] = tuple(lean or [s for s in strategies_for(known, devices) if fixed.allows(s)])
        return self._known[key]


def microbatch_counts(global_batch: int, fixed: Fixed) -> tuple[int, ...]:
    """The micro-batch counts to try.

    Raises:
        InputError: the pinned count does not divide the batch; names the nearest that do.
    """
    counts = divisors(global_batch)
    if fixed.microbatches is None:
        return counts
    if fixed.microbatches not in counts:
        raise InputError("microbatches", fixed.microbatches, f"Give a divisor of the batch: {nearest(counts, fixed)}.")
    return (fixed.microbatches,)


def nearest(counts: Iterable[int], fixed: Fixed) -> str:
    """The two numbers nearest to the pinned micro-batch count, for an error message."""
    wanted = fixed.microbatches or 1
    return " or ".join(str(count) for count in sorted(sorted(counts, key=lambda count: abs(count - wanted))[:2]))


def pipeline_degrees(devices: int, layers: int, fixed: Fixed) -> tuple[int, ...]:
    """The pipeline degrees to try: divisors of the devices, no more than there are layers.

    Raises:
        InputError: the pinned degree is none of them.
    """
    degrees = tuple(degree for degree in divisors(devices) if degree <= layers)
    if "pipeline" in fixed.forbidden:
        return (1,)
    if fixed.pipeline is None:
        return degrees
    if fixed.pipeline not in degrees:
        raise InputError("pipeline", fixed.pipeline, f"Give one of {', '.join(map(str, degrees))}.")
    return (fixed.pipeline,)


def reasons(graph: ModelGraph) -> tuple[str, ...]:
    """What dimensions say about the model's layers: why they are limited or not offered."""
    said = (dimension.reason(kind) for kind in graph.kinds.values() for dimension in DIMENSIONS)
    return tuple(dict.fromkeys(reason for reason in said if reason))
