"""Splitting one stage's layers as the plan says, layer by layer, and what became of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Recompute, Role
from galvatron_lite.parallelism.channel.apply import shard_channels
from galvatron_lite.parallelism.channel.parts import ChannelPlan
from galvatron_lite.parallelism.data.apply import Reduced
from galvatron_lite.parallelism.expert.apply import spread_experts, work_on_shares
from galvatron_lite.parallelism.expert.exchange import ProcessExchange
from galvatron_lite.parallelism.expert.find import BlockMixture, find_mixtures
from galvatron_lite.parallelism.offload.apply import HostTraveller, offload_activations
from galvatron_lite.parallelism.offload.states import HostCopy
from galvatron_lite.parallelism.pipeline.tied import layer_of
from galvatron_lite.parallelism.recompute.apply import apply_recompute
from galvatron_lite.parallelism.rng.modules import Draws, draw_inside, draw_nothing, pass_keys
from galvatron_lite.parallelism.sharded.groups import ProcessAxisGroup
from galvatron_lite.parallelism.spatial.apply import split_pixels
from galvatron_lite.parallelism.spatial.norms import sync_batch_norm
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.tensor.apply import shard_layer
from galvatron_lite.parallelism.tensor.group import ProcessTensorGroup
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement, gather_full
from galvatron_lite.parallelism.zero.apply import STAGE_2, ZeroGroup, apply_root, shard_group
from galvatron_lite.parallelism.zero.shares import RowShare, share_of
from galvatron_lite.runtime.border import Bordered, BoundaryLayout, border_of, rules_under
from galvatron_lite.runtime.draws import lot_of
from galvatron_lite.runtime.layout import Layout
from galvatron_lite.runtime.mesh import Group, Meshes, StrategyGroups
from galvatron_lite.runtime.placement import LayerAssignment, glue_layout


@dataclass(frozen=True, slots=True)
class Owned:
    """A parameter on this rank."""

    names: tuple[str, ...]  # its paths in the model; several where it is shared
    parameter: nn.Parameter  # what this rank holds: a DTensor under ZeRO, else a plain one
    shard: ParameterShard | None  # how that lies in the whole parameter by tensor parallelism; None without it
    groups: StrategyGroups  # of its layer's strategy
    copies: int  # ranks of the stage that hold (under ZeRO-1: update) the same
    # the rows of it that this rank updates under ZeRO-1, where the parameter itself is whole
    share: RowShare | None = None
    host: HostCopy | None = None  # its copy in host memory, where the optimizer's states are kept there
    # how it lies in the whole parameter of a mixture whose experts are spread; ``shard`` tells of this part of it.
    # None for all others
    spread: ParameterShard | None = None

    @property
    def is_zero(self) -> bool:
        """Whether ZeRO shares it (FSDP reduces its gradient)."""
        return isinstance(self.parameter, DTensor)

    @property
    def is_final(self) -> bool:
        """Whether its gradient is summed over ranks when autograd or FSDP has made it."""
        return self.is_zero or (self.share is None and self.summing is None)

    @property
    def summing(self) -> Group:
        """The ranks that have a part of its gradient, over which we sum it where FSDP does not."""
        if self.spread is not None and self.groups.expert is not None:
            return self.groups.expert.gradients
        return self.groups.stage if self.is_partial else self.groups.gradients

    @property
    def reduced(self) -> nn.Parameter:
        """What carries the reduced gradient on the device: the parameter, or this rank's rows under ZeRO-1."""
        return self.parameter if self.share is None else self.share.part

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

    @property
    def slices(self) -> ProcessTensorGroup | None:
        """The ranks that hold slices of the same parameters; None where they are whole."""
        group = self.groups.tensor or self.groups.slices
        return None if group is None else ProcessTensorGroup(group)

    def gathered(self, local: Tensor) -> Tensor:
        """The whole tensor from every rank's slices (no DTensors); all ranks that hold any must call it."""
        if self.shard is not None and self.slices is not None:
            local = gather_full(local, self.shard, self.slices)
        if self.spread is not None and self.groups.expert is not None:
            local = gather_full(local, self.spread, ProcessTensorGroup(self.groups.expert.line))
        return local

    @property
    def is_partial(self) -> bool:
        """Whether every rank of the stage has a part of its gradient."""
        return self.shard is not None and self.shard.placement is Placement.PARTIAL


