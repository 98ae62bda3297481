"""The interface of a dimension: a way to split a layer, as the planner sees it. No torch here.

A ``Strategy`` has a choice for every dimension. A ``Dimension`` lists the legal choices for a kind of layer and
computes what a choice does to the work of one device: fewer samples, sharded states, more communication. ``cost`` turns
this ``LayerWork`` into seconds and bytes. Neither ``cost`` nor ``search`` names a dimension.
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
    """When a communication happens: in the forward or backward of each micro-batch, or once a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class Communication:
    """A communication of one layer on one device, under one strategy or (then figures are arrays) under many."""

    collective: Collective
    size: Real  # bytes of the full (unsharded) tensor: the output of an all-gather, the input of a reduce-scatter
    group: RankGroup
    moment: Moment
    overlaps: bool  # whether compute of the same layer or its neighbours can hide it
    count: Whole = 1  # how often; 0 under strategies that do not need it
    cause: str = ""  # name of the dimension that it comes from
    load: Real = 1.0  # bytes of the rank that exchanges most, over ``size`` (the mean): all ranks wait for it


def drop_unused(*communications: Communication) -> tuple[Communication, ...]:
    """Leave out communications that no strategy needs."""
    return tuple(communication for communication in communications if not never(communication.count))


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What one device computes and holds for one layer, a micro-batch at a time; arrays under several strategies."""

    samples: Real  # of one micro-batch on this device
    tensor: Whole  # degree that divides the sharded operators
    sequence_parallel: Flag  # whether tokens are shared between sharded operators
    recompute: Recompute | IntArray
    parameters: Real  # items of parameters that this device computes with (after tensor splitting)
    state_items: Real  # items whose optimizer state this device holds and updates
    parameter_items: Real  # items of parameters held at rest
    gradient_items: Real  # items of gradients held at rest, between micro-batches and at the optimizer
    gathered_items: Real = 0.0  # items of parameters gathered for as long as the stage computes (ZeRO-2)
    transient_items: Real = 0.0  # items of parameters gathered only while this layer computes (ZeRO-3)
    communications: tuple[Communication, ...] = ()
    # items of full gradients that this layer's backward produces and that are reduced right after it; 0 where backward
    # writes into the buffers of gradients
    reduce_items: Real = 0.0
    # whether gradients stay allocated; if not, from the first backward of a step to the update
    gradients_persist: Flag = True
    lasting_gradient_items: Real = 0.0  # that persist even if the others do not (experts without replicas)
    microbatch_overhead: Real = 0.0  # host seconds a micro-batch, half in forward, half in backward
    step_overhead: Real = 0.0  # host seconds a step
    expert_items: Real = 0.0  # the part of ``parameters`` in experts that are spread over ranks
    host_items: Real = 0.0  # the part of ``state_items`` whose optimizer state is kept and updated in host memory
    host_kept: Real = 0.0  # 1 where activations wait in host memory from forward to backward, else 0
    edge_bytes: Whole = 0  # neighbours' pixels, or full logits, saved from forward to backward of a micro-batch
    edge_working: tuple[Whole, Whole] = (0, 0)  # their transient bytes in backward and in forward
    frozen_items: Real = 0.0  # the part of ``parameters`` without gradient
    frozen_experts: Real = 0.0  # the part of ``expert_items`` without gradient
    narrow_items: Real = 0.0  # the part of ``parameter_items`` in the precision of compute (ZeRO-1)
    master_items: Real = 0.0  # items of their float32 masters on this device

    def with_parameters(self, items: Real, frozen: Real) -> LayerWork:
        """Replace the parameters by a slice of them, in items, of which ``frozen`` get no gradient."""
        trained = items - frozen
        return replace(
            self, parameters=items, parameter_items=items, state_items=trained, gradient_items=trained,
            frozen_items=frozen,
        )  # fmt: skip

    def with_communications(self, *communications: Communication) -> LayerWork:
        """Add the communications that any strategy needs."""
        return replace(self, communications=(*self.communications, *drop_unused(*communications)))


@dataclass(frozen=True, slots=True)
class PictureSplit:
    """How other software splits pictures, where it does more than necessary; the defaults are this package's
    runtime."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    # After each convolution all devices have full pictures. Filters: outputs are all-gathered, and their gradients
    # reduce-scattered in backward. Channels: outputs are all-reduced, and gradients of inputs all-gathered in backward
    gathers_each: bool = False
    own_statistics: bool = False  # batch normalisation uses the statistics of local pixels only
    whole_weights: bool = False  # devices that share channels each reduce and update full weights
    # samples a second that the first process of a group reads for the group; 0: reading is not counted
    read_rate: float = 0.0


