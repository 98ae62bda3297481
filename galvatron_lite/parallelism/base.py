"""What a dimension (a way to split a layer) is to the planner. No torch here.

A ``Strategy`` names a choice for every dimension. A ``Dimension`` lists the legal choices for a kind of layer and says
what a choice does to one device's work: fewer samples, sharded states, more communication. ``cost`` turns that work
into seconds and bytes. Neither ``cost`` nor ``search`` knows any dimension by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from galvatron_lite.arrays import Flag, IntArray, Real, Whole, never
from galvatron_lite.cluster.cluster import Collective, Device, RankGroup
from galvatron_lite.files import STRICT
from galvatron_lite.model.graph import LayerKind, Recompute
from galvatron_lite.parallelism.axes import SLICES, MeshAxis, ParameterSpread, Purpose
from galvatron_lite.parallelism.strategy import Strategies, Strategy

if TYPE_CHECKING:
    from pydantic import ConfigDict


class Moment(StrEnum):
    """When a communication happens: in every micro-batch's forward or backward, or once a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class Communication:
    """One communication of one layer on one device; arrays where there is one under each of several strategies."""

    collective: Collective  # its kind
    size: Real  # bytes of the whole (unsharded) tensor: what an all-gather yields and a reduce-scatter takes
    group: RankGroup  # the ranks that take part
    moment: Moment  # when it happens
    overlaps: bool  # whether compute of the same layer or its neighbours can hide it
    count: Whole = 1  # how many times; 0 where a strategy does not need it
    cause: str = ""  # the dimension it comes from, for people
    load: Real = 1.0  # bytes of the rank that exchanges most over ``size``, the mean: all wait for it


def sent(*communications: Communication) -> tuple[Communication, ...]:
    """Those that any strategy needs."""
    return tuple(communication for communication in communications if not never(communication.count))


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What one device does and holds for one layer, one micro-batch at a time; arrays under several strategies."""

    samples: Real  # samples of one micro-batch on this device
    tensor: Whole  # degree that divides the sharded operators
    sequence_parallel: Flag  # whether tokens are shared between sharded operators
    recompute: Recompute | IntArray  # what is computed again in backward
    parameters: Real  # items of parameters this device computes with (after tensor splitting)
    state_items: Real  # items whose optimizer state this device holds and updates
    parameter_items: Real  # items of parameters held at rest
    gradient_items: Real  # items of gradients held at rest, between micro-batches and at the optimizer
    gathered_items: Real = 0.0  # items of parameters gathered for as long as the stage computes (ZeRO-2)
    transient_items: Real = 0.0  # items of parameters gathered only while this one layer computes (ZeRO-3)
    communications: tuple[Communication, ...] = ()  # what it sends and receives
    # items of whole gradients made in this layer's backward and reduced right after it; 0 where gradients go straight
    # into their buffers
    reduce_items: Real = 0.0
    # whether gradients live in buffers all the time, or come into being in the first backward of a step and go after
    # the update
    gradients_persist: Flag = True
    # items of ``gradient_items`` that live so even where the others do not (experts that no other rank has)
    lasting_gradient_items: Real = 0.0
    microbatch_overhead: Real = 0.0  # host seconds once a micro-batch, half in forward, half in backward
    step_overhead: Real = 0.0  # host seconds once a step
    expert_items: Real = 0.0  # the part of ``parameters`` that belongs to experts which are spread over ranks
    host_items: Real = 0.0  # items of ``state_items`` whose optimizer state lies and is updated in host memory
    host_kept: Real = 0.0  # share (0 or 1) of what is kept from forward to backward that waits in host memory
    # bytes of neighbours' pixels, or of whole logits, that are kept from forward to backward, one micro-batch
    edge_bytes: Whole = 0
    edge_working: tuple[Whole, Whole] = (0, 0)  # bytes that backward and forward work with beside them
    frozen_items: Real = 0.0  # the part of ``parameters`` that gets no gradient
    frozen_experts: Real = 0.0  # the part of ``expert_items`` that gets none
    # the part of ``parameter_items`` in the precision of compute, and items of their masters on this device (ZeRO-1)
    narrow_items: Real = 0.0
    master_items: Real = 0.0

    def sliced(self, items: Real, frozen: Real) -> LayerWork:
        """The same with a slice of so many items of the parameters, some of them frozen."""
        trained = items - frozen
        return replace(
            self, parameters=items, parameter_items=items, state_items=trained, gradient_items=trained,
            frozen_items=frozen,
        )  # fmt: skip

    def sending(self, *communications: Communication) -> LayerWork:
        """The same with more communications, as far as any strategy needs them."""
        return replace(self, communications=(*self.communications, *sent(*communications)))


@dataclass(frozen=True, slots=True)
class PictureSplit:
    """What software that splits pictures does beside what is needed (all False: our own runtime)."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    # filters: the output of every convolution is gathered at once, and in backward its gradient is reduced and
    # scattered; channels: every output is all-reduced, and in backward the gradient of every input is gathered. All
    # else works on whole pictures, on every device
    gathers_each: bool = False
    own_statistics: bool = False  # batch normalisation takes the statistics of each device's own pixels
    # of a group that shares channels each device sums gradients of, and updates, whole weights
    whole_weights: bool = False
    # samples a second that a process reads where the first of a group reads for all of it; 0: reading is not counted
    read_rate: float = 0.0


