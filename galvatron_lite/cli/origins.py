"""How far to trust what a plan was made from, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from galvatron_lite.profiler.schema import Profile


def accuracy(known: Profile) -> str:
    """How far off estimated costs of this kind of model are, as published runs tell; nothing of measured ones."""
    from galvatron_lite.calibration.store import expected_of, load_calibration
    from galvatron_lite.profiler.schema import OriginKind

    if known.origin.kind is not OriginKind.ESTIMATED:
        return ""
    found = expected_of(known.graph, load_calibration())
    if found.error is None:
        return f"estimated from data sheets; the error of such step times was not measured for {found.models}"
    return f"estimated step times of {found.models} are off by {found.error:.0%} on average ({found.source})"
