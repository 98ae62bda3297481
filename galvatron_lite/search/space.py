"""What may be chosen: the strategies of a kind of layer, and what the user pinned.

The declared space, which *proven* refers to. A layer takes all devices of its stage, split by any degrees (divisors,
not only powers of two) that its dimensions offer and its backend runs. What is legal is bounded further by rules of
sense, each of which the dimension states with its reason (``Dimension.allows``):

- Tensor groups lie within a node, so do those of Ulysses times tensor.
- A share of a sample's tokens has at least ``LEAST_TOKENS`` tokens, a ring's four times as many; beside context
  parallelism tensor groups share tokens too.
- ZeRO (stages 1 to 3, over shards times context ranks) goes over all ranks that see other tokens, or hybrid: shards
  and slices fill exactly one node.
- Experts are spread over any divisor, whole or sliced, beside a tensor group with sequence parallelism only.
- Spatial and channel groups of convolutions lie within a node; a layer has one of the two, and neither tensor nor
  context nor expert parallelism nor offload beside it. Every device has a pixel of every picture and all that its
  neighbours' windows need of it; of the grids of as many devices the one with the shortest edges and the one that cuts
  one side only. Channels are shared evenly.
- Optimizer states go to the host where no copy of them is left on the stage, activations where no tensor group holds
  them twice. Host memory is not bounded.

A pinned strategy that the rules leave out, for all layers or for one, is taken as it is, on the device unless offload
is pinned too. Where pins leave a layer nothing else, this holds also for layers that have to agree with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import groupby
from typing import Any

from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.cost.stage import tied_groups
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, ModelGraph, Role
from galvatron_lite.parallelism.backends import GALVATRON, Backend
from galvatron_lite.parallelism.base import AvailableDevices, Dimension
from galvatron_lite.parallelism.context.cost import LEAST_TOKENS
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.registry import choosing, parts_of
from galvatron_lite.parallelism.strategy import ADDED, Offload, Strategy, strategy_of
from galvatron_lite.plans.schema import Schedule

LayerPins = tuple[tuple[str, str, object], ...]
"""Names or patterns of layers, attributes of ``Strategy`` and values."""


class _HashedOnce(LayerPins):
    """Pins of layers that cache their hash: there may be hundreds, and every table is looked up by them."""

    def __hash__(self) -> int:
        """The hash of the tuple."""
        if "hash" not in self.__dict__:
            self.__dict__["hash"] = super().__hash__()
        number: int = self.__dict__["hash"]
        return number

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Pickle without the hash, which differs between processes."""
        return _HashedOnce, (tuple(self),)


@dataclass(frozen=True, slots=True)
class Fixed:
    """What is not left to the search."""

    pipeline: int | None = None  # stages; None: searched
    microbatches: int | None = None  # a step; None: searched
    schedule: Schedule | None = None  # of the pipeline, where there is one; None: searched
    virtual: int | None = None  # virtual stages of each group of devices; None: searched
    # attributes of ``Strategy`` (fields, or ``batch_degree``) and the value each must have in every layer
    strategy: tuple[tuple[str, object], ...] = ()
    layers: LayerPins = ()  # the same for some layers
    # names of dimensions (``tensor``, ``pipeline``, ``recompute`` ...) that no layer may use
    forbidden: tuple[str, ...] = ()
    # whether all stages of a pipeline have equally many blocks, or the first and last one fewer where that divides (the
    # smallest budget that an error names is that of any cuts)
    even: bool = False
    piped: bool = False  # whether there must be several stages

    def __post_init__(self) -> None:
        if type(self.layers) is not _HashedOnce:
            object.__setattr__(self, "layers", _HashedOnce(self.layers))

    def allows(self, strategy: Strategy) -> bool:
        """Whether a strategy has the values pinned for every layer and uses nothing forbidden."""
        return self.kept([strategy])[0]

    def kept(self, strategies: Iterable[Strategy]) -> list[bool]:
        """``allows`` of each strategy."""
        pins = self.pinned
        return [all(getattr(strategy, name) == value for name, value in pins) for strategy in strategies]

    @property
    def pinned(self) -> tuple[tuple[str, object], ...]:
        """Attributes of ``Strategy`` and the values that they must have in every layer."""
        unused = Strategy()
        off = ((name, getattr(unused, name)) for dimension in self.forbidden for name in fields_of(dimension))
        return (*off, *self.strategy)

    def at_layer(self, layer: str) -> Fixed:
        """What is pinned and forbidden for one layer, as pins of all layers."""
        return _of_layer(self.strategy, self.forbidden, self.pins_of(layer))

    def with_pins(self, pins: Iterable[tuple[str, object]]) -> Fixed:
        """Add values that every layer must have."""
        return replace(self, strategy=tuple(dict.fromkeys((*self.strategy, *pins))))

    def allows_in(self, layer: str, strategy: Strategy) -> bool:
        """Whether a strategy has the values pinned for one layer besides those for every layer."""
        return all(getattr(strategy, name) == value for name, value in self.pins_of(layer))

    def pins_of(self, layer: str) -> tuple[tuple[str, object], ...]:
        """Fields and values pinned for one layer besides those for every layer."""
        return _matching(self.layers, layer) if self.layers else ()


