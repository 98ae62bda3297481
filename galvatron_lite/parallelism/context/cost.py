"""Context parallelism: devices share the tokens of each sample, and pass keys and values around for attention.

Ring attention (Liu et al. 2023, arXiv:2310.01889, section 3; Megatron-Core's default): each of c devices holds 1/c of
the queries, keys and values. In forward its block of keys and values makes c - 1 hops; in backward the block makes them
again, and so do its gradients. All hops run beside attention of the block before. Causal masks leave every device the
same work, as each takes one early and one late piece of the sequence (Megatron-Core; Brandon et al. 2023, striped
attention, arXiv:2311.09431).

Ulysses (Jacobs et al. 2023, arXiv:2309.14509, section 3): before attention the devices exchange tokens for heads, so
that each has all tokens of 1/c of the heads, and the output goes back: all-to-alls of queries, keys, values and output
in forward, the same of their gradients in backward. Of N tokens and h items each, a device sends N h / c in each: the
4 N h / c of section 3.2, which falls with c at a fixed N, where a ring's 2 N h (c - 1) / c does not.

Everything else is linear in the tokens of a device, so a device works on ``samples`` / c samples; attention too: 1/c
of the queries with all keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from galvatron_lite.arrays import Real, Whole, largest, never, opposite
from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.model.graph import LayerKind, OperatorClass
from galvatron_lite.parallelism.axes import MeshAxis, Part, Purpose
from galvatron_lite.parallelism.base import (
    SWITCH,
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
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.ranks import Either, group_along
from galvatron_lite.parallelism.strategy import Strategy

ULYSSES = "ulysses"
"""Cause of the all-to-alls around attention: they block, unlike the ring's hops."""


@dataclass(frozen=True, slots=True)
class ContextDimension(Dimension):
    """Devices that share the tokens of each sample, attention included."""

    name: str = "context"
    degree: str = "context"

    axes = (MeshAxis("context", Part.TOKENS),)
    purposes = (Purpose.TOKENS,)
    causes = (ULYSSES,)
    fields = (
        StrategyField("context", "context", ("cp",), "context-parallel degree", splits=True),
        StrategyField("ulysses", "ulysses", (), "on or off: heads for tokens instead of a ring", SWITCH,
                      remedy="Give on or off."),
    )  # fmt: skip
    forbids = MappingProxyType({"context": ("context",), "cp": ("context",), "ulysses": ("ulysses",)})
    parts = MappingProxyType({"context": ("context",), "ulysses": ("ulysses",)})
    examples = "context2, ulysses2"

    def word(self, strategy: Strategy) -> str:
        """``context2``, ``ulysses2``."""
        name = "ulysses" if strategy.ulysses else "context"
        return f"{name}{strategy.context}" if strategy.context > 1 else ""

    def in_words(self, strategy: Strategy) -> str:
        """See ``Dimension.in_words``."""
        words = f"tokens shared by {strategy.context}" + " (heads exchanged)" * strategy.ulysses
        return words if strategy.context > 1 else ""

    def read(self, word: str) -> dict[str, object] | None:
        """See ``word``."""
        if (heads := degree_in(word, "ulysses")) is not None:
            return {"context": heads, "ulysses": True}
        degree = degree_in(word, "context")
        return None if degree is None else {"context": degree}

    def features(self, strategy: Strategy) -> set[str]:
        """See ``Dimension.features``."""
        return {"ulysses" if strategy.ulysses else "context"} if strategy.context > 1 else set()

    def shrunk(self, smaller: Strategy, strategy: Strategy) -> Sequence[dict[str, object]]:
        """See ``Dimension.shrunk``."""
        return [{"ulysses": strategy.ulysses and smaller.context > 1}]

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:
        """Off; a ring (of a layer without attention: shares of the tokens only); or, with attention, Ulysses."""
        off: dict[str, object] = {"context": 1, "ulysses": False}
        if not splits_tokens(kind):
            return [off]
        degrees = [degree for degree in divisors(devices)[1:] if kind.dims.sequence % degree == 0]
        modes = (False, True) if attention_of(kind) else (False,)
        on: list[dict[str, object]] = [
            {"context": degree, "ulysses": ulysses} for ulysses in modes for degree in degrees
        ]
        return [off, *on]

    def allows(self, kind: LayerKind, chosen: Chosen, room: AvailableDevices) -> bool:
        """Shares of the tokens are even, together with sequence parallelism; Ulysses spreads complete heads.

        Under a causal mask a ring needs twice as many shares, since each device has an early and a late one.

        Sensible: a share has ``AvailableDevices.tokens`` tokens or more, so that matmuls and attention fill their
        tiles, and in a ring ``RING`` times as many, so that attention on a block can hide the hop of the next. Tensor
        groups share tokens too (sequence parallelism), which costs nothing. Ulysses stays inside a node, since its
        all-to-alls block each layer eight times.
        """
        degree, tensor, ulysses = chosen["context"], chosen["tensor"], chosen["ulysses"]
        if degree == 1:
            return True
        shares = degree * (tensor if chosen["sequence_parallel"] else 1)
        if not ulysses and any(operator.causal for operator in kind.operators):
            shares *= 2
        attentions = attention_of(kind)
        legal = not ulysses or all(_complete_heads(attention, degree, tensor) for attention in attentions)
        legal = legal and kind.dims.sequence % shares == 0
        if room.node is None or not legal:
            return legal
        shared = tensor == 1 or chosen["sequence_parallel"] or not kind.sequence_parallel
        ring = bool(attentions) and not ulysses
        least = room.tokens * max(shares, degree * RING if ring else 1)
        return shared and kind.dims.sequence >= least and (not ulysses or room.fits_node(degree * tensor))

    def reason(self, kind: LayerKind) -> str:
        """Attention whose tokens cannot be shared."""
        if not attention_of(kind) or splits_tokens(kind):
            return ""
        return f"context: {kind.name}: {kind.context_reason or 'its tokens are mixed by convolutions too'}"

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:
        """Fewer tokens, and the exchanges of queries, keys and values in both passes.

        Must run after tensor (each slice has heads of its own) and before recompute (which repeats attention's
        communication).
        """
        if never(strategy.context > 1):
            return work
        share = work.samples / strategy.token_degree * context.activation_item_bytes
        group = group_along(strategy, "context")
        work = work.with_communications(*_hops(kind, strategy, share, group), *_exchanges(kind, strategy, share, group))
        return replace(work, samples=work.samples / strategy.context)


