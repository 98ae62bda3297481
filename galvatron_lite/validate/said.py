"""Reads what published runs say in words: precision, recomputation, schedule, how memory was measured."""

from __future__ import annotations

import re
from collections.abc import Sequence

from galvatron_lite.cluster.cluster import Device
from galvatron_lite.model.graph import Recompute
from galvatron_lite.plans.schema import Schedule

_SCHEDULES = {
    "zb-v": Schedule.ZERO_BUBBLE_V,
    "zbv": Schedule.ZERO_BUBBLE_V,
    "zb-2p": Schedule.ZERO_BUBBLE_2P,
    "zb-h2": Schedule.ZERO_BUBBLE_2P,
    "zb-1p": Schedule.ZERO_BUBBLE_1P,
    "zb-h1": Schedule.ZERO_BUBBLE_1P,
    "gpipe": Schedule.GPIPE,
}


def compute_precision(text: str | None, device: Device) -> str:
    """Precision of matmuls: what is said, bf16 where nothing is; fp32 runs use TF32 only where they say so.

    Of precisions narrower than 16 bits only matmuls are; what they are called is what estimates know them by.
    """
    said = (text or "bf16").lower()
    if "fp4" in said:
        return "nvfp4"
    if "fp8" in said:
        if "rowwise" in said:
            return "fp8-rowwise"
        return "mxfp8" if "mxfp8" in said else "fp8"
    if "bf16" in said and "fp16" not in said:
        return "bf16"
    if "fp16" in said:
        return "fp16"
    if "tf32" in said:
        return "tf32" if "tf32" in device.peak else "fp32"
    return "fp32" if "fp32" in said else "bf16"


def recompute_of(text: str | None) -> Recompute:
    """What is computed again in most layers; nothing where nothing is said."""
    said = (text or "none").lower()
    if said.startswith("full"):
        return Recompute.FULL
    return Recompute.SELECTIVE if said.startswith("selective") else Recompute.NONE


def recompute_choices(text: str | None, layers: int) -> Sequence[Recompute]:
    """What each block computes again; ``every 2nd layer`` means all of every second one."""
    said = (text or "none").lower()
    every = re.search(r"every (\d+)(?:st|nd|rd|th)? layer", said)
    if every:
        step = int(every[1])
        return [Recompute.FULL if place % step == 0 else Recompute.NONE for place in range(layers)]
    return [recompute_of(text)] * layers


def schedule_of(text: str | None, virtual: int) -> Schedule:
    """Order of micro-batches; 1F1B where nothing is said, interleaved where there are virtual stages."""
    said = (text or "").lower()
    for word, schedule in _SCHEDULES.items():
        if word in said:
            return schedule
    return Schedule.INTERLEAVED if "interleaved" in said or virtual > 1 else Schedule.ONE_F_ONE_B


def argument(said: str, name: str) -> str | None:
    """The value of a command-line argument quoted in the notes (``kv-channels=128``)."""
    found = re.search(rf"(?<![\w-]){re.escape(name)}=([^,;\s]+)", said)
    return found[1] if found else None


def whole_argument(said: str, name: str) -> int | None:
    """The same, as a whole number; None where it is not one."""
    value = argument(said, name)
    return int(value) if value and value.isdigit() else None
