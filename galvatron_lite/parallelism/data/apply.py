"""Data parallelism: gradients are in flat buffers (buckets), which are summed over ranks during backward.

A bucket is a flat buffer of 25 MB at most for parameters of one dtype and one process group. Backward copies each
gradient into the buffer, and ``p.grad`` becomes a view of it. When all gradients of a bucket and of the buckets before
it are complete, its all-reduce starts. The end of backward waits for all of them. If ranks shard optimizer states
(ZeRO-1), a bucket is reduce-scattered instead (``zero.apply``): a copy of it, so that few buckets are in flight at
once.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.data.cost import bucket_of
from galvatron_lite.parallelism.zero.apply import GradientSharing, RowShare, gather_all

COPIES = 1
"""Buckets in flight as copies, during the compute of the next bucket (as in FSDP2)."""
Group = dist.ProcessGroup | None
Kind = tuple[int, int, bool, torch.dtype, torch.dtype, torch.device]


@dataclass(frozen=True, slots=True)
class Reduced:
    """A parameter and the ranks that sum its gradient."""

    parameter: nn.Parameter
    group: Group  # None: this rank alone
    share: RowShare | None = None  # under ZeRO-1, this rank's rows and the ranks of the sum

    @property
    def dtype(self) -> torch.dtype:
        """Of the sum of its gradients."""
        return self.parameter.dtype if self.share is None else self.share.part.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient."""
        return self.parameter.numel() * self.dtype.itemsize


@dataclass(slots=True)
class Bucket:
    """Gradients that are reduced together."""

    group: Group  # the ranks that hold the same parameters
    buffer: Tensor  # all gradients, then for each parameter the number of ranks that have a gradient
    parameters: list[nn.Parameter]  # in the order of the buffer
    views: list[Tensor]  # of the buffer, one for each parameter
    missing: set[int] = field(default_factory=set)  # indices of parameters without gradient so far in this backward
    reduced: bool = False  # whether the buffer holds sums over the group, from an earlier backward
    work: dist.Work | None = None  # the all-reduce in flight
    sharing: GradientSharing | None = None  # how ranks shard the gradients; None: all ranks get all of them
    local_sum: Tensor | None = None  # sum of this rank's input of the last reduction, to see whether all is finite

    @property
    def flags(self) -> Tensor:
        """For each parameter the number of ranks that have a gradient."""
        return self.buffer[-len(self.parameters) :]


class GradientReducer:
    """Sums gradients over ranks during backward.

    Parameters without gradient on this rank count as zero; ``p.grad`` stays None if no rank has a gradient. Gradients
    accumulate over backward passes until they are zeroed, as without a reducer.

    Args:
        parameters: in the order of forward; gradients come in the opposite order.
        bucket_bytes: of a full bucket; ``bucket_of`` all gradients by default.

    Attributes:
        synchronise: whether backward passes end with the reduction; see ``no_sync``.
        is_running: whether such a backward pass has begun.
    """

    def __init__(self, parameters: Sequence[Reduced], bucket_bytes: int | None = None) -> None:
        self.synchronise = True
        self._buckets = _buckets(parameters, bucket_bytes)
        self._next = 0
        self.is_running = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._collector(bucket, place))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for place, parameter in enumerate(bucket.parameters)
        ]

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers of gradients, whose values have no meaning between steps."""
        return [bucket.buffer for bucket in self._buckets]

    @property
    def gave_finite(self) -> bool:
        """Whether this rank's input of the last reduction was finite."""
        return all(bucket.local_sum is None or bool(bucket.local_sum.isfinite()) for bucket in self._buckets)

    def follow(self) -> None:
        """Apply to gradient shards what the user changed in gradients of full parameters."""
        for bucket in self._buckets:
            if bucket.sharing is not None:
                bucket.sharing.follow()

    def close(self) -> None:
        """Stop reducing: remove the hooks, through which parameters keep this object alive."""
        for bucket in self._buckets:
            if bucket.sharing is not None:
                bucket.sharing.keep()
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate this rank's gradients; the next one outside reduces the sum."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before

    def begin(self) -> None:
        """Call before each backward pass; call ``finish`` after it."""
        for bucket in self._buckets:
            _unreduce(bucket)
        if self.synchronise:
            self.is_running, self._next = True, 0
            for bucket in self._buckets:
                bucket.missing = set(range(len(bucket.parameters)))

    def finish(self) -> None:
        """Reduce the remaining buckets (with parameters without gradient), and wait for all reductions."""
        if not self.is_running:
            return
        for bucket in self._buckets[self._next :]:
            bucket.missing.clear()
        self._launch_ready()
        self.is_running = False
        for bucket in self._buckets:
            _complete(bucket)

    def abandon(self) -> None:
        """Wait for reductions in flight and discard them, after an exception in backward."""
        self.is_running = False
        for bucket in self._buckets:
            if bucket.sharing is not None:
                bucket.sharing.abandon()
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    def gather(self) -> None:
        """Gather the rows of parameters that other ranks updated, after the optimizer's step, in the order of
        forward."""
        gather_all([bucket.sharing for bucket in reversed(self._buckets) if bucket.sharing is not None])

    def watch(self, loss: Tensor, reduced: Callable[[], None] | None = None) -> None:
        """Call ``begin`` when a backward pass starts at ``loss``, and ``finish`` when it ends.

        Args:
            loss: of this rank.
            reduced: called when all gradients are reduced, including those that FSDP reduces.
        """
        if loss.requires_grad and (self._buckets or reduced is not None):
            loss.register_hook(partial(self._begin_in_backward, reduced))  # type: ignore[no-untyped-call]

    def _begin_in_backward(self, reduced: Callable[[], None] | None, _gradient: Tensor) -> None:
        if not self.is_running:
            self.begin()
            # private: torch has no public callback for the end of backward. DDP and FSDP2 use this one.
            Variable._execution_engine.queue_callback(partial(self._end_in_backward, reduced))

    def _end_in_backward(self, reduced: Callable[[], None] | None) -> None:
        synchronised = self.is_running
        self.finish()
        if synchronised and reduced is not None:
            # runs after FSDP's callback, which was queued earlier
            Variable._execution_engine.queue_callback(reduced)

    def _collector(self, bucket: Bucket, place: int) -> Callable[[Tensor], None]:
        view = bucket.views[place]

        def collect(parameter: Tensor) -> None:
            if self.synchronise and not (self.is_running or bucket.reduced) and bucket.group is not None:
                remedy = (
                    "Only loss.backward() of what parallel(batch) returns sums gradients over ranks. Call it first, "
                    "or compute the other loss inside the model's forward."
                )
                raise InputError("backward", "of another loss than the model's", remedy)
            if parameter.grad is not None and parameter.grad is not view:
                # the first gradient since zero_grad is a new tensor of autograd
                view.copy_(parameter.grad)
                parameter.grad = view
            bucket.missing.discard(place)
            if not bucket.missing:
                self._launch_ready()

        return collect

    def _launch_ready(self) -> None:
        """Start the reductions of complete buckets, in the same order on all ranks."""
        while self.is_running and self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            sent_before = self._next - COPIES
            self._next += 1
            if sent_before >= 0 and self._buckets[sent_before].sharing is not None:
                _complete(self._buckets[sent_before])
            if bucket.group is not None or bucket.sharing is not None:
                _launch(bucket)


