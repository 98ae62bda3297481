"""What functions do with pictures whose pixels are cut."""

from __future__ import annotations

from galvatron_lite.parallelism.cuts.fallback import on_whole
from galvatron_lite.parallelism.cuts.shared import SHARED
from galvatron_lite.parallelism.cuts.tensor import Rules
from galvatron_lite.parallelism.spatial import adaptive, convolution, interpolation, norms, pads, pooling, shuffle

PIXELS_RULES = Rules(
    {
        **SHARED,
        **convolution.HANDLERS,
        **pads.HANDLERS,
        **pooling.HANDLERS,
        **adaptive.HANDLERS,
        **shuffle.HANDLERS,
        **norms.HANDLERS,
        **interpolation.HANDLERS,
    },
    otherwise=on_whole,
)
"""Of every picture that is split along its planes, rows or columns."""
