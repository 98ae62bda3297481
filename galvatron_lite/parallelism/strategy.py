"""What one layer does with the devices of its stage: a choice for every dimension. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, StrEnum
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from galvatron_lite.arrays import BoolArray, IntArray, is_option, opposite, where
from galvatron_lite.files import STRICT
from galvatron_lite.model.graph import Recompute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import ConfigDict

    from galvatron_lite.arrays import BoolArray, IntArray


N = TypeVar("N", int, "IntArray")
B = TypeVar("B", bool, "BoolArray")


class Offload(StrEnum):
    """What a layer keeps in host memory instead of on its device."""

    NONE = "none"
    STATES = "states"
    ACTIVATIONS = "activations"
    ALL = "all"


ADDED: list[str] = []
"""Names of added dimensions, which are no fields of ``Strategy`` and split samples (``registry.add``)."""


class Degrees(Generic[N, B]):
    """Figures that follow from the fields of a ``Strategy``, or of many (``Strategies``)."""

    __slots__ = ()
    if TYPE_CHECKING:
        data: N
        zero: N
        zero_stage: N
        tensor: N
        context: N
        expert: N
        expert_tensor: N
        offload: Any
        depth: N
        height: N
        width: N
        filters: N
        channels: N

    @property
    def added(self) -> N:
        """The product of the degrees of added dimensions."""
        raise NotImplementedError

    @property
    def devices(self) -> N:
        """Devices of the stage that the strategy uses."""
        return self.token_degree * self.tensor * self.slices

    @property
    def spatial(self) -> N:
        """How many ways the pixels of a sample are split."""
        return self.depth * self.height * self.width

    @property
    def slices(self) -> N:
        """How many ways the channels of convolutions are split."""
        return self.filters * self.channels

    @property
    def batch_degree(self) -> N:
        """How many ways the samples are split."""
        return self.replicas * self.zero

    @property
    def replicas(self) -> N:
        """Devices that hold the same states for different samples."""
        return self.data * self.added if ADDED else self.data

    @property
    def token_degree(self) -> N:
        """How many ways the tokens or pixels of all samples of a batch are split."""
        return self.batch_degree * self.context * self.spatial

    @property
    def state_shards(self) -> N:
        """How many ways the states are sharded: over zero, context and spatial ranks; 1 without sharding."""
        sharded = (self.zero_stage > 0) | (self.zero > 1)
        shards: N = where(sharded, self.zero * self.context * self.spatial, 1)
        return shards

    @property
    def parameter_shards(self) -> N:
        """How many ways parameters and their gradients are sharded: as the states, but not under ZeRO-1."""
        shards: N = where(self.zero_stage == 1, 1, self.state_shards)
        return shards

    @property
    def keeps_masters(self) -> B:
        """Whether full weights are in the precision of compute, with sharded float32 masters if that is narrower."""
        keeps: B = (self.zero_stage == 1) & (self.state_shards > 1) & opposite(self.offloads_states)
        return keeps

    @property
    def weight_slices(self) -> N:
        """How many ways parameters are sliced among devices that work on the same samples."""
        return self.tensor * self.slices

    @property
    def offloads_states(self) -> B:
        """Whether optimizer states are kept and updated in host memory."""
        offloads: B = is_option(self.offload, Offload.STATES) | is_option(self.offload, Offload.ALL)
        return offloads

    @property
    def offloads_activations(self) -> B:
        """Whether activations wait in host memory between forward and backward."""
        offloads: B = is_option(self.offload, Offload.ACTIVATIONS) | is_option(self.offload, Offload.ALL)
        return offloads


INSIDE: dict[str, Any] = {"recompute": Recompute.NONE}
"""Fields that change what a device computes and saves, but not what ranks hold, with the values that change nothing."""


@dataclass(frozen=True, slots=True, order=True)
class Strategy(Degrees[int, bool]):
    """What one layer does with the devices of its stage.

    Attributes:
        data: replicas that each process part of the samples and hold all states.
        zero: devices that each process part of the samples and shard the states (ZeRO).
        zero_stage: 1 (optimizer states are sharded), 2 (also gradients and parameters, which are gathered from forward
            to the end of backward), 3 (parameters are gathered for each use), or 0 for no sharding. Shards go over the
            context and spatial ranks too.
        tensor: devices that share the matmuls of each sample.
        sequence_parallel: whether the tensor group also shares the tokens between its matmuls.
        recompute: what is computed again in backward.
        context: devices that share the tokens of each sample, attention included (context parallelism).
        expert: how many ways the experts of a mixture are spread over the ranks of (data, zero, context).
        expert_tensor: devices that share the matmuls of each expert when experts are spread; 0: the tensor group, as
            far as expert parallelism does not use its ranks.
        ulysses: whether context ranks exchange heads for tokens around attention (all-to-all; Jacobs et al. 2023,
            arXiv:2309.14509) instead of passing keys and values around a ring.
        offload: what is kept in host memory.
        depth, height, width: devices that share the pixels of each sample, as a grid of planes, rows and columns
            (spatial parallelism of convolutions).
        filters: devices that share the output channels of convolutions and have all of their input channels.
        channels: devices that share the input channels of convolutions, and the channels of activations between layers.
        more: degrees above 1 of added dimensions, by name and in the order of ``ADDED``; ``getattr`` reads them.

    Rank order inside a stage is row-major over (added dimensions, data, zero, context, tensor, depth, height, width,
    filters, channels), the last innermost (closest).
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    data: int = 1
    zero: int = 1
    zero_stage: int = 0
    tensor: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = Recompute.NONE
    context: int = 1
    expert: int = 1
    expert_tensor: int = 0
    ulysses: bool = False
    offload: Offload = Offload.NONE
    depth: int = 1
    height: int = 1
    width: int = 1
    filters: int = 1
    channels: int = 1
    more: tuple[tuple[str, int], ...] = ()

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> int:
            """Return the degree of an added dimension."""
            if name in ADDED:
                return dict(self.more).get(name, 1)
            raise AttributeError(name, name=name, obj=self)

    @property
    def added(self) -> int:
        """See ``Degrees.added``."""
        return prod(degree for _, degree in self.more) if self.more else 1

    @property
    def split(self) -> Strategy:
        """The same split of the layer, with nothing computed again."""
        return replace(self, **INSIDE)

    def __str__(self) -> str:
        """See ``registry.short_name``."""
        from galvatron_lite.parallelism.registry import short_name

        return short_name(self)


