"""Memory that runs out: what the plan predicted, what is taken, what to do."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from galvatron_lite.plans.schema import Plan
from galvatron_lite.units import format_budget, format_bytes

EXHAUSTED = (torch.OutOfMemoryError, MemoryError)
_ON_HOST = ("can't allocate memory", "cannot allocate memory", "not enough memory")
"""What torch says in a plain RuntimeError where the host has no more."""


def ran_out(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on a device or in the host."""
    if isinstance(error, EXHAUSTED):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _ON_HOST)


def exhausted(rank: int, operation: str, plan: Plan, stage: int, device: torch.device) -> str:
    """What is said where memory ran out.

    Args:
        rank: where it did.
        operation: in which.
        plan: under way.
        stage: of the plan, on this rank.
        device: of this rank.
    """
    predicted = plan.stages[min(stage, len(plan.stages) - 1)].memory.total
    told = (
        f"The plan predicts {format_bytes(predicted)}" if predicted else "The plan (written by hand) predicts nothing"
    )
    return (
        f"Memory of {device} ran out on rank {rank} in {operation}. {told} for this device; {_taken(device)}. "
        f"End what else uses this memory; or plan anew with less (galvatron plan --mem {_less(predicted)}, a smaller "
        "--batch, more devices), or train with adapt=True, which does so by itself. Then start all processes again and "
        "resume with load_latest(folder)."
    )


def _less(predicted: int) -> str:
    return format_budget(predicted * 9 // 10) if predicted else "80%"


def _taken(device: torch.device) -> str:
    """What this process and all others hold."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        own = f"this process holds {format_bytes(held)} ({format_bytes(used)} in tensors)"
        return f"{own}, {format_bytes(free)} of {format_bytes(total)} are free"
    resident = _resident()
    return f"this process holds {format_bytes(resident)}" if resident else "what this process holds is not known"


def _resident() -> int:
    """Bytes of this process in the host's memory; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
