"""Channel and filter parallelism: devices share the input or the output channels of convolutions.

Kahira et al. 2021 (arXiv:2104.09075, table 3, "filter" and "channel"): weights and their states are divided by p, and
pictures are brought together in every layer. Of a picture x that enters an operator and y that leaves it:

                                                 forward               backward
    filters, alone (``Part.GATHERED``)           all-gather of y*      all-reduce of x's gradient
    filters, the first of a pair (FILTERS)       nothing               all-reduce of x's gradient
    filters, the second of a pair (CHANNELS)     all-reduce of y       nothing
    channels (SCATTERED)                         reduce-scatter of y   all-gather of y's gradient

The first line is theirs: 3 (p - 1) (a + B y / p b) over layers whose inputs are the outputs of others. Pairs need 2/3
of it; so do ``channels``, which reduce and scatter where the paper's all-reduce (it names the saving: "2 instead of
3"), and leave every activation shared. The image takes no gradient. Nothing hides these collectives.

* of what pooling left of it, once for two that are added (``parts.gathered_items``).

Pictures that are joined along shared channels are dealt out anew: all-to-all of the result's shares, at most.
A norm over the channels of each pixel (LayerNorm) on shared channels gathers two figures a pixel of every device in
forward, and sums two in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from galvatron_lite.arrays import Flag, Real, never, where
from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.axes import MeshAxis, Part, Purpose
from galvatron_lite.parallelism.base import (
    AvailableDevices,
    Chosen,
    Communication,
    Dimension,
    DimensionContext,
    LayerWork,
    Moment,
    StrategyField,
    degree_in,
)
from galvatron_lite.parallelism.channel.parts import (
    OUTPUT,
    OperatorPart,
    divides,
    each_sizes,
    gathered_items,
    joined_items,
    parts_of,
    pixel_norms,
    split_items,
    splits_channels,
    takes_gradient,
    undivided,
)
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.pictures import has_weights, is_picture, items_of
from galvatron_lite.parallelism.ranks import Either, group_along
from galvatron_lite.parallelism.strategy import Strategy

BY = ("filters", "channels")
"""Fields of ``Strategy``: output channels, input channels."""


@dataclass(frozen=True, slots=True)
class ChannelDimension(Dimension):
    """Devices that share output channels (``degree`` "filters") or input channels ("channels")."""

    name: str = "channel"
    degree: str = "filters"

    axes = (MeshAxis("filters", Part.CHANNELS), MeshAxis("channels", Part.CHANNELS))
    runs = ("filters", "channels")
    purposes = (Purpose.ACTIVATIONS,)
    fields = (
        StrategyField("filters", "filters", (), "devices that share convolutions' output channels", splits=True),
        StrategyField("channels", "channels", (), "devices that share convolutions' input channels", splits=True),
    )
    forbids = MappingProxyType({"filters": ("filters",), "channels": ("channels",), "channel": ("filters", "channels")})
    parts = MappingProxyType({"filters": ("filters",), "channels": ("channels",)})
    examples = "filters2, channels2"

    def word(self, strategy: Strategy) -> str:
        """``filters2``, ``channels2``, or both."""
        degrees = ("filters", strategy.filters), ("channels", strategy.channels)
        return " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1)

    def in_words(self, strategy: Strategy) -> str:
        """See ``Dimension.in_words``."""
        degrees = ("output", strategy.filters), ("input", strategy.channels)
        return "; ".join(f"{name} channels shared by {degree}" for name, degree in degrees if degree > 1)

    def read(self, word: str) -> dict[str, object] | None:
        """See ``word``."""
        for name in ("filters", "channels"):
            if (degree := degree_in(word, name)) is not None:
                return {name: degree}
        return None

    def layout(self, strategy: Strategy) -> dict[str, int]:
        """See ``Dimension.layout``."""
        return {"channels": strategy.channels}

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:
        """Off, and degrees that divide all channels."""
        offered = splits_channels(kind, self.degree)
        degrees = [d for d in divisors(devices)[1:] if divides(kind, self.degree, d)] if offered else []
        return [{self.degree: degree} for degree in (1, *degrees)]

    def refusal(self, kind: LayerKind, degree: int) -> str:
        """Why a layer cannot be split so many ways; empty where it can."""
        if not splits_channels(kind, self.degree):
            ends = is_picture(kind)
            if ends and self.degree in kind.channel_reasons:
                return kind.channel_reasons[self.degree]
            return "it ends in a loss, whose channels nobody reads" if ends else "it does not work on pictures"
        return undivided(kind, self.degree, degree)

    def allows(self, kind: LayerKind, chosen: Chosen, room: AvailableDevices) -> bool:  # noqa: ARG002
        """One or the other, beside data parallelism, ZeRO and recomputation only; sensible within a node, as its
        collectives block every convolution."""
        degree = chosen["filters"] * chosen["channels"]
        if degree == 1:
            return True
        alone = 1 in (chosen["filters"], chosen["channels"])
        return alone and chosen["tensor"] * chosen["context"] * chosen["expert"] == 1 and room.fits_node(degree)

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:
        """A slice of the weights, and the collectives that bring pictures together.

        Must run before the dimensions that shard what is left after slicing.
        """
        if never(strategy.slices > 1):
            return work
        share = work.samples / strategy.batch_degree * context.activation_item_bytes
        items = work.parameters
        for by in BY:
            degree = getattr(strategy, by)
            split = min(split_items(kind, by), kind.parameters.total)
            items = where(degree > 1, kind.parameters.total - split + split / degree, items)
        items = work.parameters if context.pictures.whole_weights else items
        moved = [one for by in BY for one in _moved(kind, strategy, by, share, context.pictures.gathers_each)]
        frozen = items * (kind.frozen.total / max(1, kind.parameters.total))
        return work.with_parameters(items, frozen).with_communications(*moved)


def _moved(kind: LayerKind, strategy: Either, by: str, share: Real, each: bool) -> Iterator[Communication]:
    """The module's collectives, or (``each``) those of gathers behind every convolution.

    ``share``: samples x bytes of an item.
    """
    group, degree = group_along(strategy, *BY), getattr(strategy, by)
    for collective, moment, sizes in each_sizes(kind, by) if each else _sizes(kind, by, degree):
        if sizes:
            yield _together(collective, moment, [size * share for size in sizes], group, degree > 1)


def _together(
    collective: Collective, moment: Moment, sizes: Sequence[Real], group: RankGroup, split: Flag
) -> Communication:
    """Calls of several sizes as calls of their mean size: seconds are linear in it where one algorithm is the best."""
    size = sum(sizes) / len(sizes)
    return Communication(collective, size, group, moment, False, split * len(sizes), "channel")


_Sizes = tuple[Collective, Moment, Sequence[Real]]
"""A collective, when it happens, and the items a sample of each call."""


def _sizes(kind: LayerKind, by: str, degree: Real) -> tuple[_Sizes, ...]:
    """The collectives of a layer."""
    parts = [(one, part) for one, part in parts_of(kind.operators, by) if has_weights(one)]
    sums = [items_of(one)[1] for one, part in parts if part is OperatorPart.CHANNELS]
    gathers = gathered_items(kind) if by == "filters" else []
    entering = [items_of(one)[0] for one, part in parts if part in OUTPUT and takes_gradient(one)]
    shares = [items_of(one)[1] for one, part in parts if part is OperatorPart.SCATTERED]
    norms = pixel_norms(kind, by)
    dealt = [joined_item / degree for joined_item in joined_items(kind)] if by == "channels" else []
    return (
        (Collective.ALL_REDUCE, Moment.FORWARD, sums),
        (Collective.ALL_GATHER, Moment.FORWARD, [*gathers, *(degree * norm for norm in norms)]),
        (Collective.REDUCE_SCATTER, Moment.FORWARD, shares),
        (Collective.ALL_REDUCE, Moment.BACKWARD, [*entering, *norms]),
        (Collective.ALL_GATHER, Moment.BACKWARD, shares),
        (Collective.ALL_TO_ALL, Moment.FORWARD, dealt),
        (Collective.ALL_TO_ALL, Moment.BACKWARD, dealt),
    )