@dataclass(slots=True)
class Sharded:
    """What splitting a stage left behind."""

    # how parameters lie in the whole ones by tensor parallelism, by name
    shards: dict[str, ParameterShard] = field(default_factory=dict)
    # how parameters of experts that are spread lie in the whole ones, by name
    experts: dict[str, ParameterShard] = field(default_factory=dict)
    zero_modules: list[FSDPModule] = field(default_factory=list)  # modules that FSDP manages
    replicated: list[FSDPModule] = field(default_factory=list)  # those of them whose mesh has a data axis, too
    borders: list[Bordered] = field(default_factory=list)  # modules of layers, and what they work on
    traveller: HostTraveller = field(default_factory=HostTraveller)  # carries to host memory what layers keep there


@dataclass(frozen=True, slots=True)
class LayerPlans:
    """How layers are split inside."""

    tensor: Mapping[str, TensorPlan]  # by layer name, where a strategy splits matmuls
    channel: Mapping[str, ChannelPlan]  # by module path, where it shares channels
    capacity: float | None = None  # of experts, see ``expert.dispatch.Spread``


def shard_stage(
    model: nn.Module,
    stage: Sequence[LayerAssignment],
    meshes: Meshes,
    plans: LayerPlans,
    place: Callable[[Layer], None],
    compute: torch.dtype | None,
    roots: Sequence[nn.Module],
    draws: Draws | None = None,
) -> Sharded:
    """Split a stage's layers in place: tensor, channel, context and spatial parallelism, recomputation,
    offload, ZeRO.

    Args:
        model: holds the layers.
        stage: the layers and their strategies; layers that share parameters have equal ones.
        meshes: process groups.
        plans: how layers are split.
        place: brings a layer onto the device; called for one layer at a time, before it is split.
        compute: dtype of compute; None: that of the parameters.
        roots: the modules that are called.
        draws: decides random numbers; None: each rank draws for itself.
    """
    done = Sharded()
    if draws is not None:
        draw_nothing(model, draws.paths - {"", *(path for placed in stage for path in placed.layer.modules)})
    for layers in tied_layers(model, stage):
        for placed in layers:
            place(placed.layer)
            _synchronise_norms(model, placed, meshes)
            mixtures = _mixtures(model, placed)
            if mixtures:
                _spread_experts(model, placed, meshes, plans.capacity, done)
            _split_matmuls(model, placed, meshes, plans.tensor, done, glue_layout(stage))
            if mixtures and placed.strategy.context > 1:
                work_on_shares(model.get_submodule(placed.layer.modules[0]), mixtures)
            border = border_of(placed.layout.whole_channels, placed.strategy, meshes.groups(placed.strategy))
            for path in placed.layer.modules:
                module, own = model.get_submodule(path), border
                if path in plans.channel:
                    own = _split_channels(module, path, placed, meshes, plans.channel[path], done)
                if draws is not None and path in draws.paths:
                    draw_inside(module)
                if border.lines:
                    split_pixels(module, border.lines, rules_under(placed.strategy))
                apply_recompute(module, placed.strategy.recompute)
                if placed.strategy.offloads_activations:
                    offload_activations(module, done.traveller)
                if draws is not None and path in draws.paths:
                    pass_keys(module, path, draws, lot_of(placed, meshes))
                done.borders.append(Bordered(path, placed, own))
        _share_states(model, layers, meshes, compute, done)
    meshed = [meshes.groups(placed.strategy).zero_mesh for placed in stage]
    mesh = next((mesh for mesh in meshed if mesh is not None), None)
    if done.zero_modules and mesh is not None:
        for root in roots:
            apply_root(root, mesh)
    return done


def tied_layers(model: nn.Module, stage: Sequence[LayerAssignment]) -> list[list[LayerAssignment]]:
    """The stage's layers in order; those that share parameters are together, at the place of the first."""
    together: list[list[LayerAssignment]] = []
    seen: list[set[int]] = []
    for placed in stage:
        own = {id(p) for path in placed.layer.modules for p in model.get_submodule(path).parameters()}
        home = next((index for index, known in enumerate(seen) if known & own), None)
        if home is None:
            together.append([placed])
            seen.append(own)
        else:
            together[home].append(placed)
            seen[home] |= own
    return together


