"""Splitting one stage's layers as the plan says, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Recompute, Role
from galvatron_lite.parallelism.channel.apply import shard_channels
from galvatron_lite.parallelism.channel.parts import ChannelPlan
from galvatron_lite.parallelism.expert.apply import ProcessExchange, spread_experts, work_on_shares
from galvatron_lite.parallelism.expert.find import BlockMixture, find_mixtures
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.offload.apply import ActivationOffloader
from galvatron_lite.parallelism.registry import added_degrees
from galvatron_lite.parallelism.rng.modules import draw_inside, draw_nothing, pass_keys
from galvatron_lite.parallelism.rng.numbers import SampleSlice
from galvatron_lite.parallelism.sharded.groups import ProcessAxisGroup
from galvatron_lite.parallelism.spatial.apply import split_pixels
from galvatron_lite.parallelism.spatial.norms import sync_batch_norm
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.tensor.apply import shard_layer
from galvatron_lite.parallelism.tensor.group import ProcessTensorGroup
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement
from galvatron_lite.parallelism.wrapping import rules_under, wrap_forward
from galvatron_lite.parallelism.zero.apply import STAGE_2, ZeroGroup, apply_root, free_last_gather, shard_group
from galvatron_lite.runtime.activations.traffic import BoundaryLayout, border_of
from galvatron_lite.runtime.assignment import LayerAssignment, glue_layout
from galvatron_lite.runtime.mesh import Meshes, StrategyGroups
from galvatron_lite.runtime.preparation import Examined, SetupOptions


@dataclass(slots=True)
class Sharded:
    """The result of splitting a stage."""

    shards: dict[str, ParameterShard] = field(default_factory=dict)  # parts of parameters that are sliced, by name
    experts: dict[str, ParameterShard] = field(default_factory=dict)  # parts of parameters of spread experts, by name
    zero_modules: list[FSDPModule] = field(default_factory=list)  # modules that FSDP manages
    replicated: list[FSDPModule] = field(default_factory=list)  # those of them whose mesh has a data axis, too
    borders: dict[str, BoundaryLayout] = field(default_factory=dict)  # what modules of layers work on, by path


@dataclass(frozen=True, slots=True)
class StageSplitter:
    """Splits a stage's layers in place."""

    model: nn.Module  # holds the layers
    stage: Sequence[LayerAssignment]  # layers that share parameters have equal strategies
    meshes: Meshes
    examined: Examined  # how layers are split
    options: SetupOptions
    done: Sharded = field(default_factory=Sharded)
    offloader: ActivationOffloader = field(default_factory=ActivationOffloader)  # carries activations to host memory

    def split(self, place: Callable[[Layer], None], roots: Sequence[nn.Module]) -> Sharded:
        """Split the stage: tensor, channel, context and spatial parallelism, recomputation, offload, ZeRO.

        Args:
            place: brings a layer onto the device; called for one layer at a time, before it is split.
            roots: the modules that are called.
        """
        draws = self.options.draws
        if draws is not None:
            inside = {path for placed in self.stage for path in placed.layer.modules}
            draw_nothing(self.model, draws.paths - {"", *inside})
        for layers in tied_layers(self.model, self.stage):
            for placed in layers:
                place(placed.layer)
                self._split_layer(placed)
            self._share_states(layers)
        meshes = (self.meshes.groups(placed.strategy).states.mesh for placed in self.stage)
        mesh = next((mesh for mesh in meshes if mesh is not None), None)
        if self.done.zero_modules and mesh is not None:
            for root in roots:
                apply_root(root, mesh)
            self._free_gathered(roots)
        return self.done

    def _free_gathered(self, roots: Sequence[nn.Module]) -> None:
        """Have layers that gather no parameters free what those before them were gathered in."""

        def free(*_: object) -> None:
            for root in roots:
                free_last_gather(root)

        for placed in self.stage:
            if placed.strategy.parameter_shards == 1:
                for path in placed.layer.modules:
                    self.model.get_submodule(path).register_forward_pre_hook(free)

    def _split_layer(self, placed: LayerAssignment) -> None:
        strategy, groups = placed.strategy, self.meshes.groups(placed.strategy)
        for path in placed.layer.modules:
            for module in self.model.get_submodule(path).modules():
                # statistics of synchronised batch norms are over all samples (those of others are over a rank's)
                if isinstance(module, nn.SyncBatchNorm):
                    sync_batch_norm(module, [] if groups.batch is None else [ProcessAxisGroup(groups.batch)])
        mixtures = self._mixtures(placed)
        if mixtures:
            self._spread_experts(placed, groups)
        if lines_of(strategy).matmuls.size > 1 and placed.layer.modules:
            self._split_matmuls(placed, groups)
        if mixtures and groups.tokens is not None:
            work_on_shares(self._block(placed), mixtures)
        border = border_of(placed.layout.replicated("channels"), groups)
        for path in placed.layer.modules:
            module, at = self.model.get_submodule(path), border
            if path in self.examined.channel:
                at = self._split_channels(module, path, placed, self.examined.channel[path])
            draws = self.options.draws
            drawn = draws if draws is not None and path in draws.paths else None
            if drawn is not None:
                draw_inside(module)
            if border.lines:
                split_pixels(module, border.lines, rules_under(strategy))
            for (dimension, _), group in zip(added_degrees(strategy), groups.added, strict=True):
                dimension.split_module(module, group)
            wrap_forward(module, strategy, self.offloader)
            if drawn is not None:
                pass_keys(module, path, drawn, lot_of(placed, self.meshes))
            self.done.borders[path] = at

    def _block(self, placed: LayerAssignment) -> nn.Module:
        return self.model.get_submodule(placed.layer.modules[0])

    def _mixtures(self, placed: LayerAssignment) -> tuple[BlockMixture, ...]:
        if placed.layer.role is not Role.BLOCK:
            return ()
        mixtures = find_mixtures(self._block(placed))
        if not mixtures and (spread := lines_of(placed.strategy).spread) is not None and spread.over is not None:
            remedy = f"No experts are found in {placed.layer.name}. Plan it with expert=1."
            raise InputError("expert", spread.over.size, remedy)
        return mixtures

    def _spread_experts(self, placed: LayerAssignment, groups: StrategyGroups) -> None:
        block = self._block(placed)
        if groups.spread is None:
            if self.options.expert_capacity is not None:
                spread_experts(block, None, None, self.options.expert_capacity)
            return
        apart = placed.layout.sequence > 1 and groups.spread.sliced
        slices = ProcessExchange(groups.weights) if apart else None
        spread = spread_experts(block, ProcessExchange(groups.spread.over), slices, self.options.expert_capacity)
        self.done.experts |= {f"{placed.layer.modules[0]}.{name}": shard for name, shard in spread.items()}

    def _split_matmuls(self, placed: LayerAssignment, groups: StrategyGroups) -> None:
        layer, strategy, group = placed.layer, placed.strategy, ProcessTensorGroup(groups.weights)
        if layer.role is not Role.BLOCK:
            modules = {path: self.model.get_submodule(path) for path in layer.modules}
            # elsewhere hooks take plain logits into the layout of the loss
            glue = glue_layout(self.stage)
            shares = placed.layout == glue and groups.tokens is None and not glue.splits_pixels
            plan = self.examined.tensor[layer.name]
            self.done.shards |= shard_layer(modules, plan, group, False, shares_logits=shares)
            return
        shared = placed.layout.sequence > 1  # tokens, between matmuls
        plan = _beside_experts(self.examined.tensor[layer.name], groups, shared)
        regather = strategy.recompute is Recompute.NONE  # what is recomputed is gathered again anyway
        shards = shard_layer(self._block(placed), plan, group, shared, regather=regather)
        named = {f"{layer.modules[0]}.{name}": shard for name, shard in shards.items()}
        spread = {} if plan.experts else self.done.experts
        self.done.shards |= {name: shard for name, shard in named.items() if name not in spread}

    def _split_channels(
        self, module: nn.Module, path: str, placed: LayerAssignment, plan: ChannelPlan
    ) -> BoundaryLayout:
        line = ProcessAxisGroup(self.meshes.groups(placed.strategy).channels)
        self.done.shards |= {f"{path}.{name}": one for name, one in shard_channels(module, plan, line).items()}
        if placed.layout.channels == 1:
            return BoundaryLayout(placed.layout)
        return BoundaryLayout(placed.layout, channels=line, outputs=plan.outputs)

    def _share_states(self, layers: Sequence[LayerAssignment]) -> None:
        strategy, done = layers[0].strategy, self.done
        mesh = self.meshes.groups(strategy).states.mesh
        modules = [self.model.get_submodule(path) for placed in layers for path in placed.layer.modules]
        # what cannot run (a ParameterList) would never be gathered: its parameters stay whole, as those of the root do
        runs = [module for module in modules if type(module).forward is not nn.Module.forward]
        holding = [module for module in runs if next(module.parameters(), None) is not None]
        if mesh is None or not holding or strategy.parameter_shards == 1:
            return
        partial = [name for name, shard in done.shards.items() if shard.placement is Placement.PARTIAL]
        ignored = {self.model.get_parameter(name) for name in partial} | self._share_experts(modules, strategy)
        # backward of the last layer starts immediately: keep its parameters gathered
        zero_stage = STAGE_2 if layers[-1].layer.role is Role.AFTER else strategy.zero_stage
        for part in _gathered_together(holding):
            managed = shard_group(ZeroGroup(part, mesh, zero_stage), ignored, self.options.compute)
            done.zero_modules += managed
            done.replicated += managed if strategy.replicas > 1 else []

    def _share_experts(self, modules: Sequence[nn.Module], strategy: Strategy) -> set[nn.Parameter]:
        """ZeRO of experts that are spread, over the ranks that hold the same ones; the parameters of which none do."""
        groups, inside = self.meshes.groups(strategy).spread, {part for module in modules for part in module.modules()}
        paths = dict.fromkeys(name.rpartition(".")[0] for name in self.done.experts)
        holders = [module for module in map(self.model.get_submodule, paths) if module in inside]
        if groups is None or groups.mesh is None:
            return {parameter for module in holders for parameter in module.parameters(recurse=False)}
        for module in holders:
            managed = shard_group(ZeroGroup((module,), groups.mesh, strategy.zero_stage), set(), self.options.compute)
            self.done.zero_modules += managed
            self.done.replicated += managed if groups.mesh.ndim > 1 else []
        return set()