def _buckets(parameters: Sequence[Reduced], bucket_bytes: int | None) -> list[Bucket]:
    """Buckets of parameters of one kind, in the order in which backward completes them."""
    bucket_bytes = bucket_bytes or bucket_of(sum(parameter.nbytes for parameter in parameters))
    backward = [item for item in parameters if item.parameter.requires_grad][::-1]
    order = {id(item.parameter): index for index, item in enumerate(backward)}
    buckets = [items for kind in dict.fromkeys(map(_kind, backward)) for items in _cut(backward, kind, bucket_bytes)]
    return [_bucket(items) for items in sorted(buckets, key=lambda items: order[id(items[-1].parameter)])]


def _cut(backward: Sequence[Reduced], kind: Kind, bucket_bytes: int) -> Iterator[list[Reduced]]:
    bucket, size = list[Reduced](), 0
    for item in backward:
        if _kind(item) == kind:
            bucket.append(item)
            size += item.nbytes
        if size >= bucket_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _kind(item: Reduced) -> Kind:
    ranks = item.group if item.share is None else item.share.ranks
    replicas = None if item.share is None else item.share.replicas
    return id(ranks), id(replicas), item.share is None, item.parameter.dtype, item.dtype, item.parameter.device


def _bucket(items: Sequence[Reduced]) -> Bucket:
    parameters = [item.parameter for item in items]
    sizes = [parameter.numel() for parameter in parameters]
    buffer = torch.zeros(sum(sizes) + len(sizes), dtype=items[0].dtype, device=parameters[0].device)
    parts = torch.split(buffer[: sum(sizes)], sizes)
    views = [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]
    shares = [item.share for item in items if item.share is not None]
    return Bucket(items[0].group, buffer, parameters, views, sharing=GradientSharing(shares) if shares else None)


def _unreduce(bucket: Bucket) -> None:
    """Divide gradients that are sums over n ranks by n, since the next sum would count them n times."""
    if bucket.sharing is not None:
        bucket.sharing.keep()
    if bucket.reduced and bucket.group is not None and any(_present(bucket)):
        bucket.buffer.div_(bucket.group.size())
    bucket.reduced = False


def _present(bucket: Bucket) -> Iterator[bool]:
    return (parameter.grad is view for parameter, view in zip(bucket.parameters, bucket.views, strict=True))


def _launch(bucket: Bucket) -> None:
    present = list(_present(bucket))
    if all(present):
        bucket.flags.fill_(1.0)
    else:
        for view in itertools.compress(bucket.views, map(operator.not_, present)):
            view.zero_()
        bucket.flags.copy_(torch.tensor(present, dtype=bucket.buffer.dtype))
    bucket.local_sum = bucket.buffer.sum()
    if bucket.sharing is not None:
        bucket.sharing.launch(bucket.views, bucket.flags)
    else:
        bucket.work = dist.all_reduce(bucket.buffer, group=bucket.group, async_op=True)


def _complete(bucket: Bucket) -> None:
    if bucket.sharing is not None:
        bucket.sharing.complete(bucket.views, list(_present(bucket)))
    if bucket.work is None:
        return
    bucket.work.wait()
    bucket.work, bucket.reduced = None, True
    absent = [index for index, is_present in enumerate(_present(bucket)) if not is_present]
    ranks = bucket.flags.tolist() if absent else []
    for index in absent:
        bucket.parameters[index].grad = bucket.views[index] if ranks[index] else None
