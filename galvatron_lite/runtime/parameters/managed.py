"""This rank's parameters after splitting: their shards, their gradients, and what the optimizer updates in their place.

With offload the optimizer updates copies in host memory; under ZeRO-1 it updates rows of the parameters, or float32
masters of them. ``Updates`` carries gradients there and updated values back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, float32, nn, promote_types
from torch.distributed.tensor import DTensor
from torch.linalg import vector_norm
from torch.nn.utils import get_total_norm

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.data.apply import GradientReducer, Reduced
from galvatron_lite.parallelism.offload.apply import HostCopy, Lowering
from galvatron_lite.parallelism.pipeline.tied import layer_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement
from galvatron_lite.parallelism.zero.apply import RowShare, share_of
from galvatron_lite.runtime.assignment import LayerAssignment
from galvatron_lite.runtime.mesh import Group, Meshes, StrategyGroups
from galvatron_lite.runtime.parameters.guard import guard_gradients, guard_values, was_data_read
from galvatron_lite.world import messages_carry_data

Shards = Mapping[str, ParameterShard]
"""Parts of full parameters, by name."""


@dataclass(frozen=True, slots=True)
class ManagedParameter:
    """A parameter on this rank."""

    names: tuple[str, ...]  # its paths in the model; several if it is shared
    parameter: nn.Parameter  # this rank's part: a DTensor under ZeRO, else a plain parameter
    shard: ParameterShard | None  # its part of the full parameter by tensor parallelism
    groups: StrategyGroups  # of its layer's strategy
    copies: int  # ranks of the stage that hold (under ZeRO-1: update) the same part
    share: RowShare | None = None  # the rows that this rank updates under ZeRO-1, while ``parameter`` has all rows
    host: HostCopy | None = None  # its copy in host memory, if the optimizer's states are kept there
    spread: ParameterShard | None = None  # the experts of a mixture that this rank has; ``shard`` is a part of them

    @property
    def is_zero(self) -> bool:
        """Whether ZeRO shards it (FSDP reduces its gradient)."""
        return isinstance(self.parameter, DTensor)

    @property
    def is_sliced(self) -> bool:
        """Whether ranks have other parts of it without ZeRO: slices by tensor parallelism, or some of the experts."""
        return (self.shard is not None and self.shard.degree > 1) or self.spread is not None

    @property
    def is_final(self) -> bool:
        """Whether its gradient needs no further sum over ranks once autograd or FSDP has computed it."""
        return self.is_zero or (self.share is None and self.summing is None)

    @property
    def is_partial(self) -> bool:
        """Whether the gradients of all ranks of the stage have to be summed."""
        return self.shard is not None and self.shard.placement is Placement.PARTIAL

    @property
    def summing(self) -> Group:
        """The ranks over which its gradient is summed, if FSDP does not reduce it."""
        if self.spread is not None and self.groups.spread is not None:
            return self.groups.spread.gradients
        return self.groups.stage if self.is_partial else self.groups.states.gradients

    @property
    def reduced(self) -> nn.Parameter:
        """The tensor with the reduced gradient on the device: the parameter, or this rank's rows under ZeRO-1."""
        return self.parameter if self.share is None else self.share.part

    @property
    def held(self) -> nn.Parameter:
        """The tensor with its exact values: the parameter, or this rank's masters if it is a cast of them."""
        return self.parameter if self.share is None or not self.share.has_masters else self.share.part

    @property
    def updated(self) -> nn.Parameter:
        """The tensor that the optimizer updates, and has states for: the copy in host memory, else ``reduced``."""
        return self.reduced if self.host is None else self.host.copy

    @property
    def gradient(self) -> Tensor | None:
        """The reduced gradient on the device, as the optimizer will use it; a DTensor under ZeRO."""
        if self.host is not None:
            self.host.follow()
        return self.reduced.grad


def managed_parameters(
    model: nn.Module,
    stage: Sequence[LayerAssignment],
    meshes: Meshes,
    shards: Shards,
    experts: Shards,
    compute: torch.dtype | None = None,
) -> list[ManagedParameter]:
    """Return the parameters of a split stage, each once, in the order of the layers.

    Parameters that get float32 masters are cast to ``compute`` in place.
    """
    layers = [placed.layer for placed in stage]
    strategies = {placed.layer.name: placed.strategy for placed in stage}
    order = {name: position for position, name in enumerate(strategies)}
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    layer_names = {parameter: layer_of(paths[0], layers) for parameter, paths in names.items()}
    return [
        _managed(parameter, tuple(names[parameter]), strategies[layer], meshes, shards, experts, compute)
        for parameter, layer in sorted(layer_names.items(), key=lambda item: order[item[1]])
    ]


