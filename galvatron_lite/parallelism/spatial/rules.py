"""What functions do with pictures whose pixels are cut."""

from __future__ import annotations

from galvatron_lite.parallelism.cuts.fallback import on_whole
from galvatron_lite.parallelism.cuts.shared import SHARED
from galvatron_lite.parallelism.cuts.tensor import Rules

PIXELS_RULES = Rules(SHARED, otherwise=on_whole)
"""Of every picture that is split along its planes, rows or columns."""
