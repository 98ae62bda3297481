"""Precisions that the devices of a cluster compute in."""

from __future__ import annotations

from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.errors import InputError
from galvatron_lite.units import ITEM_BYTES

_PREFERRED = ("bf16", "fp16", "fp32")
"""Precisions of mixed-precision training, best first: bf16 has the exponent of fp32 and needs no loss scaling (Kalamkar
et al. 2019, "A Study of BFLOAT16"), fp16 does (Micikevicius et al. 2018). fp8 serves linear layers only and is never
the default."""


def known_precisions(cluster: Cluster) -> tuple[str, ...]:
    """Return the precisions that all devices of a cluster have a peak for, in the order of the data sheet."""
    first, *others = (group.device.peak for group in cluster.groups)
    return tuple(name for name in first if name in ITEM_BYTES and all(name in peak for peak in others))


def best_precision(cluster: Cluster) -> str:
    """Return the best precision to train in that all devices have: bf16, else fp16, else fp32.

    Raises:
        InputError: the devices share none of them.
    """
    supported = known_precisions(cluster)
    for precision in _PREFERRED:
        if precision in supported:
            return precision
    raise InputError("--precision", None, f"Give one of {_devices(cluster)}: {', '.join(supported) or 'none'}.")


def check_precision(precision: str, cluster: Cluster, field: str = "--precision") -> None:
    """Refuse a precision that a device of the cluster has no peak for.

    Raises:
        InputError: names the devices and their precisions.
    """
    supported = known_precisions(cluster)
    if precision not in supported:
        remedy = f"Precisions of {_devices(cluster)}: {', '.join(supported) or 'none'}."
        if precision == "fp64":  # of the model's parameters, not given by the user
            remedy += f" Cast the model (model.float()), or give {field}, with which it is estimated as if cast."
        raise InputError(field, precision, remedy)


def _devices(cluster: Cluster) -> str:
    return " and ".join(dict.fromkeys(group.device.name for group in cluster.groups))
