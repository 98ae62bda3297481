"""Ranks that agree after every phase whether it went well on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from galvatron_lite.errors import InputError, SwitchError

Result = TypeVar("Result")


def together(phase: str, device: torch.device, work: Callable[[], Result]) -> Result:
    """Do this rank's work of a phase; all ranks call it, and none goes on unless all did theirs.

    Args:
        phase: what is being done, for messages.
        device: of this rank.
        work: without communication, or such that either all ranks fail in it or none.

    Raises:
        InputError: this rank's work raised it.
        SwitchError: a rank failed.
    """
    result, error = _tried(work)
    failed = torch.tensor([int(error is not None)], dtype=torch.int32, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if not int(failed):
        assert result is not None
        return result[0]
    _fail(phase, error, _gathered(None if error is None else _description(error)))
    raise AssertionError  # never reached


def gathered(phase: str, device: torch.device, work: Callable[[], Result]) -> list[Result]:
    """What every rank's work gives, by rank; see ``together``."""
    mine = together(phase, device, work)
    return _gathered(mine)


def _tried(work: Callable[[], Result]) -> tuple[tuple[Result] | None, Exception | None]:
    try:
        return (work(),), None
    except Exception as error:
        return None, error


def _gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [value] * dist.get_world_size()
    if len(everyone) > 1:
        dist.all_gather_object(everyone, value)
    return everyone


def _fail(phase: str, error: Exception | None, messages: list[str | None]) -> None:
    if isinstance(error, InputError):
        raise error
    rank = next(rank for rank, text in enumerate(messages) if text is not None)
    raise SwitchError(phase, rank, str(messages[rank])) from error


def _description(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
