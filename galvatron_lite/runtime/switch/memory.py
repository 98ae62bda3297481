"""Whether both plans' states fit on a device at once while they change hands."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from galvatron_lite.errors import InputError
from galvatron_lite.units import format_bytes

MEMINFO = Path("/proc/meminfo")


def available(device: torch.device) -> int | None:
    """Bytes that this process may still take, as far as the system says; of the host, its share of what is free."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if not MEMINFO.exists():
        return None
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
    if "MemAvailable" not in lines:
        return None
    return int(lines["MemAvailable"].split()[0]) * 1024 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_fits(free: int | None, needed: int) -> None:
    """Refuse to start what cannot end.

    Args:
        free: bytes that may be taken; None: any.
        needed: bytes that are taken for a moment.

    Raises:
        InputError: they do not fit.
    """
    if free is not None and needed > free:
        remedy = (
            f"Changing the plan takes {format_bytes(needed)} more for a moment. Save, start anew under the plan and "
            "load, or choose a plan with smaller states."
        )
        raise InputError("memory", format_bytes(free), remedy)
