"""Splitting the layers of a stage in place, one layer at a time."""

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
    """How a stage was split."""

    shards: dict[str, ParameterShard] = field(default_factory=dict)  # parts of parameters that are sliced, by name
    experts: dict[str, ParameterShard] = field(default_factory=dict)  # parts of parameters of spread experts, by name
    zero_modules: list[FSDPModule] = field(default_factory=list)  # modules that FSDP manages
    replicated: list[FSDPModule] = field(default_factory=list)  # those of them whose mesh has a data axis, too
    borders: dict[str, BoundaryLayout] = field(default_factory=dict)  # layouts inside modules of layers, by path


@dataclass(frozen=True, slots=True)
class StageSplitter:
    """Splits a stage's layers in place."""

    model: nn.Module  # contains the layers
    stage: Sequence[LayerAssignment]  # layers that share parameters have equal strategies
    meshes: Meshes
    examined: Examined  # how layers are split
    options: SetupOptions
    result: Sharded = field(default_factory=Sharded)
    offloader: ActivationOffloader = field(default_factory=ActivationOffloader)  # moves activations to host memory

    def split(self, place: Callable[[Layer], None], roots: Sequence[nn.Module]) -> Sharded:
        """Split the stage by tensor, channel, context, spatial and expert parallelism, recomputation, offload, ZeRO.

        Args:
            place: moves a layer to the device; called for one layer at a time, before it is split.
            roots: the modules that are called.

        Raises:
            InputError: a layer cannot be split as its strategy says.
        """
        draws = self.options.draws
        if draws is not None:
            inside = {path for placed in self.stage for path in placed.layer.modules}
            draw_nothing(self.model, draws.paths - {"", *inside})
        for layers in tied_layers(self.model, self.stage):
            for placed in layers:
                place(placed.layer)
                self._split_layer(placed)
            self._shard_states(layers)
        meshes = (self.meshes.groups(placed.strategy).states.mesh for placed in self.stage)
        mesh = next((mesh for mesh in meshes if mesh is not None), None)
        if self.result.zero_modules and mesh is not None:
            for root in roots:
                apply_root(root, mesh)
            self._free_gathered(roots)
        return self.result

    def _free_gathered(self, roots: Sequence[nn.Module]) -> None:
        """Let layers that gather no parameters free the memory into which layers before them were gathered."""

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
            self._split_module(path, placed, border)

    def _split_module(self, path: str, placed: LayerAssignment, border: BoundaryLayout) -> None:
        module, draws = self.model.get_submodule(path), self.options.draws
        self.result.borders[path] = border
        if path in self.examined.channel:
            self.result.borders[path] = self._split_channels(module, path, placed, self.examined.channel[path])
        has_draws = draws is not None and path in draws.paths
        if has_draws:
            draw_inside(module)
        if border.lines:
            split_pixels(module, border.lines, rules_under(placed.strategy))
        groups = self.meshes.groups(placed.strategy)
        for (dimension, _), group in zip(added_degrees(placed.strategy), groups.added, strict=True):
            dimension.split_module(module, group)
        wrap_forward(module, placed.strategy, self.offloader)
        if has_draws and draws is not None:
            pass_keys(module, path, draws, sample_slice(placed, self.meshes))

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
        block, capacity = self._block(placed), self.options.expert_capacity
        if groups.spread is None:
            if capacity is not None:
                spread_experts(block, None, None, capacity)
            return
        has_slices = placed.layout.sequence > 1 and groups.spread.sliced
        slices = ProcessExchange(groups.weights) if has_slices else None
        shards = spread_experts(block, ProcessExchange(groups.spread.over), slices, capacity)
        self.result.experts |= {f"{placed.layer.modules[0]}.{name}": shard for name, shard in shards.items()}

    def _split_matmuls(self, placed: LayerAssignment, groups: StrategyGroups) -> None:
        layer, group, plan = placed.layer, ProcessTensorGroup(groups.weights), self.examined.tensor[placed.layer.name]
        if layer.role is not Role.BLOCK:
            modules = {path: self.model.get_submodule(path) for path in layer.modules}
            # elsewhere hooks convert plain logits to the layout of the loss
            glue = glue_layout(self.stage)
            shares_logits = placed.layout == glue and groups.tokens is None and not glue.splits_pixels
            self.result.shards |= shard_layer(modules, plan, group, False, shares_logits=shares_logits)
            return
        shares_tokens = placed.layout.sequence > 1  # between matmuls
        plan = _beside_experts(plan, groups, shares_tokens)
        regather = placed.strategy.recompute is Recompute.NONE  # what is recomputed is gathered again anyway
        shards = shard_layer(self._block(placed), plan, group, shares_tokens, regather=regather)
        named = {f"{layer.modules[0]}.{name}": shard for name, shard in shards.items()}
        spread = {} if plan.experts else self.result.experts
        self.result.shards |= {name: shard for name, shard in named.items() if name not in spread}

    def _split_channels(
        self, module: nn.Module, path: str, placed: LayerAssignment, plan: ChannelPlan
    ) -> BoundaryLayout:
        line = ProcessAxisGroup(self.meshes.groups(placed.strategy).channels)
        shards = shard_channels(module, plan, line)
        self.result.shards |= {f"{path}.{name}": shard for name, shard in shards.items()}
        if placed.layout.channels == 1:
            return BoundaryLayout(placed.layout)
        return BoundaryLayout(placed.layout, channels=line, outputs=plan.outputs)

    def _shard_states(self, layers: Sequence[LayerAssignment]) -> None:
        """Shard the parameters of layers by ZeRO; the layers share parameters, and have one strategy."""
        strategy, result = layers[0].strategy, self.result
        mesh = self.meshes.groups(strategy).states.mesh
        modules = [self.model.get_submodule(path) for placed in layers for path in placed.layer.modules]
        # modules that cannot run (a ParameterList) would never be gathered: their parameters stay complete, as those of
        # the root do
        runnable = [module for module in modules if type(module).forward is not nn.Module.forward]
        with_parameters = [module for module in runnable if next(module.parameters(), None) is not None]
        if mesh is None or not with_parameters or strategy.parameter_shards == 1:
            return
        partial = [name for name, shard in result.shards.items() if shard.placement is Placement.PARTIAL]
        ignored = {self.model.get_parameter(name) for name in partial} | self._shard_experts(modules, strategy)
        # backward of the last layer starts immediately: keep its parameters gathered
        zero_stage = STAGE_2 if layers[-1].layer.role is Role.AFTER else strategy.zero_stage
        for group in _gathered_together(with_parameters):
            managed = shard_group(ZeroGroup(group, mesh, zero_stage), ignored, self.options.compute)
            result.zero_modules += managed
            result.replicated += managed if strategy.replicas > 1 else []

    def _shard_experts(self, modules: Sequence[nn.Module], strategy: Strategy) -> set[nn.Parameter]:
        """Shard spread experts by ZeRO over the ranks with the same experts; return the parameters if none have."""
        groups, inside = self.meshes.groups(strategy).spread, {part for module in modules for part in module.modules()}
        paths = dict.fromkeys(name.rpartition(".")[0] for name in self.result.experts)
        experts = [module for module in map(self.model.get_submodule, paths) if module in inside]
        if groups is None or groups.mesh is None:
            return {parameter for module in experts for parameter in module.parameters(recurse=False)}
        for module in experts:
            managed = shard_group(ZeroGroup((module,), groups.mesh, strategy.zero_stage), set(), self.options.compute)
            self.result.zero_modules += managed
            self.result.replicated += managed if groups.mesh.ndim > 1 else []
        return set()


