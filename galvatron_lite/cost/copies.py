"""Copies of weights in the precision of compute: autocast makes them of weights that are held in a wider one.

The runtime has them made once a step, so all its micro-batches share them (``runtime.precision.holding_copies``).
What ZeRO gathers has none: it is gathered in that precision. Layers that are computed again cast their weights in
every pass, and keep nothing of it. No torch here.
"""

from __future__ import annotations

from galvatron_lite.arrays import Whole, is_option, up, where
from galvatron_lite.model.graph import LayerKind, OperatorClass, Recompute
from galvatron_lite.parallelism.base import LayerWork
from galvatron_lite.parallelism.ranks import Either, sharded_items
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.units import ITEM_BYTES, activation_bytes

_CAST = frozenset({OperatorClass.MATMUL, OperatorClass.CONVOLUTION})
"""Operators whose weights autocast casts; tables of embeddings are looked up as they are."""


def copied_bytes(profile: Profile, kind: LayerKind, work: LayerWork, strategy: Either) -> tuple[Whole, Whole]:
    """Bytes of a layer's copies on one device: those held through a step, and those that a pass makes for itself.

    Args:
        profile: says of how many bytes an item of a copy is (``Profile.copied_bytes``); 0: there are none.
        kind: of the layer.
        work: what the device does for it.
        strategy: of the layer, or of many.
    """
    if not profile.copied_bytes:
        return 0, 0
    wrapped = (strategy.state_shards > 1) & (strategy.zero_stage > 1)
    left = work.parameters - sharded_items(work, strategy)
    copies = up(where(wrapped, left, _items(profile, kind, work, strategy)) * profile.copied_bytes)
    held = is_option(strategy.recompute, Recompute.NONE)
    return where(held, copies, 0), where(held, 0, copies)


def new_gradient_bytes(profile: Profile, kind: LayerKind, work: LayerWork, strategy: Either) -> Whole:
    """Bytes of the largest gradient of one weight of a layer on one device, in the precision of its parameters.

    From the second micro-batch on it is made beside the sum of those before. Args as ``copied_bytes``.
    """
    if not profile.copied_bytes:
        return 0
    item, total = activation_bytes(profile.graph.precision), kind.trainable
    trained = [one for one in kind.operators if one.weight_bytes and not one.frozen]
    read = [operator.weight_bytes / operator.count / item for operator in trained]
    looked_up = total - sum(operator.weight_bytes for operator in trained) / item
    most = max([looked_up, *read])
    if most <= 0:  # a layer without weights
        return 0
    items = work.gradient_items * (most / total) if most <= total else most / strategy.tensor
    wrapped = (strategy.state_shards > 1) & (strategy.zero_stage > 1)
    return up(where(wrapped, 0.0, items) * ITEM_BYTES[profile.parameter_precision])


def _items(profile: Profile, kind: LayerKind, work: LayerWork, strategy: Either) -> Whole:
    """Items of weights that are cast; those that another layer owns are shared over the tensor group alone."""
    item, total = activation_bytes(profile.graph.precision), kind.parameters.total
    cast = sum(operator.weight_bytes for operator in kind.operators if operator.kind in _CAST) / item
    return cast * (work.parameters / total) if 0 < cast <= total else cast / strategy.tensor