SPARING = PictureSplit()
"""The pictures of this package's runtime: nothing that is not necessary."""


@dataclass(frozen=True, slots=True)
class DimensionContext:
    """What the work of a device depends on besides layer and strategy."""

    devices: Whole  # of the stage
    node_devices: int  # of one node (the innermost level)
    activation_item_bytes: int
    gather_item_bytes: int  # of parameters, when they are gathered
    parameter_item_bytes: int  # of parameters at rest
    reduce_item_bytes: int  # of gradients, when they are reduced
    microbatches: int  # a step
    host: Mapping[str, float] = field(default_factory=dict)  # host seconds by name of dimension (``HostOverhead``)
    accumulates: bool = False  # see ``Profile``
    masters: bool = False  # whether ZeRO-1 keeps parameters in the gathered precision, beside float32 masters of shards
    shard_share: float = 0.0  # share of a layer's states by which each shard is larger than an even shard
    pictures: PictureSplit = SPARING


Chosen = Mapping[str, Any]
"""Values of fields of ``Strategy``; those that are not chosen yet have their defaults."""


def slice_degree(chosen: Chosen) -> int:
    """Devices that hold slices of the same parameters (tensor and channel parallelism)."""
    return int(chosen["tensor"] * chosen["filters"] * chosen["channels"])


def sample_degree(chosen: Chosen) -> int:
    """Devices that share the tokens or pixels of each sample."""
    return int(chosen["context"] * chosen["depth"] * chosen["height"] * chosen["width"])


@dataclass(frozen=True, slots=True)
class AvailableDevices:
    """The devices of a stage, and what decides whether a legal strategy is sensible on them."""

    devices: int  # of the stage
    node: int | None = None  # devices of a node; None: all legal choices are sensible
    tokens: int = 1  # fewest tokens of a sample for which another device pays off

    def fits_node(self, size: int) -> bool:
        """Whether groups of ``size`` consecutive devices never cross a node."""
        return self.node is None or (size <= self.node and (self.node % size == 0 or self.devices <= self.node))


@dataclass(frozen=True, slots=True)
class StrategyField:
    """How people pin a field of ``Strategy`` (``--fix``)."""

    field: str
    name: str  # on the command line
    aliases: tuple[str, ...] = ()
    means: str = ""  # what it means, for people
    words: Mapping[str, object] | None = None  # values by word; None: whole numbers
    least: int = 1  # smallest and largest whole number; None: no limit
    most: int | None = None
    splits: bool = False  # whether its value multiplies into the devices of a stage
    remedy: str = ""  # of the error for another word, or for a number above ``most``


SWITCH: Mapping[str, object] = {
    "on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False,
}  # fmt: skip
"""Words of a field that is on or off."""


def degree_in(word: str, name: str) -> int | None:
    """Read the degree of a word such as ``tensor4``; None if the word is not the name and a degree."""
    number = word.removeprefix(name)
    return int(number) if number != word and re.fullmatch(r"[1-9]\d*", number, re.ASCII) else None