def sample_slice(placed: LayerAssignment, meshes: Meshes) -> SampleSlice:
    """This rank's share of a layer's work, by which it draws random numbers."""
    strategy, line = placed.strategy, meshes.groups(placed.strategy).weights
    inner = (1, 0) if line is None else (dist.get_world_size(line), dist.get_rank(line))
    replicas = meshes.stage_devices // strategy.batch_degree
    return SampleSlice(strategy.batch_degree, meshes.index_in_stage // replicas, inner)


def tied_layers(model: nn.Module, stage: Sequence[LayerAssignment]) -> list[list[LayerAssignment]]:
    """Group the layers of a stage that share parameters, in the order of the first layer of each group."""
    groups: list[list[LayerAssignment]] = []
    parameters_of: list[set[int]] = []
    for placed in stage:
        ids = {id(p) for path in placed.layer.modules for p in model.get_submodule(path).parameters()}
        index = next((index for index, other in enumerate(parameters_of) if other & ids), None)
        if index is None:
            groups.append([placed])
            parameters_of.append(ids)
        else:
            groups[index].append(placed)
            parameters_of[index] |= ids
    return groups


def _beside_experts(plan: TensorPlan, groups: StrategyGroups, shares_tokens: bool) -> TensorPlan:
    """The plan without what a tensor group does not do where experts are spread.

    It does not slice complete experts. It sums the results of experts that it slices, unless it shares tokens, whose
    exchange does so.
    """
    if groups.spread is None:
        return plan
    if not groups.spread.sliced:
        return replace(plan, experts=())
    return replace(plan, experts=tuple(replace(expert, summed=not shares_tokens) for expert in plan.experts))


def _gathered_together(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, ...]]:
    """Group the modules of a layer that ZeRO gathers at once: those that train, and each frozen module by itself, or
    with others that share its parameters.

    FSDP gathers a group again when the gradient of its last module's output arrives; that of a frozen table has none.
    """
    groups: list[tuple[set[nn.Module], set[nn.Parameter]]] = []
    for module in modules:
        members, parameters = {module}, set(module.parameters())
        for group in [group for group in groups if group[1] & parameters]:
            groups.remove(group)
            members, parameters = members | group[0], parameters | group[1]
        groups.append((members, parameters))
    trained = {
        member
        for members, parameters in groups
        if any(parameter.requires_grad for parameter in parameters)
        for member in members
    }
    frozen = [members for members, _ in groups if not members & trained]
    yield from (tuple(module for module in modules if module in members) for members in [trained, *frozen] if members)
