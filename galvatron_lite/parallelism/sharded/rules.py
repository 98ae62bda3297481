"""The handlers of everything that is neither a convolution's window nor a norm, for any dims that are sharded."""

from __future__ import annotations

from collections.abc import Mapping

from galvatron_lite.parallelism.sharded import metadata, pointwise, reductions, shapes
from galvatron_lite.parallelism.sharded.tensor import Handler

COMMON: Mapping[str, Handler] = {
    **metadata.METADATA,
    **metadata.GRADIENTS,
    **pointwise.HANDLERS,
    **pointwise.DROPOUT,
    **shapes.HANDLERS,
    **shapes.INDEXING,
    **reductions.HANDLERS,
    **reductions.PRODUCTS,
    **reductions.LOSSES,
}
"""By the function's name; every way to shard adds its own."""
