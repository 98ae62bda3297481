"""Data parallelism: gradients live in flat buffers that are summed over their ranks while backward still runs.

A bucket is one flat buffer, of 25 MB at most, for parameters of one dtype and one process group. In backward every
gradient is copied to its place, and ``p.grad`` becomes a view of it. When all gradients of a bucket are there, and
those of the buckets before it, its all-reduce starts. At the end of backward all are waited for. Where ranks share the
optimizer's states (ZeRO-1), a reduce-scatter takes the all-reduce's place (``zero.shares``): of a copy, so that few are
under way at a time.
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
"""Buckets whose gradients are there twice, on their way beside the compute of the next one (as FSDP2 does)."""
Group = dist.ProcessGroup | None
Kind = tuple[int, int, bool, torch.dtype, torch.dtype, torch.device]


@dataclass(frozen=True, slots=True)
class Reduced:
    """A parameter and the ranks over which its gradient is summed (None: this rank alone).

    Under ZeRO-1 ``share`` is this rank's rows of it, and says over which ranks.
    """

    parameter: nn.Parameter
    group: Group
    share: RowShare | None = None

    @property
    def dtype(self) -> torch.dtype:
        """In which its gradients are summed."""
        return self.parameter.dtype if self.share is None else self.share.part.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient."""
        return self.parameter.numel() * self.dtype.itemsize


@dataclass(slots=True)
class Bucket:
    """Gradients that are reduced together."""

    group: Group  # the ranks that hold the same parameters
    buffer: Tensor  # all gradients, then one item a parameter: on how many ranks it got a gradient
    parameters: list[nn.Parameter]  # in the order of the buffer
    views: list[Tensor]  # their places in the buffer
    missing: set[int] = field(default_factory=set)  # parameters whose gradient is not there yet in this backward pass
    reduced: bool = False  # whether the buffer holds sums over the group, from an earlier backward pass
    work: dist.Work | None = None  # the all-reduce under way
    sharing: GradientSharing | None = None  # how ranks share the gradients; None where each gets all
    # the sum of what this rank gave to the last reduction: not finite where an item of it is not
    local_sum: Tensor | None = None

    @property
    def flags(self) -> Tensor:
        """On how many ranks each parameter got a gradient."""
        return self.buffer[-len(self.parameters) :]


class GradientReducer:
    """Sums gradients over ranks during backward.

    Parameters that got no gradient here count as zero; ``p.grad`` stays None where no rank has a gradient.
    Gradients add up over backward passes until they are zeroed, as without a reducer.

    Args:
        parameters: in the order they are used in forward; gradients come in the opposite order.
        bucket_bytes: when a bucket is full; an eighth of all gradients, between the limits, if not given.

    Attributes:
        synchronise: whether backward passes end with the reduction; see ``no_sync``.
        is_running: whether a backward pass has begun that does so.
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
        """Where gradients are summed; between steps, what is in them does not matter."""
        return [bucket.buffer for bucket in self._buckets]

    @property
    def gave_finite(self) -> bool:
        """Whether all that this rank gave to the last reduction was finite."""
        return all(bucket.local_sum is None or bool(bucket.local_sum.isfinite()) for bucket in self._buckets)

    def follow(self) -> None:
        """What the user did to gradients of complete parameters holds for what ranks have of them."""
        for bucket in self._buckets:
            if bucket.sharing is not None:
                bucket.sharing.follow()

    def close(self) -> None:
        """Reduce no more: parameters let go of this object, which they hold where Python's collector does not see."""
        for bucket in self._buckets:
            if bucket.sharing is not None:
                bucket.sharing.keep()
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add up this rank's gradients; the next one outside reduces the sum."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before

    def begin(self) -> None:
        """Call before every backward pass; call ``finish`` after it."""
        for bucket in self._buckets:
            _unreduce(bucket)
        if self.synchronise:
            self.is_running, self._next = True, 0
            for bucket in self._buckets:
                bucket.missing = set(range(len(bucket.parameters)))

    def finish(self) -> None:
        """Reduce what is left (buckets with parameters that got no gradient), and wait for all reductions."""
        if not self.is_running:
            return
        for bucket in self._buckets[self._next :]:
            bucket.missing.clear()
        self._launch_ready()
        self.is_running = False
        for bucket in self._buckets:
            _complete(bucket)

    def abandon(self) -> None:
        """After a backward pass that an exception ended: wait for what is under way, and let go of it."""
        self.is_running = False
        for bucket in self._buckets:
            if bucket.sharing is not None:
                bucket.sharing.abandon()
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    def gather(self) -> None:
        """Once the optimizer has stepped: bring the rows of parameters that other ranks updated, in forward's order."""
        gather_all([bucket.sharing for bucket in reversed(self._buckets) if bucket.sharing is not None])

    def watch(self, loss: Tensor, reduced: Callable[[], None] | None = None) -> None:
        """Begin when a backward pass starts at ``loss``, and finish when it ends, whatever parameters it reaches.

        Args:
            loss: of this rank.
            reduced: called when gradients are reduced, those that FSDP reduces included.
        """
        if loss.requires_grad and (self._buckets or reduced is not None):
            loss.register_hook(partial(self._begin_in_backward, reduced))  # type: ignore[no-untyped-call]

    def _begin_in_backward(self, reduced: Callable[[], None] | None, _gradient: Tensor) -> None:
        if not self.is_running:
            self.begin()
            # private: torch has no public way to run something when a backward pass ends. DDP and FSDP2 use the same.
            Variable._execution_engine.queue_callback(partial(self._end_in_backward, reduced))

    def _end_in_backward(self, reduced: Callable[[], None] | None) -> None:
        synchronised = self.is_running
        self.finish()
        if synchronised and reduced is not None:
            # what FSDP does when backward ends comes first: it was queued before this
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
                # made by autograd, the first since gradients were zeroed: move it to its place
                view.copy_(parameter.grad)
                parameter.grad = view
            bucket.missing.discard(place)
            if not bucket.missing:
                self._launch_ready()

        return collect

    def _launch_ready(self) -> None:
        """Start the reductions whose turn it is; always in the same order, as all ranks must."""
        while self.is_running and self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            sent_before = self._next - COPIES
            self._next += 1
            if sent_before >= 0 and self._buckets[sent_before].sharing is not None:
                _complete(self._buckets[sent_before])
            if bucket.group is not None or bucket.sharing is not None:
                _launch(bucket)