SPARING = PictureSplit()
"""Nothing beside what is needed."""


@dataclass(frozen=True, slots=True)
class DimensionContext:
    """What a dimension may look at besides the layer."""

    devices: Whole  # devices of the stage
    node_devices: int  # devices of one node (the innermost level)
    activation_item_bytes: int  # bytes of one activation item
    gather_item_bytes: int  # bytes of one item where parameters are gathered for their use
    parameter_item_bytes: int  # bytes of one item of parameters at rest
    reduce_item_bytes: int  # bytes of one item where gradients are reduced
    microbatches: int  # micro-batches a step
    # fixed host seconds by the dimension's name (see ``HostOverhead``)
    host: Mapping[str, float] = field(default_factory=dict)
    accumulates: bool = False  # see ``Profile``
    # whether ZeRO-1 keeps parameters in the precision in which they are gathered, beside masters of the shares
    masters: bool = False
    shard_share: float = 0.0  # share of a layer's states by which each shard is larger than an even one
    pictures: PictureSplit = SPARING  # how pictures are split


Chosen = Mapping[str, Any]
"""Fields of ``Strategy`` and what is chosen for them; those not yet chosen have their defaults."""


def sliced(chosen: Chosen) -> int:
    """Devices that hold slices of the same parameters, as tensor and channel parallelism make them."""
    return int(chosen["tensor"] * chosen["filters"] * chosen["channels"])


def shared(chosen: Chosen) -> int:
    """Devices that share the tokens or pixels of each sample."""
    return int(chosen["context"] * chosen["depth"] * chosen["height"] * chosen["width"])


@dataclass(frozen=True, slots=True)
class AvailableDevices:
    """Where a strategy is to run, and how far sense goes beyond legality."""

    devices: int  # of the stage
    node: int | None = None  # devices of a node; None: every legal choice counts as sensible
    tokens: int = 1  # the fewest tokens of a sample that are worth a device of its own

    def near(self, size: int) -> bool:
        """Whether a group of so many neighbours always lies within one node."""
        return self.node is None or (size <= self.node and (self.node % size == 0 or self.devices <= self.node))


@dataclass(frozen=True, slots=True)
class StrategyField:
    """A field of ``Strategy`` as people pin it."""

    field: str
    name: str  # as the project calls it
    aliases: tuple[str, ...] = ()  # what else it is called
    means: str = ""  # for people
    words: Mapping[str, object] | None = None  # values by word; None: whole numbers
    least: int = 1  # of whole numbers
    most: int | None = None
    splits: bool = False  # whether its value multiplies into the devices of a stage
    remedy: str = ""  # what to give instead of another word, or of a number above ``most``


SWITCH: Mapping[str, object] = {
    "on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False,
}  # fmt: skip
"""Words of a field that is on or off."""


def degree_in(word: str, name: str) -> int | None:
    """The degree of a word such as ``tensor4``; None where it is another word."""
    number = word.removeprefix(name)
    return int(number) if number != word and re.fullmatch(r"[1-9]\d*", number, re.ASCII) else None


