"""ZeRO: stages 2 and 3 are FSDP2 (``fully_shard``) of each layer; stage 1 is ours.

Under ZeRO-1 each rank computes with full parameters and gradients, and updates its rows of each parameter. These rows
are a DTensor parameter (split like ``torch.chunk``, as in FSDP2, see ``cut_dim``) that uses the storage of the full
parameter: the optimizer has states of these rows only, and changes the full parameter in place. A reduce-scatter for
each bucket sums gradients during the end of backward. After the optimizer's step an all-gather for each bucket fetches
the rows of other ranks.

Under bf16 and fp16 the module has weights in the precision of compute, and each rank float32 masters of its rows with a
storage of their own: 2 + 4 / ranks bytes an item instead of 4 and a cast of 2. This applies to parameters of two dims
or more, which forward would cast (FSDP2 gathers all so). Parameters of one dim are small, and norms with running
statistics need float32. Gradients are summed in float32.
"""

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


@dataclass(frozen=True, slots=True)
class RowShare:
    """This rank's rows of a parameter."""

    full: nn.Parameter  # of the model
    part: nn.Parameter  # the rows, for the optimizer, in the storage of the full parameter or of masters
    dim: int  # of the rows; dims before it have an extent of 1
    first: int  # the range of rows [first, stop)
    stop: int
    most: int  # rows of the rank with most
    ranks: dist.ProcessGroup  # that share the rows
    replicas: dist.ProcessGroup | None  # ranks with the same rows and other samples; None without replicas

    @property
    def has_masters(self) -> bool:
        """Whether the rows are masters of a parameter in the precision of compute."""
        return self.part.dtype != self.full.dtype

    @property
    def items_of_row(self) -> int:
        """Items of one row."""
        return self.full.numel() // self.full.shape[self.dim]

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of these rows of a tensor like the full parameter."""
        return tensor.narrow(self.dim, self.first, self.stop - self.first)

    def shown(self, rows: Tensor) -> DTensor:
        """Return rows as a DTensor that is sharded like the parameter."""
        like = self.part
        assert isinstance(like, DTensor)
        return DTensor.from_local(
            rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def share_of(parameter: nn.Parameter, mesh: DeviceMesh, compute: torch.dtype | None = None) -> RowShare | None:
    """Return the rows of a parameter that this rank updates; None if the parameter is not shared.

    Args:
        parameter: full, on the device. If it gets masters, it is cast in place.
        mesh: axes (data, zero), or only zero.
        compute: dtype of weights with masters; None: no masters.
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
    """Replaces the gradient of a full parameter of which ranks have rows; reading it raises an error."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        remedy = (
            "Ranks share it under this plan (ZeRO-1): take parallel.parameters() in place of model.parameters(). To "
            "clip, call parallel.clip_grad_norm(max_norm), or give max_grad_norm to train_step."
        )
        raise InputError("gradient", "that of a parameter of the model", remedy)


@dataclass(slots=True)
class PendingReduce:
    """A reduce-scatter in flight."""

    received: Tensor  # this rank's sums
    sent: Tensor  # kept alive until the sums have arrived
    scattering: dist.Work  # the reduce-scatter
    work: dist.Work | None  # the last message; None if the sum over replicas did not start yet


@dataclass(slots=True)
class GradientSharing:
    """The gradients of a bucket, of which each rank gets its rows."""

    shares: list[RowShare]  # of its parameters, in the order of the bucket; all over the same ranks
    offsets: list[int] = field(init=False)  # of the parameters in a rank's part of a message, and the end of the last
    flight: PendingReduce | None = None
    side: torch.cuda.Stream | None = None
    absent: list[RowShare] = field(default_factory=list)  # of parameters with an ``AbsentGradient``

    def __post_init__(self) -> None:
        self.offsets = [0]
        for share in self.shares:
            self.offsets.append(self.offsets[-1] + share.most * share.items_of_row)

    def launch(self, views: Sequence[Tensor], flags: Tensor) -> None:
        """Start summing full gradients, so that each rank gets its rows; flags are summed for all ranks."""
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
        """Start both messages in the background: a separate stream waits for the first."""
        self.side = self.side or torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self.side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.side):
            first = reduce_scatter(tensor, sent.view(-1), ranks, async_op=True)
            first.wait()
            return PendingReduce(tensor, sent, first, dist.all_reduce(tensor, group=replicas, async_op=True))

    def complete(self, views: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Wait for the sums, accumulate this rank's rows in the gradients of the parts, and drop full gradients.

        Args:
            views: of the bucket's buffer, one a parameter; gradients of rows stay in them.
            present: whether each parameter has a gradient on this rank.
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
        """Copy gradients of an earlier backward pass from the buffer, before the next pass overwrites it."""
        self.follow()
        for share in self.absent:
            share.full.grad = None
        self.absent.clear()
        for share in self.shares:
            if isinstance(share.part.grad, DTensor):
                share.part.grad = share.shown(share.part.grad.to_local().clone())

    def follow(self) -> None:
        """Drop gradients that were zeroed in the model (``model.zero_grad()``)."""
        for share in self.absent:
            if share.full.grad is None:
                share.part.grad = None

    def abandon(self) -> None:
        """Wait for messages in flight, and discard them and the gradients."""
        flight, self.flight = self.flight, None
        for work in () if flight is None else (flight.scattering, flight.work):
            if work is not None:
                work.wait()
        self.absent.clear()
        for share in self.shares:
            share.full.grad = None

    @torch.no_grad()
    def start_gather(self) -> Callable[[], None]:
        """Start gathering the rows that other ranks updated; the returned function waits and writes them."""
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
        """The part of each parameter in a message, by rank."""
        for start, stop in pairwise(self.offsets):
            yield staged[:, start:stop]


def gather_all(sharings: Sequence[GradientSharing]) -> None:
    """Gather the rows that other ranks updated; two buckets are in flight at a time."""
    finish: Callable[[], None] = lambda: None  # noqa: E731
    for sharing in sharings:
        finish_before, finish = finish, sharing.start_gather()
        finish_before()
    finish()


def _pairs(flat: Tensor, staged: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The pieces of a full tensor, and their places in the ranks' parts of a message, of which the last may be
    short."""
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

    modules: tuple[nn.Module, ...]  # the outermost first if they are nested
    mesh: DeviceMesh  # axes (data, zero), or only zero
    zero_stage: int  # 3: parameters are gathered for each use; 2: from forward until backward ends