def lot_of(placed: LayerAssignment, meshes: Meshes) -> SampleSlice:
    """This rank's share of a layer's work, by which it draws random numbers."""
    groups, strategy = meshes.groups(placed.strategy), placed.strategy
    line = groups.weights
    inner = (1, 0) if line is None else (dist.get_world_size(line), dist.get_rank(line))
    replicas = meshes.stage_devices // strategy.batch_degree
    return SampleSlice(strategy.batch_degree, meshes.index_in_stage // replicas, inner)


def tied_layers(model: nn.Module, stage: Sequence[LayerAssignment]) -> list[list[LayerAssignment]]:
    """The stage's layers in order; those that share parameters are together, at the place of the first."""
    together: list[list[LayerAssignment]] = []
    seen: list[set[int]] = []
    for placed in stage:
        held = {id(p) for path in placed.layer.modules for p in model.get_submodule(path).parameters()}
        home = next((index for index, parameters in enumerate(seen) if parameters & held), None)
        if home is None:
            together.append([placed])
            seen.append(held)
        else:
            together[home].append(placed)
            seen[home] |= held
    return together


def _beside_experts(plan: TensorPlan, groups: StrategyGroups, shared: bool) -> TensorPlan:
    """What is left to a tensor group where experts are spread: nothing of full ones; of those that it slices the sums,
    unless the exchange of shared tokens makes them."""
    if groups.spread is None:
        return plan
    if not groups.spread.sliced:
        return replace(plan, experts=())
    return replace(plan, experts=tuple(replace(expert, summed=not shared) for expert in plan.experts))


def _gathered_together(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, ...]]:
    """The modules of a layer that ZeRO gathers at once: those that train, and each frozen one by itself, or with others
    that hold the same parameters.

    FSDP gathers a group again when the gradient of its last module's output arrives; a frozen table gets none.
    """
    groups: list[tuple[set[nn.Module], set[nn.Parameter]]] = []
    for module in modules:
        members, parameters = {module}, set(module.parameters())
        for group in [group for group in groups if group[1] & parameters]:
            groups.remove(group)
            members, parameters = members | group[0], parameters | group[1]
        groups.append((members, parameters))
    trained = {
        member for members, held in groups if any(parameter.requires_grad for parameter in held) for member in members
    }
    frozen = [members for members, _ in groups if not members & trained]
    yield from (tuple(module for module in modules if module in members) for members in [trained, *frozen] if members)