LEAST_TOKENS = 256
"""Fewest tokens of a sample for which another device pays off: two blocks of query rows (128 each) of a fused attention
kernel. With fewer, tiles of attention and of matmuls are mostly padding."""


RING = 4
"""A ring's block has at least ``RING`` x ``LEAST_TOKENS`` tokens. Under a causal mask b queries and b keys of h items
take 2 b b h FLOPs while 4 b h bytes of the next keys and values arrive. These are hidden if b >= 2 x FLOP/s / (B/s):
about 1,000 on an A100 at half of its peak within a node, where links are fastest."""


def splits_tokens(kind: LayerKind) -> bool:
    """Whether a layer consists of attention and operators on single tokens."""
    images = kind.dims.in_channels > 0 or any(operator.kind is OperatorClass.CONVOLUTION for operator in kind.operators)
    return kind.dims.sequence > 1 and not images and not kind.context_reason


def _complete_heads(attention: Attention, degree: int, tensor: int) -> bool:
    """Whether each device of a slice gets complete heads, and all heads of keys and values equally many copies."""
    slice_of = max(attention.kv_heads // tensor, 1)
    even = slice_of % degree == 0 or degree % slice_of == 0
    return attention.heads % (degree * tensor) == 0 and even


def _hops(kind: LayerKind, strategy: Either, share: Real, group: RankGroup) -> Iterator[Communication]:
    """The hops of a ring: a block of keys and values goes round once in forward, twice in backward.

    ``share``: samples on a device (fractions for shares of tokens) times bytes of an item.
    """
    block = key_value_items(kind, strategy.tensor) * share
    around = (opposite(strategy.ulysses) & (block > 0)) * (strategy.context - 1)
    for moment, times in ((Moment.FORWARD, 1), (Moment.BACKWARD, 2)):
        yield Communication(Collective.SEND_RECV, block, group, moment, True, times * around, "context")


def _exchanges(kind: LayerKind, strategy: Either, share: Real, group: RankGroup) -> Iterator[Communication]:
    """The all-to-alls of Ulysses: queries, keys, values and the output in either pass.

    A device's share of queries and of the output is N h / P items (section 3.2). If a slice has fewer heads of keys and
    values than devices, each device gets a copy of the head that its query heads use.
    """
    attentions = attention_of(kind)
    if not attentions:
        return
    queries = (
        sum(attention.count * attention.heads * attention.queries * attention.size for attention in attentions)
        / strategy.tensor
    )
    keys = sum(
        attention.count
        * largest(attention.kv_heads / strategy.tensor, strategy.context)
        * attention.keys
        * attention.size
        for attention in attentions
    )
    sizes = [items * share for items in (queries, keys)]
    count = (strategy.ulysses & (strategy.context > 1)) * 2
    for moment in (Moment.FORWARD, Moment.BACKWARD):
        for size in sizes:
            yield Communication(Collective.ALL_TO_ALL, size, group, moment, False, count, ULYSSES)


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention in a layer."""

    count: int  # of equal ones in the layer
    heads: int  # of queries
    kv_heads: int  # of keys and values
    queries: int  # tokens of queries
    keys: int  # tokens of keys
    size: float  # items of a head


def attention_of(kind: LayerKind) -> tuple[Attention, ...]:
    """Return the attentions of a kind of layer, from its fused operators or else its dims."""
    fused = [operator for operator in kind.operators if operator.kind is OperatorClass.ATTENTION]
    if fused:
        return tuple(Attention(operator.count, *operator.shape) for operator in fused)
    dims = kind.dims
    if not dims.heads or not dims.sequence:
        return ()
    kv_heads = dims.kv_heads or dims.heads
    return (Attention(1, dims.heads, kv_heads, dims.sequence, dims.sequence, dims.hidden / dims.heads),)


def key_value_items(kind: LayerKind, tensor: Whole) -> Real:
    """Return the items of keys and values of a sample on one of ``tensor`` slices, for the full sequence.

    Fewer heads than slices are copied. 0 without attention.
    """
    return sum(
        2 * attention.count * largest(attention.kv_heads / tensor, 1.0) * attention.keys * attention.size
        for attention in attention_of(kind)
    )
