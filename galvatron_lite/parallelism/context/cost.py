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
        """Off; a ring, or nothing but shares of the tokens where a layer has no attention; Ulysses where it has."""
        off: dict[str, object] = {"context": 1, "ulysses": False}
        if not splits_tokens(kind):
            return [off]
        degrees = [degree for degree in divisors(devices)[1:] if kind.dims.sequence % degree == 0]
        ways = (False, True) if attention_of(kind) else (False,)
        on: list[dict[str, object]] = [
            {"context": degree, "ulysses": ulysses} for ulysses in ways for degree in degrees
        ]
        return [off, *on]

    def allows(self, kind: LayerKind, chosen: Chosen, room: AvailableDevices) -> bool:
        """Shares of the tokens are even, also beside sequence parallelism; twice as fine for the ring under a causal
        mask, where each device takes an early and a late piece. Ulysses spreads whole heads.

        Sensible: a share has so many tokens (``AvailableDevices.tokens``) that a device's matmuls and attention are
        not all edges, and of a ring ``RING`` times as many, so that attention on a block may hide the hop of the next.
        Tensor groups share tokens too (sequence parallelism), which costs as much as not sharing them. Ulysses stays
        within a node, for its all-to-alls block every layer eight times.
        """
        degree, tensor = chosen["context"], chosen["tensor"]
        if degree == 1:
            return True
        shares = degree * (tensor if chosen["sequence_parallel"] else 1)
        if chosen["ulysses"]:
            legal = all(_complete_heads(one, degree, tensor) for one in attention_of(kind))
        else:
            shares *= 2 if any(operator.causal for operator in kind.operators) else 1
            legal = True
        legal = legal and kind.dims.sequence % shares == 0
        if room.node is None or not legal:
            return legal
        shared = tensor == 1 or chosen["sequence_parallel"] or not kind.sequence_parallel
        ring = bool(attention_of(kind)) and not chosen["ulysses"]
        least = room.tokens * max(shares, degree * RING if ring else 1)
        return shared and kind.dims.sequence >= least and (not chosen["ulysses"] or room.near(degree * tensor))

    def reason(self, kind: LayerKind) -> str:
        """Why attention's tokens cannot be shared."""
        if not attention_of(kind) or splits_tokens(kind):
            return ""
        return f"context: {kind.name}: {kind.context_reason or 'its tokens are mixed by convolutions too'}"

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:
        """Fewer tokens, and what brings queries, keys and values together in both passes.

        Must run after tensor (each slice has its own heads) and before recompute (attention's communication runs again
        with it).
        """
        if never(strategy.context > 1):
            return work
        share = work.samples / strategy.token_degree * context.activation_item_bytes
        group = group_along(strategy, "context")
        moved = (*_hops(kind, strategy, share, group), *_exchanges(kind, strategy, share, group))
        return replace(work.sending(*moved), samples=work.samples / strategy.context)


LEAST_TOKENS = 256
"""Fewest tokens of a sample that are worth a device of their own: two blocks of query rows of a fused attention kernel
(128 each), below which its and the matmuls' tiles are mostly edges."""


RING = 4
"""Times ``LEAST_TOKENS`` that a ring's block has at the least: under a causal mask b queries meet b keys of h items in
2 b b h FLOPs while 4 b h bytes of the next keys and values arrive, so that hiding them takes b >= 2 x FLOP/s / (B/s):
about 1,000 on an A100 at half of its peak within a node, where links are quickest."""


def splits_tokens(kind: LayerKind) -> bool:
    """Whether a layer is made of attention and of what works on each token alone."""
    images = kind.dims.in_channels > 0 or any(operator.kind is OperatorClass.CONVOLUTION for operator in kind.operators)
    return kind.dims.sequence > 1 and not images and not kind.context_reason


def _complete_heads(attention: Attention, degree: int, tensor: int) -> bool:
    """Whether each device of a slice gets whole heads, and as many copies of each head of keys and values."""
    slice_of = max(attention.kv_heads // tensor, 1)
    even = slice_of % degree == 0 or degree % slice_of == 0
    return attention.heads % (degree * tensor) == 0 and even


def _hops(kind: LayerKind, strategy: Either, share: Real, group: RankGroup) -> Iterator[Communication]:
    """The ring's: a block of keys and values goes round once in forward, twice in backward.

    ``share``: samples whose tokens a device has, times bytes of an item.
    """
    block = key_value_items(kind, strategy.tensor) * share
    around = (opposite(strategy.ulysses) & (block > 0)) * (strategy.context - 1)
    for moment, times in ((Moment.FORWARD, 1), (Moment.BACKWARD, 2)):
        yield Communication(Collective.SEND_RECV, block, group, moment, True, times * around, "context")


def _exchanges(kind: LayerKind, strategy: Either, share: Real, group: RankGroup) -> Iterator[Communication]:
    """Ulysses': all-to-alls of queries, keys, values and the output in either pass.

    Each device's share of queries and of the output is N h / P items (section 3.2). Where a slice has fewer heads of
    keys and values than there are devices, each device gets a copy of the head that its query heads ask.
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
    """An attention of a layer."""

    count: int  # how many such there are
    heads: int  # heads, kv_heads: of queries, and of keys and values
    kv_heads: int
    queries: int  # queries, keys: tokens
    keys: int
    size: float  # items of a head


def attention_of(kind: LayerKind) -> tuple[Attention, ...]:
    """The attentions of a kind of layer, from its fused operators or else its extents; empty where it has none."""
    fused = [operator for operator in kind.operators if operator.kind is OperatorClass.ATTENTION]
    if fused:
        return tuple(Attention(one.count, *one.shape) for one in fused)
    dims = kind.dims
    if not dims.heads or not dims.sequence:
        return ()
    kv_heads = dims.kv_heads or dims.heads
    return (Attention(1, dims.heads, kv_heads, dims.sequence, dims.sequence, dims.hidden / dims.heads),)


def key_value_items(kind: LayerKind, tensor: Whole) -> Real:
    """Items of keys and values per sample on one of ``tensor`` slices, over the whole sequence.

    Heads fewer than slices are copied. 0 for a kind without attention.
    """
    return sum(2 * one.count * largest(one.kv_heads / tensor, 1.0) * one.keys * one.size for one in attention_of(kind))