def _split_matmuls(
    model: nn.Module,
    placed: LayerAssignment,
    meshes: Meshes,
    plans: Mapping[str, TensorPlan],
    done: Sharded,
    glue: Layout,
) -> None:
    layer, strategy = placed.layer, placed.strategy
    if strategy.tensor == 1 or not layer.modules:
        return
    group = ProcessTensorGroup(meshes.groups(strategy).tensor)
    if layer.role is Role.BLOCK:
        path = layer.modules[0]
        plan = _beside_experts(plans[layer.name], meshes.groups(strategy), strategy.sequence_parallel)
        regather = strategy.recompute is Recompute.NONE  # what is recomputed is gathered again anyway
        block = model.get_submodule(path)
        shards = shard_layer(block, plan, group, strategy.sequence_parallel, regather=regather)
        found = {f"{path}.{name}": shard for name, shard in shards.items()}
        kept = {name: shard for name, shard in found.items() if plan.experts or name not in done.experts}
        done.shards |= kept
    else:
        modules = {path: model.get_submodule(path) for path in layer.modules}
        # elsewhere hooks take plain logits into the layout of the loss
        shares = placed.layout == glue and strategy.context == strategy.spatial == 1
        done.shards |= shard_layer(modules, plans[layer.name], group, False, shares_logits=shares)


def _beside_experts(plan: TensorPlan, groups: StrategyGroups, sequence_parallel: bool) -> TensorPlan:
    """What is left to a tensor group where experts are spread: nothing of whole ones; of those that it slices the sums,
    unless the exchange of shared tokens makes them."""
    if groups.expert is None:
        return plan
    if not groups.expert.sliced:
        return replace(plan, experts=())
    return replace(plan, experts=tuple(replace(one, summed=not sequence_parallel) for one in plan.experts))


def _mixtures(model: nn.Module, placed: LayerAssignment) -> tuple[BlockMixture, ...]:
    """The mixtures of experts of a block."""
    if placed.layer.role is not Role.BLOCK:
        return ()
    found = find_mixtures(model.get_submodule(placed.layer.modules[0]))
    if not found and placed.strategy.expert > 1:
        remedy = f"No experts are found in {placed.layer.name}. Plan it with expert=1."
        raise InputError("expert", placed.strategy.expert, remedy)
    return found


def _spread_experts(
    model: nn.Module, placed: LayerAssignment, meshes: Meshes, capacity: float | None, done: Sharded
) -> None:
    """Each rank keeps its share of the experts of a block."""
    groups = meshes.groups(placed.strategy)
    if groups.expert is None:
        if capacity is not None:
            spread_experts(model.get_submodule(placed.layer.modules[0]), None, None, capacity)
        return
    path, apart = placed.layer.modules[0], placed.strategy.sequence_parallel and groups.expert.sliced
    slices = ProcessExchange(groups.tensor) if apart else None
    spread = spread_experts(model.get_submodule(path), ProcessExchange(groups.expert.line), slices, capacity)
    done.experts |= {f"{path}.{name}": shard for name, shard in spread.items()}


def _synchronise_norms(model: nn.Module, placed: LayerAssignment, meshes: Meshes) -> None:
    """Statistics of synchronised batch norms are over all samples (those of others are over a data rank's own)."""
    group = meshes.groups(placed.strategy).batch
    for path in placed.layer.modules:
        for module in model.get_submodule(path).modules():
            if isinstance(module, nn.SyncBatchNorm):
                sync_batch_norm(module, [] if group is None else [ProcessAxisGroup(group)])


def _split_channels(
    module: nn.Module, path: str, placed: LayerAssignment, meshes: Meshes, plan: ChannelPlan, done: Sharded
) -> BoundaryLayout:
    """Share a module's channels in place; its border then."""
    line = ProcessAxisGroup(meshes.groups(placed.strategy).slices)
    done.shards |= {f"{path}.{name}": shard for name, shard in shard_channels(module, plan, line).items()}
    shares = placed.strategy.channels > 1
    return BoundaryLayout(placed.layout, slices=line, outputs=plan.outputs) if shares else BoundaryLayout(placed.layout)


def _share_states(
    model: nn.Module, layers: Sequence[LayerAssignment], meshes: Meshes, compute: torch.dtype | None, done: Sharded
) -> None:
    strategy = layers[0].strategy
    mesh = meshes.groups(strategy).zero_mesh
    modules = [model.get_submodule(path) for placed in layers for path in placed.layer.modules]
    holding = tuple(module for module in modules if next(module.parameters(), None) is not None)
    if mesh is not None and holding and strategy.zero_stage != 1:
        partial = [name for name, shard in done.shards.items() if shard.placement is Placement.PARTIAL]
        ignored = {model.get_parameter(name) for name in partial}
        ignored |= _share_experts(model, modules, strategy, meshes, compute, done)
        # the last layer's backward follows at once: what it gathered for forward is still needed
        zero_stage = STAGE_2 if layers[-1].layer.role is Role.AFTER else strategy.zero_stage
        for part in _gathered_together(holding):
            made = shard_group(ZeroGroup(part, mesh, zero_stage), ignored, compute)
            done.zero_modules += made
            done.replicated += made if strategy.data > 1 else []