@dataclass(frozen=True, slots=True)
class Dimension:
    """A way to split a layer: one folder under ``parallelism``, whose ``cost.py`` has a subclass of this."""

    name: str = ""  # what people and error messages call it; the key of its host time in ``HostOverhead``
    degree: str = ""  # the field of ``Strategy`` that multiplies into its devices; empty where none does
    means: str = ""  # what its degree is, for people
    aliases: tuple[str, ...] = ()  # what else people call it
    software: tuple[str, ...] = ()  # other training software that has it, by the names of backends

    axes: ClassVar[tuple[MeshAxis, ...]] = ()  # of the mesh of a stage's ranks, whose sizes are its degrees
    # fields on which it depends what one device runs of a layer: a profile has figures for their values; and whether
    # those of a layer that it does not split stand in for figures that a profile lacks
    runs: ClassVar[tuple[str, ...]] = ()
    stands_in: ClassVar[bool] = False
    # of the messages that it sends in a step, and whether they are all-reduces or all others; None: either
    purposes: ClassVar[tuple[Purpose, ...]] = ()
    sums: ClassVar[bool | None] = None
    causes: ClassVar[tuple[str, ...]] = ()  # what its communications are called besides its name
    fields: ClassVar[tuple[StrategyField, ...]] = ()  # how its fields are pinned
    # what ``--forbid`` takes, and the parts that it leaves out; parts, and the fields of ``Strategy`` that each sets
    forbids: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    examples: ClassVar[str] = ""  # words of strategies

    def word(self, strategy: Strategy) -> str:
        """What a strategy's short name says of it; empty where it is not used."""
        degree = getattr(strategy, self.degree)
        return f"{self.degree}{degree}" if degree > 1 else ""

    def in_words(self, strategy: Strategy) -> str:
        """The same in a report."""
        return f"{self.means or self.name}: {getattr(strategy, self.degree)}" if self.word(strategy) else ""

    def read(self, word: str) -> dict[str, object] | None:
        """The fields that a word of a short name sets: the inverse of ``word``; None for words that say nothing."""
        degree = degree_in(word, self.degree)
        return None if degree is None else {self.degree: degree}

    def layout(self, strategy: Strategy) -> dict[str, int]:
        """How many ways it splits what goes between layers, by the field of ``Layout``; else its ranks hold copies."""
        return {axis.part: getattr(strategy, axis.degree) for axis in self.axes if axis.part not in SLICES}

    def features(self, strategy: Strategy) -> set[str]:
        """What a strategy uses of it, whatever the degrees, for people."""
        return {axis.degree for axis in self.axes if getattr(strategy, axis.degree) > 1}

    def shrunk(self, smaller: Strategy, strategy: Strategy) -> Sequence[dict[str, object]]:  # noqa: ARG002
        """What its other fields may be where the degrees of a strategy become those of a smaller one, which is to use
        nothing that the strategy does not."""
        return [{}]

    def sends(self, purpose: str, *, sums: bool) -> bool:
        """Whether it sends messages for a purpose in a step: all-reduces (``sums``), or others."""
        return purpose in self.purposes and self.sums in (None, sums)

    def spread(self, strategy: Strategy) -> ParameterSpread | None:  # noqa: ARG002
        """Where parameters lie that it takes from ranks which share all others; None where it takes none."""
        return None

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:
        """Legal settings of this dimension's fields of ``Strategy`` for a kind of layer on up to so many devices."""
        raise NotImplementedError

    def allows(self, kind: LayerKind, chosen: Chosen, room: AvailableDevices) -> bool:  # noqa: ARG002
        """Whether one of ``choices`` may stand beside what the dimensions before it (``registry.CHOSEN``) chose: it is
        legal and, where ``room`` knows the nodes, in the declared space."""
        return True

    def reason(self, kind: LayerKind) -> str:  # noqa: ARG002
        """Why this dimension is limited or not offered for a kind of layer; empty where nothing is to be said."""
        return ""

    def refusal(self, kind: LayerKind, degree: int) -> str:  # noqa: ARG002
        """Why a layer cannot be split so many ways; empty where it can, or where ``reason`` says all there is."""
        return ""

    def runs_on(self, device: Device, kind: LayerKind, strategy: Strategy | Strategies) -> Flag:  # noqa: ARG002
        """Whether devices of a type can run a layer as one strategy, or each of many, says."""
        return True

    def apply(
        self, work: LayerWork, kind: LayerKind, strategy: Strategy | Strategies, context: DimensionContext
    ) -> LayerWork:
        """What the strategy's choice in this dimension makes of one device's work.

        Of one strategy or of many at once (then figures are arrays): no ``if`` on a field, but ``arrays.where``.
        """
        raise NotImplementedError
