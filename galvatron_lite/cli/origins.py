"""How far to trust what a plan was made from, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from galvatron_lite.profiler.schema import Profile


def accuracy(known: Profile) -> str:
    """How far off estimated costs are, as the constants' cross-validation found; nothing of measured ones."""
    from galvatron_lite.calibration.store import load_calibration
    from galvatron_lite.profiler.schema import OriginKind

    if known.origin.kind is not OriginKind.ESTIMATED:
        return ""
    error = load_calibration().expected_error.get("without_family")
    if error is None:
        return "estimated from data sheets, error not known"
    return f"estimated step times are off by {error:.0%} on average (published runs of software not fitted to)"