def _buckets(parameters: Sequence[Reduced], bucket_bytes: int | None) -> list[Bucket]:
    """Buckets of parameters that are alike, in the order in which backward fills them."""
    bucket_bytes = bucket_bytes or bucket_of(sum(parameter.nbytes for parameter in parameters))
    backward = [parameter for parameter in parameters if parameter.parameter.requires_grad][::-1]
    place = {id(one.parameter): index for index, one in enumerate(backward)}
    cut = [chosen for kind in dict.fromkeys(map(_kind, backward)) for chosen in _cut(backward, kind, bucket_bytes)]
    return [_bucket(chosen) for chosen in sorted(cut, key=lambda chosen: place[id(chosen[-1].parameter)])]


def _cut(backward: Sequence[Reduced], kind: Kind, bucket_bytes: int) -> Iterator[list[Reduced]]:
    chosen, size = list[Reduced](), 0
    for one in backward:
        if _kind(one) == kind:
            chosen.append(one)
            size += one.nbytes
        if size >= bucket_bytes:
            yield chosen
            chosen, size = [], 0
    if chosen:
        yield chosen


def _kind(one: Reduced) -> Kind:
    ranks = one.group if one.share is None else one.share.ranks
    replicas = None if one.share is None else one.share.replicas
    return id(ranks), id(replicas), one.share is None, one.parameter.dtype, one.dtype, one.parameter.device


def _bucket(chosen: Sequence[Reduced]) -> Bucket:
    parameters = [one.parameter for one in chosen]
    sizes = [parameter.numel() for parameter in parameters]
    first = parameters[0]
    buffer = torch.zeros(sum(sizes) + len(sizes), dtype=chosen[0].dtype, device=first.device)
    parts = torch.split(buffer[: sum(sizes)], sizes)
    views = [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]
    shares = [one.share for one in chosen if one.share is not None]
    return Bucket(chosen[0].group, buffer, parameters, views, sharing=GradientSharing(shares) if shares else None)


def _unreduce(bucket: Bucket) -> None:
    """Gradients that were summed over n ranks before would count n times in the next sum: divide them by n."""
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
    absent = [place for place, there in enumerate(_present(bucket)) if not there]
    used = bucket.flags.tolist() if absent else []
    for place in absent:
        bucket.parameters[place].grad = bucket.views[place] if used[place] else None