DEGREES = ("data", "zero", "context", "tensor", "depth", "height", "width", "filters", "channels")


def degree_names() -> tuple[str, ...]:
    """List the degrees whose product is the devices of a stage, the outermost ranks first."""
    return (*ADDED, *DEGREES)


def changed(strategy: Strategy, changes: Mapping[str, Any]) -> Strategy:
    """Replace fields and degrees of added dimensions, by name."""
    degrees = {**dict(strategy.more), **changes}
    more = tuple((name, degrees[name]) for name in ADDED if degrees.get(name, 1) > 1)
    return replace(strategy, **{name: value for name, value in changes.items() if name not in ADDED}, more=more)


def strategy_of(chosen: Mapping[str, Any]) -> Strategy:
    """Make a strategy of fields and degrees of added dimensions, by name."""
    return changed(Strategy(), {name: value for name, value in chosen.items() if name != "more"})


_FIELDS = {item.name: item.default for item in fields(Strategy) if item.name != "more"}


class Strategies(Degrees["IntArray", "BoolArray"]):
    """Many strategies as arrays: a column for each field of ``Strategy``, with enum members as their indices."""

    sequence_parallel: BoolArray
    recompute: IntArray
    ulysses: BoolArray

    def __init__(self, **columns: Any) -> None:
        self.__dict__.update(columns)
        self.cache: dict[object, Any] = {}  # results of functions of these strategies

    @staticmethod
    def of(strategies: Sequence[Strategy]) -> Strategies:
        """Turn strategies into arrays."""
        names = {**_FIELDS, **dict.fromkeys(ADDED, 1)}
        columns = list(zip(*map(attrgetter(*names), strategies), strict=True)) or [()] * len(names)
        pairs = zip(names.items(), columns, strict=True)
        return Strategies(**{name: _column(default, values) for (name, default), values in pairs})

    def at(self, rows: IntArray) -> Strategies:
        """Select strategies by their indices."""
        return Strategies(**{name: getattr(self, name)[rows] for name in (*_FIELDS, *ADDED)})

    @property
    def added(self) -> IntArray:
        """See ``Degrees.added``."""
        ways: IntArray = prod((getattr(self, name) for name in ADDED), start=np.ones_like(self.data))
        return ways

    def __len__(self) -> int:
        return len(self.data)


def _column(default: object, values: Sequence[Any]) -> Any:
    if isinstance(default, bool):
        return np.array(values, dtype=np.bool_)
    if isinstance(default, Enum):
        indices = {member: index for index, member in enumerate(type(default))}
        values = [indices[value] for value in values]
    return np.array(values, dtype=np.int64)
