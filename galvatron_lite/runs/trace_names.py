"""Names in traces of ours. No torch here."""

from __future__ import annotations

STEP = "galvatron.step "
"""Before the number of a step."""
PART = "galvatron.part "
"""Before a part of a step (``Part``)."""
LAYER = "galvatron.layer "
"""Before the name of a layer: around its forward pass, and again where it is computed again in backward."""
METADATA = "galvatron"
"""Key of what a trace says of the run: rank, stage, layers, plan."""
