"""What all processes do together: starting with equal values, and succeeding or failing as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import GalvatronError, InputError, LaunchError
from galvatron_lite.parallelism.cyclic.mailbox import RESUME
from galvatron_lite.plans.schema import Plan

Made = TypeVar("Made")
Item = TypeVar("Item")
MESSAGE_BYTES = 2**25
"""Tensors are broadcast together up to this size."""


def everyone(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of a group (of the world), by rank; all of them call it."""
    values: list[Any] = [value] * dist.get_world_size(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


class Peers:
    """The ranks of the default process group. Every rank makes one at the same time.

    Args:
        timeout: seconds that a rank waits for the others; None: this process is alone, whatever others there are.
    """

    def __init__(self, timeout: float | None) -> None:
        self.group: dist.ProcessGroup | None = None
        if timeout is not None and dist.get_world_size() > 1:
            # through the CPU, whatever training uses: what is shown is small, and lies there
            self.group = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")

    @property
    def rank(self) -> int:
        """Of this process."""
        return 0 if self.group is None else dist.get_rank()

    @property
    def size(self) -> int:
        """How many processes there are."""
        return 1 if self.group is None else self.group.size()

    def everyone(self, value: Any) -> list[Any]:
        """What every process shows, by rank; all call it.

        Raises:
            LaunchError: one of them is gone, or silent for too long.
        """
        if self.group is None:
            return [value]
        try:
            return everyone(value, self.group)
        except RuntimeError as error:
            reason = str(error).splitlines()[0].split(". ")[0]
            raise LaunchError(
                f"Checkpoint: rank {self.rank} did not hear of all other ranks; one is gone or was silent for too long "
                f"({reason}). {RESUME}"
            ) from error


def together(peers: Peers, act: Callable[[], Made], field: str) -> list[Made]:
    """What every process made, by rank; all call it.

    Raises:
        InputError: some process could not; every process raises it, and names the rank.
        LaunchError: a process is gone.
    """
    result: Made | InputError
    cause: BaseException | None = None
    try:
        result = act()
    except InputError as error:
        value = None if error.value is None else str(error.value)  # what all can unpickle
        result, cause = InputError(error.field, value, error.remedy), error
    except OSError as error:
        result, cause = InputError(field, str(error.filename or ""), f"{error.strerror or error}."), error
    except GalvatronError:
        raise
    except BaseException as error:  # an interrupt, too: the others wait for this process
        result, cause = InputError(field, "", f"{type(error).__name__}: {error}."), error
    shown: list[Made | InputError] = peers.everyone(result)
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    for rank, one in enumerate(shown):
        if isinstance(one, InputError):
            if len(shown) == 1 and isinstance(cause, InputError):
                raise cause
            who = f"Rank {rank}: " if len(shown) > 1 else ""
            raise InputError(one.field, one.value, f"{who}{one.remedy}") from cause
    return [one for one in shown if not isinstance(one, InputError)]


def at_first(peers: Peers, act: Callable[[], Made], field: str) -> Made:
    """What rank 0 made, for every process; all call it. Raises what ``together`` does."""
    return cast("Made", together(peers, lambda: act() if peers.rank == 0 else None, field)[0])


def shares_samples(plan: Plan) -> bool:
    """Whether ranks work on the same samples, and must draw the same random numbers."""
    strategies = [run.strategy for stage in plan.stages for run in stage.runs]
    return any(strategy.devices > strategy.batch_degree for strategy in strategies)


def share_random_state(device: torch.device) -> None:
    """Give every rank rank 0's random states: ranks that share samples must drop the same activations."""
    torch.set_rng_state(of_rank_zero(torch.get_rng_state(), device))
    if device.type != "cpu":
        torch.cuda.set_rng_state(of_rank_zero(torch.cuda.get_rng_state(device), device), device)


def of_rank_zero(state: Tensor, device: torch.device) -> Tensor:
    """Rank 0's value of a tensor on the CPU."""
    there = state.to(device)
    dist.broadcast(there, src=0)
    return there.cpu()


def broadcast_values(model: nn.Module, device: torch.device) -> None:
    """Make real parameters and buffers equal to rank 0's; those on the meta device have no values yet."""
    broadcast_each([one for one in (*model.parameters(), *model.buffers()) if not one.is_meta], 0, device)


def broadcast_each(tensors: Sequence[Tensor], source: int, device: torch.device) -> None:
    """Set tensors to the source rank's values, many small ones in one message; all ranks call it.

    Args:
        tensors: of equal shapes and types on every rank.
        source: the rank whose values count.
        device: where the backend communicates.
    """
    if dist.get_world_size() == 1:
        return
    alike = groupby(sorted(tensors, key=_kind), key=_kind)
    for several in (message for _, those in alike for message in batched(those, lambda one: one.nbytes, MESSAGE_BYTES)):
        joined = several[0].detach() if len(several) == 1 else torch.cat([one.detach().flatten() for one in several])
        values = joined.to(device).contiguous()
        dist.broadcast(values, src=source)
        if dist.get_rank() != source:
            for one, part in zip(
                several, values.flatten().split_with_sizes([one.numel() for one in several]), strict=True
            ):
                target = one.detach().squeeze()  # half of a single row may be the message itself, but for its strides
                target.copy_(part.view(target.shape))


def _kind(one: Tensor) -> tuple[str, str]:
    return str(one.dtype), str(one.device)


def batched(items: Iterable[Item], size: Callable[[Item], int], largest: int) -> Iterator[list[Item]]:
    """Consecutive items, as many as are at most ``largest`` together, or a single one."""
    several, total = list[Item](), 0
    for item in items:
        if several and total + size(item) > largest:
            yield several
            several, total = [], 0
        several.append(item)
        total += size(item)
    if several:
        yield several


def from_rank_zero(call: Callable[[], Any]) -> Any:
    """The call's result on rank 0, or its error, on every rank, so that no rank can differ."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = call()
        except Exception as error:
            box[1] = error
    dist.broadcast_object_list(box)
    if box[1] is not None:
        raise box[1]
    return box[0]
