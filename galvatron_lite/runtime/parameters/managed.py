"""This rank's parameters after splitting: their shards, their gradients, and what the optimizer updates in their place.

Under offload the optimizer updates copies in host memory, under ZeRO-1 rows of the parameters, or float32 masters of
them; ``Updates`` carries gradients there and updated values back.
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
from galvatron_lite.runtime.parameters.guard import guard_gradients, guard_values, was_taken
from galvatron_lite.world import messages_carry_data

Shards = Mapping[str, ParameterShard]
"""How parameters lie in the full ones, by name."""


@dataclass(frozen=True, slots=True)
class ManagedParameter:
    """A parameter on this rank."""

    names: tuple[str, ...]  # its paths in the model; several where it is shared
    parameter: nn.Parameter  # what this rank holds: a DTensor under ZeRO, else a plain one
    shard: ParameterShard | None  # its part of the full parameter by tensor parallelism
    groups: StrategyGroups  # of its layer's strategy
    copies: int  # ranks of the stage that hold (under ZeRO-1: update) the same
    share: RowShare | None = None  # the rows that this rank updates under ZeRO-1, where the parameter itself is full
    host: HostCopy | None = None  # its copy in host memory, where the optimizer's states are kept there
    spread: ParameterShard | None = None  # the experts of a mixture that this rank has; ``shard`` is a part of them

    @property
    def is_zero(self) -> bool:
        """Whether ZeRO shares it (FSDP reduces its gradient)."""
        return isinstance(self.parameter, DTensor)

    @property
    def is_final(self) -> bool:
        """Whether its gradient is summed over ranks when autograd or FSDP has made it."""
        return self.is_zero or (self.share is None and self.summing is None)

    @property
    def is_partial(self) -> bool:
        """Whether every rank of the stage has a part of its gradient."""
        return self.shard is not None and self.shard.placement is Placement.PARTIAL

    @property
    def summing(self) -> Group:
        """The ranks over which we sum its gradient where FSDP does not."""
        if self.spread is not None and self.groups.spread is not None:
            return self.groups.spread.gradients
        return self.groups.stage if self.is_partial else self.groups.states.gradients

    @property
    def reduced(self) -> nn.Parameter:
        """What carries the reduced gradient on the device: the parameter, or this rank's rows under ZeRO-1."""
        return self.parameter if self.share is None else self.share.part

    @property
    def held(self) -> nn.Parameter:
        """What holds its values to the last bit: the parameter, or this rank's masters where it is a cast of those."""
        return self.parameter if self.share is None or not self.share.has_masters else self.share.part

    @property
    def updated(self) -> nn.Parameter:
        """What the optimizer updates, and has states for: a copy in host memory, else ``reduced``."""
        return self.reduced if self.host is None else self.host.copy

    @property
    def gradient(self) -> Tensor | None:
        """The reduced gradient on the device, as the optimizer will see it; a DTensor under ZeRO."""
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
    """Every parameter of a split stage once, in the order of the layers; those that get masters are cast, in place."""
    layers = [placed.layer for placed in stage]
    strategies = {placed.layer.name: placed.strategy for placed in stage}
    order = {name: position for position, name in enumerate(strategies)}
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    homes = {parameter: layer_of(name[0], layers) for parameter, name in names.items()}
    return [
        _owned(parameter, tuple(names[parameter]), strategies[home], meshes, shards, experts, compute)
        for parameter, home in sorted(homes.items(), key=lambda item: order[item[1]])
    ]


def _owned(
    parameter: nn.Parameter,
    names: tuple[str, ...],
    strategy: Strategy,
    meshes: Meshes,
    shards: Shards,
    experts: Shards,
    compute: torch.dtype | None,
) -> ManagedParameter:
    shard, spread = (next((by_name[name] for name in names if name in by_name), None) for by_name in (shards, experts))
    partial = shard is not None and shard.placement is Placement.PARTIAL
    split = shard.degree if shard is not None and shard.placement is Placement.SHARDED else 1
    groups = meshes.groups(strategy)
    mesh = (groups.states if groups.spread is None or spread is None else groups.spread).mesh
    shares = strategy.zero_stage == 1 and mesh is not None and not partial
    share = share_of(parameter, mesh, compute if strategy.keeps_masters else None) if shares and mesh else None
    shared = mesh.size(-1) if mesh is not None and (isinstance(parameter, DTensor) or share is not None) else 1
    copies = meshes.stage_devices // (split * shared * (1 if spread is None else spread.degree))
    owned = ManagedParameter(names, parameter, shard, groups, copies, share, spread=spread)
    offloads = strategy.offloads_states and parameter.requires_grad
    return replace(owned, host=HostCopy(owned.reduced)) if offloads else owned