def _managed(
    parameter: nn.Parameter,
    names: tuple[str, ...],
    strategy: Strategy,
    meshes: Meshes,
    shards: Shards,
    experts: Shards,
    compute: torch.dtype | None,
) -> ManagedParameter:
    shard, spread = (next((by_name[name] for name in names if name in by_name), None) for by_name in (shards, experts))
    is_partial = shard is not None and shard.placement is Placement.PARTIAL
    slices = shard.degree if shard is not None and shard.placement is Placement.SHARDED else 1
    groups = meshes.groups(strategy)
    mesh = (groups.states if groups.spread is None or spread is None else groups.spread).mesh
    share = None
    if strategy.parameter_shards == 1 and mesh is not None and not is_partial:
        share = share_of(parameter, mesh, compute if strategy.keeps_masters else None)
    shared = mesh.size(-1) if mesh is not None and (isinstance(parameter, DTensor) or share is not None) else 1
    copies = meshes.stage_devices // (slices * shared * (1 if spread is None else spread.degree))
    managed = ManagedParameter(names, parameter, shard, groups, copies, share, spread=spread)
    offloads = strategy.offloads_states and parameter.requires_grad
    return replace(managed, host=HostCopy(managed.reduced)) if offloads else managed


def reduced_parameters(parameters: Iterable[ManagedParameter]) -> list[Reduced]:
    """The parameters whose gradients the reducer sums, and over which ranks."""
    return [Reduced(one.parameter, one.summing, one.share) for one in parameters if not one.is_zero]


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def squared_norm_share(
    parameters: Iterable[ManagedParameter], elsewhere: frozenset[str], device: torch.device
) -> Tensor:
    """This rank's share of the squared norm of the full gradient; the sum over all ranks is the squared norm.

    A part of the gradient that n ranks hold counts 1/n on each. Another stage counts the parameters named in
    ``elsewhere``.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for managed in parameters:
        gradient = managed.gradient
        if gradient is not None and not elsewhere & set(managed.names):
            by_copies.setdefault(managed.copies, []).append(local_tensor(gradient))
    total = torch.zeros((), device=device)
    for copies, gradients in by_copies.items():
        with torch._C.DisableTorchFunctionSubclass():  # they may be guarded
            norm = get_total_norm(gradients)
            total = total + norm.to(promote_types(norm.dtype, float32)) ** 2 / copies
    return total


def multiply_gradients(parameters: Sequence[ManagedParameter], factor: Tensor) -> None:
    """Multiply all gradients by a number, on the device and in host memory."""
    gradients = [local_tensor(gradient) for one in parameters if (gradient := one.gradient) is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
    hosts = [one.host for one in parameters if one.host is not None]
    lowered = [host.copy.grad for host in hosts if host.copy.grad is not None]
    if lowered:
        torch._foreach_mul_(lowered, factor.to("cpu"))
        for host in hosts:
            host.noted()


_CAST_CHANGED = (
    "It was changed in place, but is a cast under this plan, made anew of float32 values that ranks share (ZeRO-1). "
    "Change those, parallel.parameters(), or set all with parallel.load_full_state_dict(state)."
)
_BOTH_CHANGED = (
    "It was changed on the device, and so was its copy in host memory, which the optimizer updates under this plan. "
    "Change parallel.parameters() alone."
)
_Mark = tuple[int, float]
"""The version and the norm of a parameter's values: changes of ``parameter.data`` do not change the version."""


