"""How sure a prediction is: where its figures come from and what error is known of such predictions. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from galvatron_lite.calibration.store import DEFAULT, Expected, entry_for, expected_of, load_calibration
from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.explainer.schema import Constants, Trust
from galvatron_lite.profiler.schema import OriginKind, Profile


def trust_in(profile: Profile) -> Trust:
    """How sure what is predicted from a profile is."""
    origin, links = profile.origin, profile.communication_origin
    estimated = origin.kind is OriginKind.ESTIMATED
    expected = expected_of(profile.graph, load_calibration())
    error = expected.error if estimated else None
    residuals = [fit.residual for fit in profile.fits]
    return Trust(
        layers=origin.kind.value,
        layers_source=", ".join(filter(None, (origin.source, origin.date))),
        communication=links.kind.value,
        communication_source=", ".join(filter(None, (links.source, links.date))),
        spread=origin.spread,
        links_residual=median(residuals) if residuals else None,
        constants=tuple(_constants(profile.cluster)) if estimated else (),
        error=error,
        error_of="" if error is None else f"step times of {expected.models} ({expected.source}; galvatron validate)",
        missing=tuple(_missing(estimated, expected)),
    )


def _constants(cluster: Cluster) -> Iterator[Constants]:
    """What the constants of the cluster's devices were fitted to."""
    calibration = load_calibration()
    names = [entry_for(calibration, "devices", group.device.name, DEFAULT) for group in cluster.types]
    for name in dict.fromkeys(names):
        origin = calibration.origins.get(f"devices/{name}")
        if origin is not None:
            yield Constants(f"devices/{name}", origin.rows, origin.residual, origin.source)


def _missing(estimated: bool, expected: Expected) -> list[str]:
    said = []
    if not estimated:
        said.append(
            "no error is kept with a measured profile (`galvatron validate` measures that of estimates): train some "
            "steps and hold them against the prediction"
        )
    elif expected.error is None:
        said.append(f"the error of estimated step times was not measured for {expected.models}")
    said.append("prices and what-ifs are differences of two predictions; their error is not measured")
    return said