def reduced_parameters(owned: Iterable[ManagedParameter]) -> list[Reduced]:
    """The parameters whose gradients we sum ourselves, and over which ranks."""
    return [Reduced(one.parameter, one.summing, one.share) for one in owned if not one.is_zero]


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def squared_norm_share(owned: Iterable[ManagedParameter], elsewhere: frozenset[str], device: torch.device) -> Tensor:
    """This rank's share of the squared norm of the full gradient; the sum over all ranks is the squared norm.

    Each part of the gradient is counted once: a part that n ranks hold counts 1/n on each. Parameters named in
    ``elsewhere`` are counted by another stage.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for one in owned:
        gradient = one.gradient
        if gradient is not None and not elsewhere & set(one.names):
            by_copies.setdefault(one.copies, []).append(local_tensor(gradient))
    total = torch.zeros((), device=device)
    for copies, gradients in by_copies.items():
        with torch._C.DisableTorchFunctionSubclass():  # they may be guarded against norms that others take
            total += get_total_norm(gradients).float() ** 2 / copies
    return total


def multiply_gradients(owned: Sequence[ManagedParameter], factor: Tensor) -> None:
    """Multiply all gradients by a number, on the device and where the optimizer sees them in host memory."""
    gradients = [local_tensor(gradient) for one in owned if (gradient := one.gradient) is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
    hosts = [one.host for one in owned if one.host is not None]
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
"""Of a parameter's values: the version, and the norm, as what is done to ``parameter.data`` counts as no version."""


@dataclass(slots=True)
class Updates:
    """Carries gradients to what the optimizer updates, and updated values back; nothing to do for plain parameters.

    Every call is made by all ranks of a stage together.
    """

    owned: Sequence[ManagedParameter]  # this rank's parameters
    reducer: GradientReducer  # of their gradients
    guarded: bool = False  # whether gradients refuse that other code takes their norm
    due: bool = False  # whether an optimizer may have stepped since updated values were last brought back
    versions: tuple[tuple[int, int], ...] = ()  # of what it updates, and its storages, when they were last brought back
    # of the device's parameters that are casts of masters, or have a copy in host memory, by name, then
    marks: dict[str, _Mark] = field(default_factory=dict)
    lowering: Lowering = field(init=False)  # brings gradients to host memory

    def __post_init__(self) -> None:
        final = [one.host for one in self.owned if one.host is not None and one.is_final]
        self.lowering = Lowering(self.hosts, final, lambda: self.reducer.synchronise)
        self._note()

    @property
    def hosts(self) -> list[HostCopy]:
        """The copies in host memory."""
        return [one.host for one in self.owned if one.host is not None]

    @property
    def is_needed(self) -> bool:
        """Whether the optimizer updates anything else than the parameters themselves."""
        return any(one.updated is not one.parameter for one in self.owned)

    def begin(self) -> None:
        """Before the model is used: its values are up to date, and gradients that were zeroed are gone everywhere."""
        guard_values(self.owned, guarded=False)
        self.publish()
        self.follow_hosts()

    def follow_hosts(self, _gradient: Tensor | None = None) -> None:
        """What was done to gradients in host memory holds on the device, too."""
        for host in self.hosts:
            host.follow()

    def deliver(self) -> None:
        """Once gradients are reduced: bring down those that the host needs."""
        self.lowering.finish()
        self.due = self.is_needed
        self.show()
        guard_gradients(self.owned, hidden=self.guarded)

    def show(self) -> None:
        """Between uses of the model: what a loop sees of parameters is all of them, or an error."""
        guard_values(self.owned, counted=self.guarded)

    def drop_gradients(self) -> None:
        """Wherever they are."""
        for one in self.owned:
            one.parameter.grad = one.reduced.grad = one.updated.grad = None

    def publish(self) -> None:
        """Once the optimizer has stepped: every rank computes with the updated values.

        Raises:
            InputError: a parameter that is a cast of masters was changed in place, which would be lost.
        """
        self.follow()
        taken = was_taken(one.updated for one in self.owned)
        if not (self.due or taken) and self.versions == self._versions():
            return
        for host in self.hosts:
            host.lift()
        self._gather()

    def follow_loop(self) -> None:
        """Before an optimizer steps: what the training loop did to the device's gradients and parameters holds in host
        memory, too.

        Raises:
            InputError: see ``follow``; or it did so to a gradient in both.
        """
        for host in self.hosts:
            host.lower_again()
        self.follow()

    def follow(self) -> None:
        """What was done to the device's parameters holds in host memory, too.

        Raises:
            InputError: a parameter that is a cast of masters was changed in place, or a copy in host memory, too.
        """
        marks = self._marks()
        changed = {name for name, mark in marks.items() if mark != self.marks.get(name, mark)}
        if not changed:
            return
        if cast := next((one for one in self.owned if one.names[0] in changed and one.held is not one.parameter), None):
            raise InputError("parameter", cast.names[0], _CAST_CHANGED)
        if self.versions != self._versions():
            raise InputError("parameter", min(changed), _BOTH_CHANGED)
        for one in self.owned:
            if one.host is not None and one.names[0] in changed:
                one.host.take()
        self._note()

    def take(self) -> None:
        """Values of parameters were set from outside: the host's copies, and casts of masters, follow."""
        for host in self.hosts:
            host.take()
        if self.has_casts:
            self._gather()
        self.due = False
        self._note()

    @property
    def has_casts(self) -> bool:
        """Whether parameters are casts of masters."""
        return any(one.held is not one.parameter for one in self.owned)

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
            values = (local_tensor(one.parameter.detach()) for one in marked)
            every = torch.stack([vector_norm(one, dtype=promote_types(one.dtype, float32)) for one in values])
            norms = every.nan_to_num().tolist()
        return {one.names[0]: (one.parameter._version, norm) for one, norm in zip(marked, norms, strict=True)}

    def _versions(self) -> tuple[tuple[int, int], ...]:
        """A training loop may change parameters in place, too (as to clamp them), on all ranks."""
        apart = (one.updated for one in self.owned if one.updated is not one.parameter)
        return tuple((one._version, one.untyped_storage()._cdata) for one in apart)
