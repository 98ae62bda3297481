"""The machine a published run trains on: from a row's words to a cluster."""

from __future__ import annotations

import re
from difflib import get_close_matches

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.cluster.catalog import known_devices, match_device
from galvatron_lite.cluster.cluster import Cluster, Device
from galvatron_lite.cluster.links import cluster_from_links
from galvatron_lite.errors import InputError
from galvatron_lite.validate.outcome import Skipped
from galvatron_lite.validate.rows import PublishedRun

_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"gb300(?!\d)", "GB300"),
    (r"gb200(?!\d)", "GB200"),
    (r"b300(?!\d)", "B300"),
    (r"b200(?!\d)", "B200"),
    (r"h200(?!\d)", "H200"),
    (r"h100(?!\d).*96 ?gb", "H100-SXM-96GB"),
    (r"h100(?!\d).*nvl", "H100-NVL"),
    (r"h100(?!\d).*pcie", "H100-PCIE-80GB"),
    (r"h100(?!\d)", "H100-SXM5-80GB"),
    (r"h800(?!\d)", "H800-SXM5-80GB"),
    (r"a800(?!\d)", "A800-SXM4-80GB"),
    (r"a100(?!\d).*40 ?gb.*pcie|a100.*pcie.*40 ?gb", "A100-PCIE-40GB"),
    (r"a100(?!\d).*pcie", "A100-PCIE-80GB"),
    (r"a100(?!\d).*40 ?gb", "A100-SXM4-40GB"),
    (r"a100(?!\d)", "A100-SXM4-80GB"),
    (r"v100(?!\d).*16 ?gb", "V100-SXM2-16GB"),
    (r"v100(?!\d)", "V100-SXM2-32GB"),
    (r"p100(?!\d)", "P100-SXM2-16GB"),
    (r"p40", "P40"),
    (r"\bt4\b", "T4"),
    (r"rtx ?titan|titan ?rtx", "RTX-Titan"),
    (r"rtx ?8000", "Quadro-RTX-8000"),
    (r"6000 ?ada", "RTX-6000-Ada"),
    (r"a6000(?!\d)", "RTX-A6000"),
    (r"4090(?!\d)", "RTX-4090"),
    (r"3090(?!\d)", "RTX-3090"),
    (r"l40s", "L40S"),
    (r"\ba10\b", "A10"),
    (r"\ba40\b", "A40"),
)
"""Names that publications give devices, beside those of the data sheets themselves; the first that fits counts."""


def device_of(text: str | None) -> Device | None:
    """The data sheet of a device by what a publication calls it; None where there is none, or it is unknown."""
    said = (text or "").lower()
    if not said or "unknown" in said:
        return None
    exact = match_device(said)
    if exact is not None:
        return exact
    named = (name for pattern, name in _PATTERNS if re.search(pattern, said))
    return next((device for device in map(match_device, named) if device is not None), None)


def unknown_device(text: str) -> str:
    """What to say of a GPU without data sheet: names near it, or all."""
    names = {name.lower(): name for name in known_devices()}
    near = [names[name] for name in get_close_matches(text.lower(), names, 3, 0.5)]
    remedy = f"Near it: {', '.join(near)}." if near else f"Known: {', '.join(known_devices())}."
    return str(InputError("gpu", text, remedy))


def cluster_of(run: PublishedRun, calibration: Calibration) -> Cluster | Skipped:
    """The cluster of a run; links that it does not state are those of the device's reference design."""
    device = device_of(run.gpu)
    if device is None and "unknown" in (run.gpu or "unknown").lower():
        return Skipped("GPU not stated", f"Known: {', '.join(known_devices())}.")
    if device is None:
        return Skipped("no data sheet of the GPU", unknown_device(run.gpu or ""))
    if run.n_gpus is None:
        return Skipped("number of GPUs not stated", "Give n_gpus.")
    return cluster_from_links(
        device,
        run.n_gpus,
        run.gpus_per_node,
        run.intra_link,
        run.inter_net,
        run.inter_node_gbps,
        calibration,
    )
