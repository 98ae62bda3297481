"""Where the released ParaDL oracle computes otherwise than its paper's formulas: options, all off by default."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from galvatron_lite.errors import InputError


class Quirk(StrEnum):
    """One difference between the released code (``parallel_analysis.py``) and the formulas."""

    FILTER_MEMORY = "filter-memory-divides-twice"
    """Filter, channel: a device's weights, those of layers not split too, are divided by p again."""
    WHOLE_WEIGHTS = "data-filter-reduces-whole-weights"
    """Data+filter: whole weights are reduced between groups, not a device's part of them."""
    STOPS_AT_SPLIT = "data-spatial-stops-at-split"
    """Data+spatial: compute and memory leave out the layers after the last split one."""
    COUNTS_REUSED = "data-spatial-counts-reused-activations"
    """Data+spatial: memory counts ReLU and batch normalisation too."""
    WHOLE_GATHER = "data-spatial-gathers-whole-activations"
    """Data+spatial: each step of the all-gather carries the whole activation, not its p2-th part."""


def quirks_named(names: Iterable[str]) -> frozenset[Quirk]:
    """Quirks by their names; ``all`` is every one.

    Raises:
        InputError: an unknown name.
    """
    given = tuple(names)
    known = {quirk.value: quirk for quirk in Quirk}
    for name in given:
        if name not in known and name != "all":
            raise InputError("--quirk", name, f"Known: {', '.join(known)}, all.")
    return frozenset(Quirk) if "all" in given else frozenset(known[name] for name in given)
