"""How far off estimated step times are on average, by kind of model."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.model.graph import ModelGraph, OperatorClass


@dataclass(frozen=True, slots=True)
class ExpectedError:
    """The error of estimated step times."""

    models: str  # the kind of model that it was found of
    error: float | None  # mean absolute relative error; None where none was measured
    source: str = ""  # what it was found on


def expected_error(graph: ModelGraph, calibration: Calibration) -> ExpectedError:
    """The error of models like this one: with pixels, with attention and no pixels, or others, of which no published
    run is scored."""
    errors = calibration.expected_error
    if any(kind.dims.height for kind in graph.kinds.values()):
        source = "published runs, by some of which constants of convolutions were chosen"
        return ExpectedError("image networks", errors.get("images"), source)
    if any(op.kind is OperatorClass.ATTENTION for kind in graph.kinds.values() for op in kind.operators):
        return ExpectedError(
            "language models", errors.get("without_family"), "published runs of software not fitted to"
        )
    return ExpectedError("models with neither attention nor pixels", None)