@dataclass(slots=True)
class Updates:
    """Carries gradients to what the optimizer updates, and updated values back; does nothing for plain parameters.

    All ranks of a stage call its methods together.
    """

    owned: Sequence[ManagedParameter]  # this rank's parameters
    reducer: GradientReducer  # of their gradients
    guarded: bool = False  # whether gradients are guarded against norms that other code takes of them
    due: bool = False  # whether an optimizer may have stepped since updated values were last published
    # versions and storages of the tensors that the optimizer updates, when they were last published
    versions: tuple[tuple[int, int], ...] = ()
    # marks of parameters that are casts of masters or have a copy in host memory, by name, at the same time
    marks: dict[str, _Mark] = field(default_factory=dict)
    lowering: Lowering = field(init=False)  # copies gradients to host memory

    def __post_init__(self) -> None:
        final = [managed.host for managed in self.owned if managed.host is not None and managed.is_final]
        self.lowering = Lowering(self.hosts, final, lambda: self.reducer.synchronise)
        self._note()

    @property
    def hosts(self) -> list[HostCopy]:
        """The copies in host memory."""
        return [managed.host for managed in self.owned if managed.host is not None]

    @property
    def is_needed(self) -> bool:
        """Whether the optimizer updates other tensors than the parameters themselves."""
        return any(managed.updated is not managed.parameter for managed in self.owned)

    @property
    def has_casts(self) -> bool:
        """Whether parameters are casts of masters."""
        return any(managed.held is not managed.parameter for managed in self.owned)

    def begin(self) -> None:
        """Before the model is used: publish updated values, and follow gradients that were zeroed."""
        guard_values(self.owned, guarded=False)
        self.publish()
        self.follow_hosts()

    def follow_hosts(self, _gradient: Tensor | None = None) -> None:
        """Apply to gradients on the device what was done to those in host memory."""
        for host in self.hosts:
            host.follow()

    def deliver(self) -> None:
        """Once gradients are reduced: copy those that the optimizer needs to host memory."""
        self.lowering.finish()
        self.due = self.is_needed
        self.show()
        guard_gradients(self.owned, hides_norm=self.guarded)

    def show(self) -> None:
        """Between uses of the model: guard parameters that are parts."""
        guard_values(self.owned, counted=self.guarded)

    def drop_gradients(self) -> None:
        """Drop all gradients, on the device and in host memory."""
        for managed in self.owned:
            managed.parameter.grad = managed.reduced.grad = managed.updated.grad = None

    def publish(self) -> None:
        """Once the optimizer has stepped: send updated values to all ranks that compute with them.

        Raises:
            InputError: see ``follow``.
        """
        self.follow()
        was_read = was_data_read(managed.updated for managed in self.owned)
        if not (self.due or was_read) and self.versions == self._versions():
            return
        for host in self.hosts:
            host.lift()
        self._gather()

    def follow_loop(self) -> None:
        """Before an optimizer steps: apply to host memory what was done to gradients and parameters on the device.

        Raises:
            InputError: see ``follow``; or a gradient was changed in both.
        """
        for host in self.hosts:
            host.lower_again()
        self.follow()

    def follow(self) -> None:
        """Apply to copies in host memory what was done to parameters on the device.

        Raises:
            InputError: a parameter that is a cast of masters was changed in place, or its copy in host memory, too.
        """
        marks = self._marks()
        changed = {name for name, mark in marks.items() if mark != self.marks.get(name, mark)}
        if not changed:
            return
        for managed in self.owned:
            if managed.names[0] in changed and managed.held is not managed.parameter:
                raise InputError("parameter", managed.names[0], _CAST_CHANGED)
        if self.versions != self._versions():
            raise InputError("parameter", min(changed), _BOTH_CHANGED)
        for managed in self.owned:
            if managed.host is not None and managed.names[0] in changed:
                managed.host.take()
        self._note()

    def take(self) -> None:
        """After parameters were set from outside: update copies in host memory, and casts of masters."""
        for host in self.hosts:
            host.take()
        if self.has_casts:
            self._gather()
        self.due = False
        self._note()

    def _gather(self) -> None:
        self.due = False
        self.reducer.gather()
        self._note()

    def _note(self) -> None:
        self.versions, self.marks = self._versions(), self._marks()

    def _marks(self) -> dict[str, _Mark]:
        marked = [one for one in self.owned if one.host is not None or one.held is not one.parameter]
        norms = [0.0] * len(marked)
        if marked and messages_carry_data():
            values = (local_tensor(managed.parameter.detach()) for managed in marked)
            stacked = torch.stack([vector_norm(value, dtype=promote_types(value.dtype, float32)) for value in values])
            norms = stacked.nan_to_num().tolist()
        return {one.names[0]: (one.parameter._version, norm) for one, norm in zip(marked, norms, strict=True)}

    def _versions(self) -> tuple[tuple[int, int], ...]:
        """Versions and storages; a training loop may change updated tensors in place, too (to clamp them)."""
        apart = (managed.updated for managed in self.owned if managed.updated is not managed.parameter)
        return tuple((tensor._version, tensor.untyped_storage()._cdata) for tensor in apart)