@dataclass(frozen=True, slots=True)
class Dimension:
    """A way to split a layer. Each has a folder under ``parallelism``, whose ``cost.py`` defines a subclass."""

    name: str = ""  # for people; the key of its host time in ``HostOverhead``
    degree: str = ""  # the field of ``Strategy`` that multiplies into its devices; empty for none
    means: str = ""  # what its degree is, for people
    aliases: tuple[str, ...] = ()
    software: tuple[str, ...] = ()  # backends of other training software that has it

    axes: ClassVar[tuple[MeshAxis, ...]] = ()  # its axes of a stage's mesh of ranks
    # fields that change what one device runs of a layer: profiles have figures for each of their values
    runs: ClassVar[tuple[str, ...]] = ()
    stands_in: ClassVar[bool] = False  # whether figures of the unsplit layer replace those that a profile lacks
    purposes: ClassVar[tuple[Purpose, ...]] = ()  # of the messages that it sends in a step
    sums: ClassVar[bool | None] = None  # whether these are all-reduces (True), other messages (False) or both (None)
    causes: ClassVar[tuple[str, ...]] = ()  # values of ``Communication.cause`` besides its name
    fields: ClassVar[tuple[StrategyField, ...]] = ()
    forbids: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # words of ``--forbid``, and the parts that each excludes
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # its parts, and the fields of ``Strategy`` that each sets
    examples: ClassVar[str] = ""  # of ``word``

    def word(self, strategy: Strategy) -> str:
        """Return its word in the short name of a strategy; empty if it is not used."""
        degree = getattr(strategy, self.degree)
        return f"{self.degree}{degree}" if degree > 1 else ""

    def in_words(self, strategy: Strategy) -> str:
        """Describe its use by a strategy, for a report; empty if it is not used."""
        return f"{self.means or self.name}: {getattr(strategy, self.degree)}" if self.word(strategy) else ""

    def read(self, word: str) -> dict[str, object] | None:
        """Return the fields that a word of a short name sets (the inverse of ``word``); None for other words."""
        degree = degree_in(word, self.degree)
        return None if degree is None else {self.degree: degree}

    def layout(self, strategy: Strategy) -> dict[str, int]:
        """Return how many ways it splits activations between layers, by field of ``Layout``; other ranks have
        copies, and must be the innermost."""
        return {axis.part: getattr(strategy, axis.degree) for axis in self.axes if axis.part not in SLICES}

    def features(self, strategy: Strategy) -> set[str]:
        """Name what a strategy uses of it, independent of degrees, for people."""
        return {axis.degree for axis in self.axes if getattr(strategy, axis.degree) > 1}

    def shrunk(self, smaller: Strategy, strategy: Strategy) -> Sequence[dict[str, object]]:  # noqa: ARG002
        """List the values of its other fields when the degrees of ``strategy`` shrink to those of ``smaller``.

        The result must not use a feature that ``strategy`` does not use.
        """
        return [{}]

    def sends(self, purpose: str, *, sums: bool) -> bool:
        """Whether it sends messages for a purpose in a step: all-reduces (``sums``), or others."""
        return purpose in self.purposes and self.sums in (None, sums)

    def simplified(self, strategy: Strategy) -> Sequence[Strategy]:  # noqa: ARG002
        """List simpler strategies of the same ranks and samples, the simplest first."""
        return ()

    def spread(self, strategy: Strategy) -> ParameterSpread | None:  # noqa: ARG002
        """Return the ranks of parameters that it places on other ranks than the rest (experts); None for none."""
        return None

    def split_module(self, module: Any, group: Any) -> None:
        """Split a module of a layer in place, with torch, beyond what its axes say; of added dimensions (``registry``).

        ``group``: the process group of the ranks along its axis.
        """

    def fault(self, strategy: Strategy) -> tuple[str, str] | None:  # noqa: ARG002
        """Return a field whose value contradicts its other fields, and the remedy; None if they agree."""
        return None

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:
        """List legal values of its fields of ``Strategy`` for a kind of layer on at most ``devices`` devices."""
        raise NotImplementedError

    def allows(self, kind: LayerKind, chosen: Chosen, room: AvailableDevices) -> bool:  # noqa: ARG002
        """Whether its choice goes together with those of the dimensions before it (``registry.choosing``).

        It must be legal and, if ``room`` has the size of a node, in the declared space of sensible strategies.
        """
        return True

    def reason(self, kind: LayerKind) -> str:  # noqa: ARG002
        """Explain why it is limited or not offered for a kind of layer; empty if there is no limit."""
        return ""

    def refusal(self, kind: LayerKind, degree: int) -> str:  # noqa: ARG002
        """Explain why a layer cannot be split ``degree`` ways; empty if it can, or if ``reason`` explains it."""
        return ""

    def runs_on(self, device: Device, kind: LayerKind, strategy: Strategy | Strategies) -> Flag:  # noqa: ARG002
        """Whether a type of device can run a layer under a strategy, or under each of many."""
        return True

    def apply(
        self, work: LayerWork, kind: LayerKind, strategy: Strategy | Strategies, context: DimensionContext
    ) -> LayerWork:
        """Change the work of one device by the strategy's choice in this dimension.

        ``strategy`` may be many strategies, whose figures are arrays: use ``arrays.where`` instead of ``if``.
        """
        raise NotImplementedError
