"""ZeRO-1: every rank computes with whole parameters and whole gradients, and updates its own rows of them.

The rows that a rank updates are a DTensor parameter (cut as ``torch.chunk`` does, like FSDP2's, see ``cut``) whose
storage is the whole parameter's: an optimizer that steps on it keeps states of these rows only, and changes the whole
parameter in place. Gradients are summed by one reduce-scatter a bucket, beside the end of backward; once the optimizer
has stepped, one all-gather a bucket brings the rows of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from galvatron_lite.parallelism.collectives import all_gather, reduce_scatter
from galvatron_lite.parallelism.zero.cost import cut_dim


@dataclass(frozen=True, slots=True)
class RowShare:
    """This rank's rows of a parameter."""

    whole: nn.Parameter  # what the model computes with
    part: nn.Parameter  # the rows, as the optimizer takes them; its storage is the whole parameter's
    dim: int  # along which rows lie; all before it have an extent of 1
    first: int  # first, stop: which rows
    stop: int
    most: int  # rows of the rank that has most
    ranks: dist.ProcessGroup  # that share the rows
    replicas: dist.ProcessGroup | None  # ranks with equal rows, and other samples; None where there are none

    @property
    def items_of_row(self) -> int:
        """Items of one row."""
        return self.whole.numel() // self.whole.shape[self.dim]

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor like the parameter: a view, consecutive in memory where that is."""
        return tensor.narrow(self.dim, self.first, self.stop - self.first)

    def shown(self, rows: Tensor) -> DTensor:
        """These rows of a tensor that is cut like the parameter."""
        like = self.part
        assert isinstance(like, DTensor)
        return DTensor.from_local(
            rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def share_of(parameter: nn.Parameter, mesh: DeviceMesh) -> RowShare | None:
    """The rows of a parameter that this rank updates; None where it has no rows to share.

    Args:
        parameter: whole, on the device.
        mesh: axes (data, zero), or only zero.
    """
    if parameter.dim() == 0 or parameter.numel() == 0 or not parameter.requires_grad:
        return None
    last = mesh.ndim - 1
    ranks = mesh.size(last)
    dim = cut_dim(parameter.shape, ranks, zero_stage=1)
    rows = parameter.shape[dim]
    most = -(-rows // ranks)
    first = min(mesh.get_local_rank(last) * most, rows)
    stop = min(first + most, rows)
    placements: list[Placement] = [*([Replicate()] * last), Shard(dim)]
    local = DTensor.from_local(
        parameter.detach().narrow(dim, first, stop - first),
        mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    replicas = mesh.get_group(0) if last else None
    return RowShare(parameter, nn.Parameter(local), dim, first, stop, most, mesh.get_group(last), replicas)


@dataclass(slots=True)
class PendingReduce:
    """A reduce-scatter under way."""

    own: Tensor  # what this rank receives
    sent: Tensor  # kept until it has arrived
    scattering: dist.Work  # of the first
    work: dist.Work | None  # of the last message; None where the sum over replicas has yet to start


@dataclass(slots=True)
class GradientSharing:
    """How the ranks share the gradients of one bucket."""

    shares: list[RowShare]  # of its parameters, in the order of the bucket; all over the same ranks
    # where each begins in a rank's part of a message, and at last where they end
    offsets: list[int] = field(init=False)
    flight: PendingReduce | None = None  # the reduce-scatter under way
    side: torch.cuda.Stream | None = None

    def __post_init__(self) -> None:
        self.offsets = [0]
        for share in self.shares:
            self.offsets.append(self.offsets[-1] + share.most * share.items_of_row)

    def launch(self, views: Sequence[Tensor], flags: Tensor) -> None:
        """Start summing whole gradients, so that every rank gets its rows; flags are summed for all ranks."""
        ranks, replicas = self.shares[0].ranks, self.shares[0].replicas
        width = self.offsets[-1]
        sent = flags.new_zeros(ranks.size(), width + len(flags))
        for view, place in zip(views, self._places(sent), strict=True):
            for flat, staged in _pairs(view.view(-1), place):
                staged.copy_(flat)
        sent[:, width:] = flags
        own = torch.empty_like(sent[0])
        if replicas is None or not own.is_cuda:
            first = reduce_scatter(own, sent.view(-1), ranks, async_op=True)
            self.flight = PendingReduce(own, sent, first, first if replicas is None else None)
        else:
            self.flight = self._chained(own, sent, ranks, replicas)

    def _chained(
        self, tensor: Tensor, sent: Tensor, ranks: dist.ProcessGroup, replicas: dist.ProcessGroup
    ) -> PendingReduce:
        """Both messages in the background: a stream of its own waits for the first."""
        self.side = self.side or torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self.side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.side):
            first = reduce_scatter(tensor, sent.view(-1), ranks, async_op=True)
            first.wait()
            return PendingReduce(tensor, sent, first, dist.all_reduce(tensor, group=replicas, async_op=True))

    def complete(self, views: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Wait for the sums, and add this rank's rows to what the optimizer sees; whole gradients are gone then.

        Args:
            views: of the bucket's buffer, one a parameter; the rows' gradients stay in them.
            present: which parameters got a gradient on this rank.
        """
        flight, self.flight = self.flight, None
        if flight is None:
            return
        flight.scattering.wait()
        replicas = self.shares[0].replicas
        if flight.work is None and replicas is not None:
            dist.all_reduce(flight.own, group=replicas)
        elif flight.work is not None:
            flight.work.wait()
        used = list(present) if all(present) else (flight.own[self.offsets[-1] :] > 0).tolist()
        for share, start, view, there in zip(self.shares, self.offsets, views, used, strict=False):
            share.whole.grad = None
            if there:
                rows = share.of(view)
                rows.copy_(flight.own[start : start + rows.numel()].view_as(rows))
                before = share.part.grad
                if isinstance(before, DTensor):
                    before.to_local().add_(rows)
                else:
                    share.part.grad = share.shown(rows)

    def keep(self) -> None:
        """Move gradients of an earlier backward pass out of the buffer, before the next one fills it."""
        for share in self.shares:
            if isinstance(share.part.grad, DTensor):
                share.part.grad = share.shown(share.part.grad.to_local().clone())

    @torch.no_grad()
    def start_gather(self) -> Callable[[], None]:
        """Start bringing the rows that other ranks updated; call the result to wait, and to write them."""
        ranks, whole = self.shares[0].ranks, self.shares[0].whole
        own = whole.new_zeros(self.offsets[-1])
        for share, start in zip(self.shares, self.offsets, strict=False):
            rows = share.of(share.whole.detach())
            own[start : start + rows.numel()] = rows.reshape(-1)
        everyone = whole.new_empty(ranks.size(), len(own))
        work = all_gather(everyone.view(-1), own, ranks, async_op=True)

        @torch.no_grad()
        def finish(_sent: Tensor = own) -> None:
            work.wait()
            for share, place in zip(self.shares, self._places(everyone), strict=True):
                parameter = share.whole.detach()
                consecutive = parameter.is_contiguous()
                flat = parameter.view(-1) if consecutive else parameter.new_empty(parameter.numel())
                for there, staged in _pairs(flat, place):
                    there.copy_(staged)
                if not consecutive:
                    parameter.copy_(flat.view(parameter.shape))

        return finish

    def _places(self, staged: Tensor) -> Iterator[Tensor]:
        """Of a message, by rank, what belongs to each parameter."""
        for start, stop in pairwise(self.offsets):
            yield staged[:, start:stop]


def gather_all(sharings: Sequence[GradientSharing]) -> None:
    """Bring the rows that other ranks updated; two buckets are under way at a time."""
    finish: Callable[[], None] = lambda: None  # noqa: E731
    for sharing in sharings:
        finish_before, finish = finish, sharing.start_gather()
        finish_before()
    finish()


def _pairs(flat: Tensor, staged: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of a whole tensor and their places in the parts of a message, of which the last may be short."""
    size = staged.shape[1]
    full = flat.numel() // size
    yield flat[: full * size].view(full, size), staged[:full]
    rest = flat[full * size :]
    if rest.numel():
        yield rest, staged[full, : rest.numel()]
