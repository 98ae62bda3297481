"""Channel and filter parallelism: devices share the input or the output channels of convolutions.

Kahira et al. 2021 (arXiv:2104.09075, table 3, "filter" and "channel"): weights and their states are divided by p, and
pictures are communicated in each layer. For input x and output y of an operator:

                                                 forward               backward
    filters, alone (GATHERED)                    all-gather of y*      all-reduce of x's gradient
    filters, the first of a pair (FILTERS)       nothing               all-reduce of x's gradient
    filters, the second of a pair (CHANNELS)     all-reduce of y       nothing
    channels (SCATTERED)                         reduce-scatter of y   all-gather of y's gradient

The paper has the first line: 3 (p - 1) (a + B y / p b) over layers whose inputs are outputs of others. Pairs need 2/3
of this; so do ``channels``, which reduce-scatter instead of the paper's all-reduce (it names the saving: "2 instead of
3") and leave all activations shared. The model's input needs no gradient. Compute does not hide these collectives.

* after pooling, once for two pictures that are added (``parts.gathered_items``).

Pictures that are joined along shared channels are redistributed, with an all-to-all of at most the result's shares. A
norm over the channels of each pixel (LayerNorm) gathers two figures a pixel from each device in forward, and sums two
in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from galvatron_lite.arrays import Real, never, where
from galvatron_lite.cluster.cluster import Collective
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
    BY,
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
        """See ``Dimension.refusal``."""
        if not splits_channels(kind, self.degree):
            ends = is_picture(kind)
            if ends and self.degree in kind.channel_reasons:
                return kind.channel_reasons[self.degree]
            return "it ends in a loss, whose channels nobody reads" if ends else "it does not work on pictures"
        return undivided(kind, self.degree, degree)

    def allows(self, kind: LayerKind, chosen: Chosen, room: AvailableDevices) -> bool:  # noqa: ARG002
        """Filters or channels, together only with data parallelism, ZeRO and recomputation.

        Sensible: within a node, as collectives block each convolution.
        """
        degree = chosen["filters"] * chosen["channels"]
        if degree == 1:
            return True
        alone = 1 in (chosen["filters"], chosen["channels"])
        return alone and chosen["tensor"] * chosen["context"] * chosen["expert"] == 1 and room.fits_node(degree)

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:
        """A slice of the weights, and the collectives of pictures.

        Must run before the dimensions that shard the slices.
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
        gathers_each = context.pictures.gathers_each
        calls = (call for by in BY for call in _communications(kind, strategy, by, share, gathers_each))
        frozen = items * (kind.frozen.total / max(1, kind.parameters.total))
        return work.with_parameters(items, frozen).with_communications(*calls)


def _communications(kind: LayerKind, strategy: Either, by: str, share: Real, each: bool) -> Iterator[Communication]:
    """The collectives of the module, or (``each``) those of gathers after each convolution.

    Calls of several sizes count as calls of their mean size: seconds are linear in the size for a given algorithm.
    ``share``: samples x bytes of an item.
    """
    group, degree = group_along(strategy, *BY), getattr(strategy, by)
    for collective, moment, sizes in each_sizes(kind, by) if each else _sizes(kind, by, degree):
        if sizes:
            size = sum(items * share for items in sizes) / len(sizes)
            yield Communication(collective, size, group, moment, False, (degree > 1) * len(sizes), "channel")


_Sizes = tuple[Collective, Moment, Sequence[Real]]
"""A collective, when it happens, and the items of a sample in each call."""


def _sizes(kind: LayerKind, by: str, degree: Real) -> tuple[_Sizes, ...]:
    """The collectives of a layer."""
    parts = [(operator, part) for operator, part in parts_of(kind.operators, by) if has_weights(operator)]
    sums = [items_of(operator)[1] for operator, part in parts if part is OperatorPart.CHANNELS]
    gathers = gathered_items(kind) if by == "filters" else []
    inputs = [items_of(operator)[0] for operator, part in parts if part in OUTPUT and takes_gradient(operator)]
    shares = [items_of(operator)[1] for operator, part in parts if part is OperatorPart.SCATTERED]
    norms = pixel_norms(kind, by)
    joined = [items / degree for items in joined_items(kind)] if by == "channels" else []
    return (
        (Collective.ALL_REDUCE, Moment.FORWARD, sums),
        (Collective.ALL_GATHER, Moment.FORWARD, [*gathers, *(degree * norm for norm in norms)]),
        (Collective.REDUCE_SCATTER, Moment.FORWARD, shares),
        (Collective.ALL_REDUCE, Moment.BACKWARD, [*inputs, *norms]),
        (Collective.ALL_GATHER, Moment.BACKWARD, shares),
        (Collective.ALL_TO_ALL, Moment.FORWARD, joined),
        (Collective.ALL_TO_ALL, Moment.BACKWARD, joined),
    )