def mixed_precision(compute: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return a policy that gathers and computes in ``compute``, and reduces in float32; None: in the parameters'
    dtype."""
    if compute is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def shard_group(
    group: ZeroGroup, ignored: Collection[nn.Parameter], compute: torch.dtype | None = None
) -> list[FSDPModule]:
    """Shard a group's parameters, in place; gradients become sums (not means) over the mesh.

    Args:
        group: of modules; shard the model's groups in the order they run.
        ignored: parameters inside the group that are not sharded.
        compute: see ``mixed_precision``.

    Returns:
        The group's modules, which are FSDP modules now.
    """
    for one in group.modules:
        one.register_forward_hook(_without_views)
        for parameter in one.parameters():
            parameter.data = parameter.data.contiguous()  # FSDP accepts no other memory format (channels_last)
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
    """Parameters that FSDP cannot shard: scalars, empty ones, and trained ones of another dtype than most (complex).

    If it casts, also those of norms with running statistics, which must have the statistics' dtype.
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
    """Make a model with sharded groups FSDP's root, which orders prefetching; it gets no parameters."""
    if not isinstance(root, FSDPModule):
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        root.register_forward_hook(_without_views)
        fully_shard(root, mesh=mesh, mp_policy=policy, ignored_params=set(root.parameters()))


def free_last_gather(root: nn.Module) -> None:
    """Free the buffer of the last all-gather of a forward pass.

    FSDP2 keeps it until the next all-gather, which overlaps its copy; before layers without all-gather this is useless.
    """
    if isinstance(root, FSDPModule):
        context = root._get_fsdp_state()._comm_ctx  # private, as is this state: torch has no public way
        if (last := getattr(context, "all_gather_state", None)) is not None:
            context.all_gather_copy_in_stream.wait_event(last.event)
            context.all_gather_stream.wait_event(last.event)
            context.all_gather_state = None


def _without_views(_module: nn.Module, _args: object, output: Any) -> Any:
    """Forward hook that replaces views and parameters among a module's outputs by new tensors.

    FSDP2 gathers before backward in a hook on a module's outputs. A view loses the hook when it is written to (``x +=
    y``), so FSDP2 warns of views; a parameter would keep it for all steps. Parameters are copied, as FSDP2 frees them
    after the module; other views keep their memory.
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
    """Reset FSDP's state after an exception in a pass."""
    if isinstance(root, FSDPModule) and hasattr(root, "reset_iter_state"):  # torch 2.13
        root.reset_iter_state()


def set_all_reduce(modules: Sequence[FSDPModule], enabled: bool) -> None:
    """Set whether the next backward passes also sum over the mesh's data axis, which is needed once a step."""
    for module in modules:
        module.set_requires_all_reduce(enabled, recurse=False)
