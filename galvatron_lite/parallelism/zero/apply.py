"""ZeRO: FSDP2 (``fully_shard``) for every layer, over the ranks that share its states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.parallelism.process_groups import all_gather, reduce_scatter
from galvatron_lite.parallelism.zero.cost import cut_dim

# ZeRO-1: every rank computes with whole parameters and whole gradients, and updates its own rows of them.
#
# The rows that a rank updates are a DTensor parameter (cut as ``torch.chunk`` does, like FSDP2's, see ``cut``) whose
# storage is the whole parameter's: an optimizer that steps on it keeps states of these rows only, and changes the whole
# parameter in place. Gradients are summed by one reduce-scatter a bucket, beside the end of backward; once the
# optimizer has stepped, one all-gather a bucket brings the rows of the others.
#
# Under bf16 and fp16 the module holds weights in the precision of compute, and each rank float32 masters of its rows,
# with a storage of their own, in place of them: 2 + 4 / ranks bytes an item, not 4 and a copy of 2. Weights are what
# forward casts anyway: parameters of two dims or more (as FSDP2 gathers all). Those of one dim are next to nothing, and
# norms with running statistics want theirs in float32. Gradients are summed in float32.


@dataclass(frozen=True, slots=True)
class RowShare:
    """This rank's rows of a parameter."""

    full: nn.Parameter  # what the model computes with
    part: nn.Parameter  # the rows, as the optimizer takes them; its storage is the whole parameter's, or of masters
    dim: int  # along which rows lie; all before it have an extent of 1
    first: int  # first, stop: which rows
    stop: int
    most: int  # rows of the rank that has most
    ranks: dist.ProcessGroup  # that share the rows
    replicas: dist.ProcessGroup | None  # ranks with equal rows, and other samples; None where there are none

    @property
    def has_masters(self) -> bool:
        """Whether the rows are masters of a parameter that is in the precision of compute."""
        return self.part.dtype != self.full.dtype

    @property
    def items_of_row(self) -> int:
        """Items of one row."""
        return self.full.numel() // self.full.shape[self.dim]

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


def share_of(parameter: nn.Parameter, mesh: DeviceMesh, compute: torch.dtype | None = None) -> RowShare | None:
    """The rows of a parameter that this rank updates; None where it has no rows to share.

    Args:
        parameter: whole, on the device. Where it gets masters it is cast, in place.
        mesh: axes (data, zero), or only zero.
        compute: dtype of a weight whose rows are to be masters; None: they are the parameter's own.
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
    masters = compute is not None and parameter.dtype is torch.float32 and parameter.dim() > 1
    held = parameter.detach().narrow(dim, first, stop - first)
    local = DTensor.from_local(
        held.clone() if masters else held,
        mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    replicas = mesh.get_group(0) if last else None
    if masters:
        parameter.data = parameter.data.to(compute)
        parameter.grad_dtype = None  # its gradients are added up in float32
    return RowShare(parameter, nn.Parameter(local), dim, first, stop, most, mesh.get_group(last), replicas)


class AbsentGradient(Tensor):
    """In place of the gradient of a complete parameter, of which ranks have rows: whoever reads it is told."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        remedy = (
            "Ranks share it under this plan (ZeRO-1): take parallel.parameters() in place of model.parameters(). To "
            "clip, call parallel.clip_grad_norm(max_norm), or give max_grad_norm to train_step."
        )
        raise InputError("gradient", "that of a parameter of the model", remedy)


