"""A backend of ``torch.distributed`` that runs one rank without the others.

Collectives return at once and are logged. As the backend is registered with torch, it sees the messages of this
project's runtime, of FSDP2 and of functional collectives alike. Received tensors have the right shape and no values;
only small ones of integers, by which stages announce shapes to one another, have the values that the sending rank
announced when it ran (``Announced``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import debug
from torch.futures import Future

from galvatron_lite.errors import LaunchError
from galvatron_lite.verify.schema import NOBODY, During, Message, MessageType
from galvatron_lite.world import DRY_BACKEND

EVERYONE = "all ranks"  # purpose of the group that torch calls ``default_pg``

Announced = dict[tuple[str, int], list[Tensor]]
"""Integers that a rank sent, in order, by the group's purpose and the receiver's rank in the group."""
Hear = Callable[[int, str, int, int], Tensor | None]
"""``hear(source, purpose, place, number)``: what world rank ``source`` sent as its ``number``-th announcement to rank
``place`` of a group; None if it has not run that far."""


class UnheardError(LaunchError):
    """A rank receives an announcement of a rank that has not run that far."""


@dataclass(slots=True)
class RankPlace:
    """Where in its step a rank is; kept up to date by whoever runs the rank."""

    phase: During = During.SETUP
    microbatch: int = NOBODY  # ``NOBODY``: none
    layer: str = ""  # that runs, or ran last
    between: bool = False  # whether code after its forward runs


@dataclass(slots=True)
class MessageLog:
    """Messages of one rank."""

    place: RankPlace = field(default_factory=RankPlace)
    messages: list[Message] = field(default_factory=list)
    announced: Announced = field(default_factory=dict)  # by this rank
    hear: Hear | None = None  # returns announcements of other ranks
    heard: dict[tuple[int, str], int] = field(default_factory=dict)  # announcements received, by source and purpose

    def listen(self, source: int, purpose: str, place: int) -> Tensor:
        """Return the next announcement of world rank ``source`` to rank ``place`` of a group.

        Raises:
            UnheardError: the source has not run that far.
        """
        number = self.heard.get((source, purpose), 0)
        self.heard[source, purpose] = number + 1
        heard = None if self.hear is None else self.hear(source, purpose, place, number)
        if heard is None:
            raise UnheardError(f"Rank {source} must be run before: what it announces ({purpose}) is not known.")
        return heard

    def mark_waited(self, numbers: Sequence[int]) -> None:
        """Record that the rank waits for messages that it started."""
        for number in numbers:
            message = self.messages[number]
            if message.waited == NOBODY:
                self.messages[number] = replace(message, waited=len(self.messages), used=self.place.microbatch)


class _DoneWork(dist.Work):
    """A completed collective; the first wait for it is logged."""

    def __init__(self, log: MessageLog, numbers: Sequence[int], result: object) -> None:
        super().__init__()
        self._log, self.numbers, self._result = log, tuple(numbers), result

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 - torch's signature
        self._log.mark_waited(self.numbers)
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future


class _DryGroup(dist.ProcessGroup):
    """A process group in which only this rank runs.

    It has the methods that ``torch.distributed`` calls, by their names in torch 2.11 and in 2.13.
    """

    def __init__(self, options: Any, log: MessageLog) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._log, self._name, self._place = log, str(options.group_id), int(options.group_rank)
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return DRY_BACKEND

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def _purpose(self) -> str:
        return EVERYONE if self.group_desc == "default_pg" else str(self.group_desc)

    def _note(
        self, kind: MessageType, tensors: Any, nbytes: int | None = None, *, result: object = None, **more: Any
    ) -> _DoneWork:
        """Log a message of a tensor, or of the first of several, and return completed work that holds ``result``."""
        place, log = self._log.place, self._log
        tensor: Tensor | None = tensors[0] if isinstance(tensors, (list, tuple)) else tensors
        message = Message(
            number=len(log.messages), kind=kind, ranks=self._ranks, purpose=self._purpose,
            shape=() if tensor is None else tuple(tensor.shape),
            dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            bytes=(0 if tensor is None else tensor.nbytes) if nbytes is None else nbytes,
            phase=place.phase, microbatch=place.microbatch, layer=place.layer,
            **({"peer": NOBODY, "tag": 0} | more),
        )  # fmt: skip
        log.messages.append(message)
        return _DoneWork(log, [message.number], tensors if result is None else result)

    def _combine(self, works: Iterable[_DoneWork], result: object) -> _DoneWork:
        return _DoneWork(self._log, [number for work in works for number in work.numbers], result)

    def _root(self, opts: Any) -> int:
        """Return the world rank of a collective's root."""
        return int(self._ranks[0 if opts is None else opts.rootRank])

    def allreduce(self, tensors: Any, opts: Any = None) -> _DoneWork:  # type: ignore[override]
        return self._note(MessageType.ALL_REDUCE, tensors, operator=_operator(opts))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> _DoneWork:
        return self._combine([self.allreduce([tensor], opts) for tensor in tensors], tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> _DoneWork:  # type: ignore[override]
        root = self._root(opts)
        nbytes = None if root == self._ranks[self._place] else 0
        return self._note(MessageType.BROADCAST, tensors, nbytes, peer=root)

    def reduce(self, tensors: Any, opts: Any = None) -> _DoneWork:  # type: ignore[override]
        return self._note(MessageType.REDUCE, tensors, peer=self._root(opts), operator=_operator(opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _DoneWork:  # noqa: ARG002
        works = [self._note(MessageType.ALL_GATHER, input_) for input_ in inputs]
        for gathered, tensor in zip(outputs, inputs, strict=True):
            for output in gathered:
                _copy_if_alike(output, tensor)
        return self._combine(works, outputs)

    allgather_coalesced = allgather  # type: ignore[assignment]

    def _allgather_base(self, output: Tensor, part: Tensor, opts: Any = None) -> _DoneWork:  # noqa: ARG002
        return self._note(MessageType.ALL_GATHER, part, result=output)

    all_gather_single = _allgather_base  # type: ignore[assignment]

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _DoneWork:  # noqa: ARG002
        return self._combine(map(self._allgather_base, outputs, inputs), outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> _DoneWork:  # type: ignore[override]
        kind, operator = MessageType.REDUCE_SCATTER, _operator(opts)
        works = [self._note(kind, parts, sum(part.nbytes for part in parts), operator=operator) for parts in inputs]
        return self._combine(works, outputs)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> _DoneWork:
        return self._note(MessageType.REDUCE_SCATTER, tensor, operator=_operator(opts), result=output)

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _DoneWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._combine([self._reduce_scatter_base(output, tensor, opts) for output, tensor in pairs], outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> _DoneWork:
        del opts
        if has_value(tensor):
            _exchange_if_even(output, tensor, input_sizes, len(self._ranks), self._place)
        sent, taken = tuple(map(int, input_sizes)), tuple(map(int, output_sizes))
        return self._note(MessageType.ALL_TO_ALL, tensor, result=output, sent=sent, taken=taken)

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> _DoneWork:
        del opts
        sent, taken = (tuple(tensor.numel() for tensor in tensors) for tensors in (inputs, outputs))
        nbytes = sum(input_.nbytes for input_ in inputs)
        return self._note(MessageType.ALL_TO_ALL, inputs, nbytes, result=outputs, sent=sent, taken=taken)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> _DoneWork:  # type: ignore[override]
        for output in outputs[0] if outputs else ():
            _copy_if_alike(output, inputs[0])
        return self._note(MessageType.GATHER, inputs, peer=self._root(opts), result=outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> _DoneWork:  # type: ignore[override]
        nbytes = sum(input_.nbytes for input_ in inputs[0]) if inputs else 0
        return self._note(MessageType.SCATTER, outputs, nbytes, peer=self._root(opts))

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> _DoneWork:
        """Log a send; a tensor with values is an announcement, kept for the run of the other rank."""
        if has_value(tensors[0]):
            self._log.announced.setdefault((self._purpose, target), []).append(tensors[0].clone())
        return self._note(MessageType.SEND, tensors, peer=self._ranks[target], tag=tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _DoneWork:
        """Log a receive; a tensor with values gets those of the other rank's announcement."""
        if has_value(tensors[0]):
            tensors[0].copy_(self._log.listen(self._ranks[source], self._purpose, self._place))
        return self._note(MessageType.RECEIVE, tensors, 0, peer=self._ranks[source], tag=tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> _DoneWork:
        return self._note(MessageType.RECEIVE, tensors, 0, tag=tag)

    def barrier(self, opts: Any = None) -> _DoneWork:
        del opts
        return self._note(MessageType.BARRIER, None)


def has_value(tensor: Tensor) -> bool:
    """Whether a tensor has data, as small ones of integers do."""
    return type(tensor) is Tensor and not tensor.is_meta and not tensor.is_floating_point()


def _operator(opts: Any) -> str:
    operator = getattr(opts, "reduceOp", None)
    return "sum" if operator is None else str(getattr(operator, "op", operator)).rpartition(".")[-1].lower()


def _copy_if_alike(output: Tensor, tensor: Tensor) -> None:
    """Receive what this rank sends, as if the other ranks sent the same values, if the shapes agree."""
    if output.shape == tensor.shape and output.dtype == tensor.dtype:
        output.copy_(tensor)


def _exchange_if_even(output: Tensor, tensor: Tensor, input_sizes: Sequence[int], size: int, rank: int) -> None:
    """Receive from each of ``size`` ranks what this one sends to itself, if that fills the output."""
    local: Tensor = torch.split(tensor, list(input_sizes) or len(tensor) // size)[rank]
    if len(local) * size == len(output):
        output.copy_(torch.cat([local] * size))


@contextmanager
def dry_world(rank: int, size: int, log: MessageLog) -> Iterator[None]:
    """Be one rank of a world of ``size`` ranks whose others do not run.

    Raises:
        LaunchError: this process has joined a world.
    """
    if dist.is_initialized():
        raise LaunchError("A world of processes runs here already; dry runs need a process of their own.")
    if not dist.is_backend_available(DRY_BACKEND):
        dist.Backend.register_backend(DRY_BACKEND, _create_group, extended_api=True, devices=["cpu", "cuda"])
    before, hook = _LOG.set(log), sys.excepthook
    _forget_meshes()
    dist.init_process_group(DRY_BACKEND, store=dist.HashStore(), rank=rank, world_size=size)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # init_process_group installs one that prefixes errors with this rank
        _LOG.reset(before)
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear DTensor's cache of the layouts that operations return.

    Its entries hold the mesh of the first call, and meshes of the same ranks compare equal whichever rank this process
    is, so the next world would get this one's meshes.
    """
    # private, as torch has no public function; the name is the same from 2.11 to 2.13
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


_LOG: ContextVar[MessageLog] = ContextVar("galvatron_dry_log")
"""Log of the current dry world; torch passes no arguments of ours to a backend."""


def _create_group(options: Any, _more: Any) -> _DryGroup:
    return _DryGroup(options, _LOG.get())