@lru_cache(maxsize=65536)
def _matching(layers: LayerPins, layer: str) -> tuple[tuple[str, object], ...]:
    return tuple((name, value) for names, name, value in layers if fnmatchcase(layer, names))


@lru_cache(maxsize=4096)
def _of_layer(
    strategy: tuple[tuple[str, object], ...], forbidden: tuple[str, ...], more: tuple[tuple[str, object], ...]
) -> Fixed:
    return Fixed(strategy=strategy, forbidden=forbidden).with_pins(more)


def fields_of(dimension: str) -> tuple[str, ...]:
    """The fields of ``Strategy`` that a dimension sets."""
    return parts_of().get(dimension, ())


UNPINNED = Fixed()
"""Everything is left to the search."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Which rules of delayed gradients the user allows."""

    rule: CyclicRule | None = None  # None: any
    setting: CyclicSetting | None = None  # None: any
    only: bool = False  # whether plans without delay are excluded


@dataclass(frozen=True, slots=True)
class Space:
    """The strategies of a model's layers on a cluster; results are cached."""

    graph: ModelGraph  # the model
    node_devices: int  # devices in a node
    backend: Backend = GALVATRON  # what is to run them
    offload: bool = False  # whether devices can reach host memory at a known speed
    tokens: int = LEAST_TOKENS  # the fewest tokens of a sample that are worth a device of their own
    _offered: dict[tuple[str, int, Fixed], tuple[Strategy, ...]] = field(default_factory=dict)
    # by the id of strategies and by pins: those strategies, so that no other object takes their id, and what pins leave
    _left: dict[tuple[int, Fixed], tuple[object, tuple[Strategy, ...]]] = field(default_factory=dict)
    # equal tuples of strategies are one object, so that kinds of layers share what is cached of them
    _same: dict[tuple[Strategy, ...], tuple[Strategy, ...]] = field(default_factory=dict)
    # kinds of layers that have a strategy or a layout in common with others: by shared parameters, around the blocks
    _bound: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        layers = self.graph.layers
        tied = {layers[place].kind for group in tied_groups(self.graph) for place in group}
        around = {layer.kind for layer in layers if layer.role is not Role.BLOCK}
        object.__setattr__(self, "_bound", frozenset(tied | around))

    def strategies(self, kind: str, devices: int, fixed: Fixed) -> tuple[Strategy, ...]:
        """What a kind of layer (key into the graph's kinds) may do on a stage of so many devices."""
        key = (kind, devices, fixed)
        if key not in self._offered:
            left = self._sensible(kind, devices, fixed)
            if not left or self._lifts_rules(kind, devices, fixed):
                left = tuple(dict.fromkeys((*left, *self._legal(kind, devices, fixed))))
            self._offered[key] = self._same.setdefault(left, left)
        return self._offered[key]

    def _lifts_rules(self, kind: str, devices: int, fixed: Fixed) -> bool:
        """Whether the rules leave nothing to another layer with these pins, with which this one has to agree."""
        return (
            fixed != UNPINNED
            and kind in self._bound
            and any(
                not self._sensible(other, devices, fixed) and self._legal(other, devices, fixed)
                for other in self._bound - {kind}
            )
        )

    def offers(self, kind: str, devices: int, fixed: Fixed) -> bool:
        """Whether the rules leave a kind of layer a strategy with these pins."""
        unpinned = self._offered.get((kind, devices, UNPINNED), ())
        return bool(self._kept(unpinned, fixed) or self._sensible(kind, devices, fixed))

    def _sensible(self, kind: str, devices: int, fixed: Fixed) -> tuple[Strategy, ...]:
        """The strategies that all rules of the declared space leave."""
        strategies = strategies_for(
            self.graph.kinds[kind], devices, self.node_devices, tokens=self.tokens, narrowed=self._narrowed(fixed)
        )
        return self._kept(strategies, fixed)

    def _legal(self, kind: str, devices: int, fixed: Fixed) -> tuple[Strategy, ...]:
        """The strategies that can be run, on the device unless offload is pinned."""
        narrowed = Narrowed({"offload": (Offload.NONE,), **self._narrowed(fixed).values})
        return self._kept(strategies_for(self.graph.kinds[kind], devices, narrowed=narrowed), fixed)

    def _kept(self, strategies: tuple[Strategy, ...], fixed: Fixed) -> tuple[Strategy, ...]:
        """What pins and the backend leave of some strategies."""
        key = (id(strategies), fixed)
        if key not in self._left:
            pairs = zip(strategies, fixed.kept(strategies), strict=True)
            left = tuple(strategy for strategy, kept in pairs if kept and self.backend.combines(strategy))
            self._left[key] = (strategies, self._same.setdefault(left, left))
        return self._left[key][1]

    def _narrowed(self, fixed: Fixed) -> Narrowed:
        """What backend, cluster and pins leave of the values of each field."""
        values = dict(self.backend.limits)
        if not self.offload:
            values["offload"] = (Offload.NONE,)
        pinned = {name for name, _ in fixed.pinned}
        for name, kept in self.backend.reserved.items():
            if name not in pinned:
                values[name] = (kept,)
        for name, value in fixed.pinned:
            values[name] = tuple(other for other in values.get(name, (value,)) if other == value)
        return Narrowed(values)