@dataclass(slots=True)
class PendingReduce:
    """A reduce-scatter under way."""

    received: Tensor  # what this rank receives
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
    absent: list[RowShare] = field(default_factory=list)  # of parameters that show an ``AbsentGradient``

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
        received = torch.empty_like(sent[0])
        if replicas is None or not received.is_cuda:
            first = reduce_scatter(received, sent.view(-1), ranks, async_op=True)
            self.flight = PendingReduce(received, sent, first, first if replicas is None else None)
        else:
            self.flight = self._chained(received, sent, ranks, replicas)

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
            dist.all_reduce(flight.received, group=replicas)
        elif flight.work is not None:
            flight.work.wait()
        used = list(present) if all(present) else (flight.received[self.offsets[-1] :] > 0).tolist()
        for share, start, view, there in zip(self.shares, self.offsets, views, used, strict=False):
            share.full.grad = None
            if there:
                nothing = share.full.new_zeros(()).expand(share.full.shape)
                if type(nothing) is Tensor:  # tensors of dry runs take no other class
                    share.full.grad = nothing.as_subclass(AbsentGradient)
                    self.absent.append(share)
                rows = share.of(view)
                rows.copy_(flight.received[start : start + rows.numel()].view_as(rows))
                before = share.part.grad
                if isinstance(before, DTensor):
                    before.to_local().add_(rows)
                else:
                    share.part.grad = share.shown(rows)

    def keep(self) -> None:
        """Move gradients of an earlier backward pass out of the buffer, before the next one fills it."""
        self.follow()
        for share in self.absent:
            share.full.grad = None
        self.absent.clear()
        for share in self.shares:
            if isinstance(share.part.grad, DTensor):
                share.part.grad = share.shown(share.part.grad.to_local().clone())

    def follow(self) -> None:
        """Gradients that were zeroed in the model (``model.zero_grad()``) are gone here, too."""
        for share in self.absent:
            if share.full.grad is None:
                share.part.grad = None

    def abandon(self) -> None:
        """Wait for what is under way, and let go of it and of what it was made of."""
        flight, self.flight = self.flight, None
        for work in () if flight is None else (flight.scattering, flight.work):
            if work is not None:
                work.wait()
        self.absent.clear()
        for share in self.shares:
            share.full.grad = None

    @torch.no_grad()
    def start_gather(self) -> Callable[[], None]:
        """Start bringing the rows that other ranks updated; call the result to wait, and to write them."""
        ranks, full = self.shares[0].ranks, self.shares[0].full
        local = full.new_zeros(self.offsets[-1])
        for share, start in zip(self.shares, self.offsets, strict=False):
            part = share.part.detach()
            assert isinstance(part, DTensor)
            rows = part.to_local()
            local[start : start + rows.numel()] = rows.reshape(-1)
        everyone = full.new_empty(ranks.size(), len(local))
        work = all_gather(everyone.view(-1), local, ranks, async_op=True)

        @torch.no_grad()
        def finish(_sent: Tensor = local) -> None:
            work.wait()
            for share, place in zip(self.shares, self._places(everyone), strict=True):
                parameter = share.full.detach()
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


STAGE_2, STAGE_3 = 2, 3


@dataclass(frozen=True, slots=True)
class ZeroGroup:
    """Modules whose parameters are gathered and reduced together: a layer, or layers that share parameters."""

    modules: tuple[nn.Module, ...]  # outermost first where they are nested
    mesh: DeviceMesh  # axes (data, zero), or only zero
    zero_stage: int  # 3: parameters are gathered for each use; 2: from forward until backward ends


def mixed_precision(compute: torch.dtype | None) -> MixedPrecisionPolicy:
    """Gather and compute in this dtype, reduce gradients in float32; None: all in the parameters' own dtype."""
    if compute is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def shard_group(
    group: ZeroGroup, ignored: Collection[nn.Parameter], compute: torch.dtype | None = None
) -> list[FSDPModule]:
    """Shard a group's parameters, in place; gradients become sums (not means) over the mesh.

    Args:
        group: what to shard; the model's groups are sharded in the order they run.
        ignored: parameters that stay as they are although they lie inside the group.
        compute: see ``mixed_precision``.

    Returns:
        The group's modules, which now are FSDP modules.
    """
    for one in group.modules:
        one.register_forward_hook(_without_views)
        for parameter in one.parameters():
            parameter.data = parameter.data.contiguous()  # FSDP takes no other, such as channels_last
    ranks = group.mesh.size(group.mesh.ndim - 1)
    fully_shard(
        list(group.modules) if len(group.modules) > 1 else group.modules[0],
        mesh=group.mesh,
        reshard_after_forward=group.zero_stage == STAGE_3,
        mp_policy=mixed_precision(compute),
        ignored_params={*ignored, *_not_sharded(group.modules, cast=compute is not None)},
        shard_placement_fn=lambda parameter: Shard(cut_dim(parameter.shape, ranks, group.zero_stage)),
    )
    wrapped: list[FSDPModule] = [module for module in group.modules if isinstance(module, FSDPModule)]
    for module in wrapped:
        module.set_gradient_divide_factor(1.0)
        # gloo has neither averaging nor pre-multiplied sums
        module.set_force_sum_reduction_for_comms(True)
    return wrapped


