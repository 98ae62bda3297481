"""Doing something on all processes, so that it succeeds on all or is an error on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from galvatron_lite.errors import GalvatronError, InputError, LaunchError
from galvatron_lite.parallelism.cyclic.mailbox import RESUME

Made = TypeVar("Made")


class Peers(Protocol):
    """The processes that run a model."""

    @property
    def rank(self) -> int:
        """Of this one."""

    def everyone(self, value: Any) -> list[Any]:
        """What every process shows, by rank; all call it."""


class ProcessPeers:
    """The ranks of the default process group. Every rank makes one at the same time."""

    def __init__(self, timeout: float) -> None:
        alone = dist.get_world_size() == 1
        # through the CPU, whatever training uses: what is shown is small, and lies there
        self.group: dist.ProcessGroup | None = (
            None if alone else dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")
        )

    @property
    def rank(self) -> int:
        """See ``Peers``."""
        return dist.get_rank()

    def everyone(self, value: Any) -> list[Any]:
        """See ``Peers``.

        Raises:
            LaunchError: one of them is gone, or silent for too long.
        """
        if self.group is None:
            return [value]
        shown: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(shown, value, group=self.group)
        except RuntimeError as error:
            reason = str(error).splitlines()[0].split(". ")[0]
            raise LaunchError(
                f"Checkpoint: rank {self.rank} did not hear of all other ranks; one is gone or was silent for too long "
                f"({reason}). {RESUME}"
            ) from error
        return shown


@dataclass(frozen=True, slots=True)
class _Trouble:
    field: str
    value: str | None
    remedy: str


def together(peers: Peers, act: Callable[[], Made], field: str) -> list[Made]:
    """What every process made, by rank; all call it.

    Raises:
        InputError: some process could not; every process raises it, and names the rank.
        LaunchError: a process is gone.
    """
    own: Made | _Trouble
    cause: Exception | None = None
    try:
        own = act()
    except InputError as error:
        own, cause = _Trouble(error.field, None if error.value is None else str(error.value), error.remedy), error
    except OSError as error:
        own, cause = _Trouble(field, str(error.filename or ""), f"{error.strerror or error}."), error
    except GalvatronError:
        raise
    except Exception as error:
        own, cause = _Trouble(field, "", f"{type(error).__name__}: {error}."), error
    shown: list[Made | _Trouble] = peers.everyone(own)
    for rank, one in enumerate(shown):
        if isinstance(one, _Trouble):
            who = f"Rank {rank}: " if len(shown) > 1 else ""
            raise InputError(one.field, one.value, f"{who}{one.remedy}") from cause
    return [one for one in shown if not isinstance(one, _Trouble)]


def at_first(peers: Peers, act: Callable[[], Made], field: str) -> Made:
    """What rank 0 made, for every process; all call it. Raises what ``together`` does."""
    return cast("Made", together(peers, lambda: act() if peers.rank == 0 else None, field)[0])