def microbatch_counts(global_batch: int, fixed: Fixed) -> tuple[int, ...]:
    """The micro-batch counts to try.

    Raises:
        InputError: the pinned count does not divide the batch; names the nearest that do.
    """
    counts = divisors(global_batch)
    if fixed.microbatches is None:
        return counts
    if fixed.microbatches not in counts:
        near = nearest(counts, fixed.microbatches)
        raise InputError("microbatches", fixed.microbatches, f"Give a divisor of the batch: {near}.")
    return (fixed.microbatches,)


def nearest(numbers: Iterable[int], wanted: int) -> str:
    """The two numbers nearest to the one that is wanted, for an error message."""
    return " or ".join(map(str, sorted(sorted(numbers, key=lambda number: abs(number - wanted))[:2])))


def pipeline_degrees(devices: int, layers: int, fixed: Fixed, cluster: Cluster | None = None) -> tuple[int, ...]:
    """The pipeline degrees to try: divisors of the devices, no more than there are layers.

    Args:
        devices: world size.
        layers: of the model.
        fixed: may pin the degree.
        cluster: with one, the devices of a stage are all of one type, but for the one stage of no pipeline.

    Raises:
        InputError: the pinned degree is none of them.
    """
    degrees = tuple(
        degree
        for degree in divisors(devices)
        if degree <= layers and (degree == 1 or cluster is None or cluster.of_one_type(devices // degree, devices))
    )
    if fixed.piped:
        degrees = degrees[1:] if fixed.pipeline != 1 else ()
        if not degrees:
            return ()
    if "pipeline" in fixed.forbidden:
        return (1,)
    if fixed.pipeline is None:
        return degrees
    if fixed.pipeline not in degrees:
        raise InputError("pipeline", fixed.pipeline, f"Give one of {', '.join(map(str, degrees))}.")
    return (fixed.pipeline,)


def reasons(graph: ModelGraph) -> tuple[str, ...]:
    """Why dimensions are limited or not offered for some layers of a model, a line for all layers with one reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name in {layer.kind: None for layer in graph.layers}:
        for dimension in choosing():
            reason_text = dimension.reason(graph.kinds[name])
            if reason_text:
                key = dimension.name, reason_text.removeprefix(f"{dimension.name}: {graph.kinds[name].name}")
                by_reason.setdefault(key, []).append(name)
    return tuple(
        f"{dimension}: {where}{why}" for (dimension, why), kinds in by_reason.items() for where in _named(graph, kinds)
    )


def _named(graph: ModelGraph, kinds: Collection[str]) -> list[str]:
    """The layers of some kinds: by name, or one text with runs of neighbours where blocks are among them."""
    members = [layer for layer in graph.layers if layer.kind in kinds]
    if not any(layer.role is Role.BLOCK for layer in members):
        return list(dict.fromkeys(layer.name for layer in members))
    groups = groupby(graph.layers, lambda layer: layer.kind in kinds)
    runs = [[layer.name for layer in run] for inside, run in groups if inside]
    return [", ".join(f"{run[0]} … {run[-1]}" if len(run) > 1 else run[0] for run in runs)]


Option = Mapping[str, object]
"""Fields of ``Strategy`` that a dimension sets, and their values."""
_PLAIN: dict[str, Any] = {item.name: item.default for item in fields(Strategy)}
_LAST = [dimension for dimension in choosing() if dimension.degree][-1]


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Values that fields of ``Strategy`` are limited to."""

    # by field; a field that is absent may have any
    values: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    def keeps(self, option: Option) -> bool:
        """Whether all values of an option are among those that its fields are limited to."""
        return all(name not in self.values or value in self.values[name] for name, value in option.items())


EVERYTHING = Narrowed()


def strategies_for(
    kind: LayerKind,
    devices: int,
    node_devices: int | None = None,
    *,
    tokens: int = 1,
    narrowed: Narrowed = EVERYTHING,
) -> tuple[Strategy, ...]:
    """Every strategy of a kind of layer on a stage, in a fixed order.

    Args:
        kind: of layer.
        devices: of the stage; a strategy takes all of them.
        node_devices: devices in a node, to leave out what is not in the declared space; None: every legal strategy.
        tokens: the fewest tokens of a sample that are worth a device of their own.
        narrowed: the values that fields may have.
    """
    room = AvailableDevices(devices, node_devices, tokens)
    partial: list[tuple[dict[str, Any], int]] = [({**_PLAIN, **dict.fromkeys(ADDED, 1)}, devices)]
    for dimension in choosing():
        options = [option for option in dimension.choices(kind, devices) if narrowed.keeps(option)]
        partial = _widened(partial, options, dimension, kind, room)
    if ADDED:
        return tuple(strategy_of(chosen) for chosen, _ in partial)
    return _with_values(tuple(tuple(chosen.values()) for chosen, _ in partial))


@lru_cache(maxsize=4096)
def _with_values(rows: tuple[tuple[Any, ...], ...]) -> tuple[Strategy, ...]:
    """Strategies from rows of values, in the order of ``_PLAIN``; equal rows return one tuple."""
    return tuple(Strategy(*values) for values in rows)


def _widened(
    partial: list[tuple[dict[str, Any], int]],
    options: Sequence[Option],
    dimension: Dimension,
    kind: LayerKind,
    room: AvailableDevices,
) -> list[tuple[dict[str, Any], int]]:
    """Combine partial strategies (fields and the devices that are left) with the options of one more dimension."""
    by_degree: dict[int, list[Option]] = {}
    for option in options:
        by_degree.setdefault(int(option[dimension.degree]) if dimension.degree else 1, []).append(option)  # type: ignore[call-overload]
    wider: list[tuple[dict[str, Any], int]] = []
    for chosen, left in partial:
        degrees = [left] if dimension is _LAST else [degree for degree in by_degree if left % degree == 0]
        for degree in degrees:
            for option in by_degree.get(degree, ()):
                both = {**chosen, **option}
                if dimension.allows(kind, both, room):
                    wider.append((both, left // degree))
    return wider