def _not_sharded(modules: Sequence[nn.Module], cast: bool) -> set[nn.Parameter]:
    """Scalars, what has no items, and trained parameters of another type than most (complex ones): FSDP shards none.
    Where it casts, also those of norms with running statistics, which are of the statistics' type.
    """
    every = [parameter for module in modules for parameter in module.parameters()]
    scalars = {parameter for parameter in every if parameter.dim() == 0 or not parameter.numel()}
    norms = [part for module in modules for part in module.modules() if getattr(part, "running_mean", None) is not None]
    scalars |= {parameter for norm in norms for parameter in norm.parameters(recurse=False) if cast}
    items = Counter[torch.dtype]()
    trained = {parameter for parameter in every if parameter.requires_grad}
    for one in trained:
        items[one.dtype] += one.numel()
    return scalars | {one for one in trained if one.dtype is not max(items, key=lambda dtype: items[dtype])}


def apply_root(root: nn.Module, mesh: DeviceMesh) -> None:
    """Give a model whose groups are sharded FSDP's root context, which orders prefetching; it has no parameters."""
    if not isinstance(root, FSDPModule):
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        root.register_forward_hook(_without_views)
        fully_shard(root, mesh=mesh, mp_policy=policy, ignored_params=set(root.parameters()))


def free_last_gather(root: nn.Module) -> None:
    """Free the buffer of the last all-gather of a forward pass.

    FSDP2 keeps it until the next one, which its copy overlaps; where layers without one come next that is for nothing.
    """
    if isinstance(root, FSDPModule):
        context = root._get_fsdp_state()._comm_ctx  # private, as is this state: torch has no public way
        if (last := getattr(context, "all_gather_state", None)) is not None:
            context.all_gather_copy_in_stream.wait_event(last.event)
            context.all_gather_stream.wait_event(last.event)
            context.all_gather_state = None


def _without_views(_module: nn.Module, _args: object, output: Any) -> Any:
    """Forward hook: views and parameters that a module returns become results of their own.

    FSDP2 gathers before backward by a hook on what a module returns, which a view loses where it is written to
    (``x += y``), and so warns of every view; a parameter would keep it for all steps. Values of parameters are copied,
    as FSDP2 frees them when the module is done; other views keep their memory.
    """
    return map_tensors(output, _result) if any(one.requires_grad for one in tensors_of(output)) else output


def _result(tensor: Tensor) -> Tensor:
    base = tensor if isinstance(tensor, nn.Parameter) else tensor._base if type(tensor) is Tensor else None
    if base is None or not tensor.requires_grad:
        return tensor
    result: Tensor = tensor.clone() if isinstance(base, nn.Parameter) else _Detached.apply(tensor)  # type: ignore[no-untyped-call]
    return result


class _Detached(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def abandon_pass(root: nn.Module) -> None:
    """Have a model whose pass an exception ended begin anew."""
    if isinstance(root, FSDPModule) and hasattr(root, "reset_iter_state"):  # torch 2.13
        root.reset_iter_state()


def set_all_reduce(modules: Sequence[FSDPModule], enabled: bool) -> None:
    """Whether the next backward passes also sum over the mesh's data axis; once a step is enough."""
    for module in modules:
        module.set_requires_all_reduce(enabled, recurse=False)
