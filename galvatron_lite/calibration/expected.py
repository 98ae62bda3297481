"""How far off estimates are for a kind of model, as far as published runs tell. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.model.graph import ModelGraph, OperatorClass


@dataclass(frozen=True, slots=True)
class Expected:
    """The error of estimated step times.

    Attributes:
        models: the kind of model that it was found of.
        error: mean absolute relative error; None where none was measured.
        source: what it was found on.
    """

    models: str
    error: float | None
    source: str = ""


def expected_of(graph: ModelGraph, calibration: Calibration) -> Expected:
    """The error of models like this one: with pixels, with attention and no pixels, or others, of which no published
    run is scored."""
    known = calibration.expected_error
    if any(kind.dims.height for kind in graph.kinds.values()):
        source = "published runs, by some of which constants of convolutions were chosen"
        return Expected("image networks", known.get("images"), source)
    if any(one.kind is OperatorClass.ATTENTION for kind in graph.kinds.values() for one in kind.operators):
        return Expected("language models", known.get("without_family"), "published runs of software not fitted to")
    return Expected("models with neither attention nor pixels", None)


def margin_of(kind: str, calibration: Calibration) -> float:
    """Share of a memory budget that plans keep free, by where their costs come from: ``estimated`` or ``measured``."""
    return calibration.expected_error.get(f"memory_{kind}", 0.0)
