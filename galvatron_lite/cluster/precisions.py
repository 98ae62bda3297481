"""Which precisions the devices of a cluster compute in."""

from __future__ import annotations

from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.errors import InputError
from galvatron_lite.units import ITEM_BYTES

_PREFERRED = ("bf16", "fp16", "fp32")
"""Precisions of mixed-precision training, best first (Kalamkar et al. 2019, "A Study of BFLOAT16": the exponent of
fp32, so no loss scaling; fp16 needs it, Micikevicius et al. 2018). fp8 is of linear layers alone and has to be asked
for."""


def known_precisions(cluster: Cluster) -> tuple[str, ...]:
    """The precisions that every device of a cluster has a peak for, in the order of its data sheet."""
    first, *others = (group.device.peak for group in cluster.groups)
    return tuple(name for name in first if name in ITEM_BYTES and all(name in peak for peak in others))


def best_precision(cluster: Cluster) -> str:
    """The best precision to train in that every device of a cluster has: bf16, else fp16, else fp32.

    Raises:
        InputError: the devices have none of them in common.
    """
    supported = known_precisions(cluster)
    for precision in _PREFERRED:
        if precision in supported:
            return precision
    raise InputError("--precision", None, f"Give one of {_devices(cluster)}: {', '.join(supported) or 'none'}.")


def check_precision(precision: str, cluster: Cluster, field: str = "--precision") -> None:
    """Refuse a precision that a device of the cluster has no units for.

    Raises:
        InputError: names the devices and the precisions that they have.
    """
    supported = known_precisions(cluster)
    if precision not in supported:
        raise InputError(field, precision, f"Precisions of {_devices(cluster)}: {', '.join(supported) or 'none'}.")


def _devices(cluster: Cluster) -> str:
    return " and ".join(dict.fromkeys(group.device.name for group in cluster.groups))
