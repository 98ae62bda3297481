"""The handlers that all rules share: of all functions but windows (convolutions, pooling) and norms."""

from __future__ import annotations

from collections.abc import Mapping

from galvatron_lite.parallelism.sharded import indexing, metadata, pointwise, reductions, shapes
from galvatron_lite.parallelism.sharded.tensor import Handler

COMMON: Mapping[str, Handler] = {
    **metadata.METADATA,
    **metadata.GRADIENTS,
    **pointwise.HANDLERS,
    **pointwise.DROPOUT,
    **shapes.HANDLERS,
    **indexing.HANDLERS,
    **reductions.HANDLERS,
    **reductions.PRODUCTS,
    **reductions.LOSSES,
}
"""Handlers by function name, for any sharded dims."""
