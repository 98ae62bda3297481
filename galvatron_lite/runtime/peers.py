"""What all processes do together: start with equal values, exchange objects, and succeed or fail as one."""

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

Result = TypeVar("Result")
Item = TypeVar("Item")
MESSAGE_BYTES = 2**25
"""Tensors are broadcast together up to this size."""


def everyone(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of a group (of the world), by rank; all of them call it."""
    values: list[Any] = [value] * dist.get_world_size(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


class Peers:
    """The ranks of the default process group. All ranks create it together.

    Args:
        timeout: seconds that a rank waits for the others; None: this process works alone, even if there are others.
    """

    def __init__(self, timeout: float | None) -> None:
        self.group: dist.ProcessGroup | None = None
        if timeout is not None and dist.get_world_size() > 1:
            # on the CPU, whatever training uses: values are small, and in host memory
            self.group = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return 0 if self.group is None else dist.get_rank()

    @property
    def size(self) -> int:
        """Number of processes."""
        return 1 if self.group is None else self.group.size()

    def everyone(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank; all call it.

        Raises:
            LaunchError: a process is gone, or does not answer in time.
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


def together(peers: Peers, act: Callable[[], Result], field: str) -> list[Result]:
    """Call a function on all processes, and return its results by rank; all call it.

    Raises:
        InputError: it raised an error on a process; every process raises InputError, which names the rank.
        LaunchError: a process is gone.
    """
    result: Result | InputError
    cause: BaseException | None = None
    try:
        result = act()
    except InputError as error:
        value = None if error.value is None else str(error.value)  # which all can unpickle
        result, cause = InputError(error.field, value, error.remedy), error
    except OSError as error:
        result, cause = InputError(field, str(error.filename or ""), f"{error.strerror or error}."), error
    except GalvatronError:
        raise
    except BaseException as error:  # an interrupt, too: the others wait for this process
        result, cause = InputError(field, "", f"{type(error).__name__}: {error}."), error
    results: list[Result | InputError] = peers.everyone(result)
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    for rank, other in enumerate(results):
        if isinstance(other, InputError):
            if len(results) == 1 and isinstance(cause, InputError):
                raise cause
            who = f"Rank {rank}: " if len(results) > 1 else ""
            raise InputError(other.field, other.value, f"{who}{other.remedy}") from cause
    return [other for other in results if not isinstance(other, InputError)]


def at_first(peers: Peers, act: Callable[[], Result], field: str) -> Result:
    """Call a function on rank 0, and return its result on every process; all call it. Raises as ``together``."""
    return cast("Result", together(peers, lambda: act() if peers.rank == 0 else None, field)[0])


def shares_samples(plan: Plan) -> bool:
    """Whether ranks work on the same samples, and must draw the same random numbers."""
    strategies = [run.strategy for stage in plan.stages for run in stage.runs]
    return any(strategy.devices > strategy.batch_degree for strategy in strategies)


def share_random_state(device: torch.device) -> None:
    """Set all random states to those of rank 0: ranks that share samples must drop the same activations."""
    torch.set_rng_state(of_rank_zero(torch.get_rng_state(), device))
    if device.type != "cpu":
        torch.cuda.set_rng_state(of_rank_zero(torch.cuda.get_rng_state(device), device), device)


def of_rank_zero(tensor: Tensor, device: torch.device) -> Tensor:
    """Rank 0's value of a tensor, on the CPU."""
    on_device = tensor.to(device)
    dist.broadcast(on_device, src=0)
    return on_device.cpu()


def broadcast_values(model: nn.Module, device: torch.device) -> None:
    """Set parameters and buffers to the values of rank 0; those on the meta device have no values yet."""
    broadcast_each([one for one in (*model.parameters(), *model.buffers()) if not one.is_meta], 0, device)


def broadcast_each(tensors: Sequence[Tensor], source: int, device: torch.device) -> None:
    """Set tensors to the values of a rank, many small ones in one message; all ranks call it.

    Their shapes and types are equal on every rank; the backend communicates on ``device``.
    """
    if dist.get_world_size() == 1:
        return
    by_kind = groupby(sorted(tensors, key=_kind), key=_kind)
    for message in (part for _, alike in by_kind for part in batched(alike, lambda one: one.nbytes, MESSAGE_BYTES)):
        joined = message[0].detach() if len(message) == 1 else torch.cat([one.detach().flatten() for one in message])
        values = joined.to(device).contiguous()
        dist.broadcast(values, src=source)
        if dist.get_rank() != source:
            sizes = [tensor.numel() for tensor in message]
            for tensor, part in zip(message, values.flatten().split_with_sizes(sizes), strict=True):
                target = tensor.detach().squeeze()  # half of a single row may be the message itself, except for strides
                target.copy_(part.view(target.shape))


def _kind(tensor: Tensor) -> tuple[str, str]:
    return str(tensor.dtype), str(tensor.device)


def batched(items: Iterable[Item], size: Callable[[Item], int], largest: int) -> Iterator[list[Item]]:
    """Yield lists of consecutive items of at most ``largest`` in total, or of a single item."""
    batch, total = list[Item](), 0
    for item in items:
        if batch and total + size(item) > largest:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch


def from_rank_zero(call: Callable[[], Any]) -> Any:
    """Call a function on rank 0, and return its result, or raise its error, on every rank."""
    result: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result[0] = call()
        except Exception as error:
            result[1] = error
    dist.broadcast_object_list(result)
    if result[1] is not None:
        raise result[1]
    return result[0]
