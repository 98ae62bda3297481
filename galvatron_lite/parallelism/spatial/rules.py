"""The rules of images whose pixels are sharded."""

from __future__ import annotations

from galvatron_lite.parallelism.sharded.calls import on_full
from galvatron_lite.parallelism.sharded.rules import COMMON
from galvatron_lite.parallelism.sharded.tensor import Rules
from galvatron_lite.parallelism.spatial import convolution, norms, pooling, resizing

PIXELS_RULES = Rules(
    {**COMMON, **convolution.HANDLERS, **resizing.HANDLERS, **pooling.HANDLERS, **norms.HANDLERS}, otherwise=on_full
)
"""For images that are sharded along depth, height or width."""