def _gathered_together(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, ...]]:
    """The modules of a layer that ZeRO gathers at once: those that train, and each frozen one by itself, or with others
    that hold the same parameters.

    FSDP gathers a group again when the gradient of what its last module gave arrives; a frozen table gets none.
    """
    groups: list[tuple[set[nn.Module], set[nn.Parameter]]] = []
    for module in modules:
        members, parameters = {module}, set(module.parameters())
        for group in [one for one in groups if one[1] & parameters]:
            groups.remove(group)
            members, parameters = members | group[0], parameters | group[1]
        groups.append((members, parameters))
    trained = {one for members, held in groups if any(parameter.requires_grad for parameter in held) for one in members}
    frozen = [members for members, _ in groups if not members & trained]
    yield from (tuple(one for one in modules if one in members) for members in [trained, *frozen] if members)


def _share_experts(
    model: nn.Module,
    modules: Sequence[nn.Module],
    strategy: Strategy,
    meshes: Meshes,
    compute: torch.dtype | None,
    done: Sharded,
) -> set[nn.Parameter]:
    """ZeRO of experts that are spread, over the ranks that hold the same ones; the parameters of which none do."""
    groups, inside = meshes.groups(strategy).expert, {part for module in modules for part in module.modules()}
    homes = {name.rpartition(".")[0]: model.get_submodule(name.rpartition(".")[0]) for name in done.experts}
    own = [module for module in homes.values() if module in inside]
    if groups is None or groups.mesh is None:
        return {parameter for module in own for parameter in module.parameters(recurse=False)}
    for module in own:
        made = shard_group(ZeroGroup((module,), groups.mesh, strategy.zero_stage), set(), compute)
        done.zero_modules += made
        done.replicated += made if groups.mesh.ndim > 1 else []
    return set()


def owned_parameters(
    model: nn.Module,
    stage: Sequence[LayerAssignment],
    meshes: Meshes,
    shards: Mapping[str, ParameterShard],
    experts: Mapping[str, ParameterShard] = MappingProxyType({}),
) -> list[Owned]:
    """Every parameter of a split stage once, in the order of the layers."""
    layers = [placed.layer for placed in stage]
    strategies = {placed.layer.name: placed.strategy for placed in stage}
    order = {name: position for position, name in enumerate(strategies)}
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    homes = {parameter: layer_of(known[0], layers) for parameter, known in names.items()}
    return [
        _describe(parameter, tuple(names[parameter]), strategies[home], meshes, (shards, experts))
        for parameter, home in sorted(homes.items(), key=lambda item: order[item[1]])
    ]


def _describe(
    parameter: nn.Parameter,
    names: tuple[str, ...],
    strategy: Strategy,
    meshes: Meshes,
    described: tuple[Mapping[str, ParameterShard], Mapping[str, ParameterShard]],
) -> Owned:
    shard, spread = (next((shards[name] for name in names if name in shards), None) for shards in described)
    split = shard.degree if shard is not None and shard.placement is Placement.SHARDED else 1
    ways = 1 if spread is None else spread.degree
    groups, partial = meshes.groups(strategy), shard is not None and shard.placement is Placement.PARTIAL
    mesh = groups.expert.mesh if groups.expert is not None and spread is not None else groups.zero_mesh
    share = share_of(parameter, mesh) if strategy.zero_stage == 1 and mesh is not None and not partial else None
    shared = mesh.size(-1) if mesh is not None and (isinstance(parameter, DTensor) or share is not None) else 1
    copies = meshes.stage_devices // (split * ways * shared)
    owned = Owned(names, parameter, shard, groups, copies, share, spread=spread)
    offloads = strategy.offloads_states and parameter.requires_grad
    return replace(owned, host=HostCopy(owned.reduced)) if offloads else owned


def reduced_parameters(owned: Sequence[Owned]) -> list[Reduced]:
    """The parameters whose gradients we sum ourselves, and over which ranks."""
    return [Reduced(one.parameter, one.summing, one.share) for one in owned if not one.is_zero]
