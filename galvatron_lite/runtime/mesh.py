"""The launched world as the plan sees it: stages of ranks, and the process groups of every strategy.

``parallelism.ranks`` says where the ranks of each dimension lie. Groups are made by all ranks in the same order, and
made once: strategies that split the ranks alike share them. Groups of one rank are None: nothing to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from galvatron_lite.errors import InputError, LaunchError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.sides import SIDES
from galvatron_lite.parallelism.process_groups import ProcessGroups
from galvatron_lite.parallelism.ranks import expert_slices, expert_spread_of, side_group, strides_of
from galvatron_lite.parallelism.strategy import ADDED, Strategy
from galvatron_lite.plans.io import pipeline_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.world import join

Group = dist.ProcessGroup | None
Ranks = tuple[int, ...]
Key = tuple[str, Ranks]

GRADIENTS, STATES, ACTIVATIONS, PIXELS, PIPELINE = "gradients", "states", "activations", "pixels", "pipeline"
TOKENS, EXPERTS = "tokens", "experts"
"""Purposes: groups of equal ranks are separate by purpose, so that traffic of one kind waits for no other."""


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """This rank's groups for the experts of a layer."""

    line: Group  # ranks over which the experts are spread
    gradients: Group  # ranks that hold the same experts (the same slices of them) and took other tokens to them
    # for ``fully_shard`` where some of those share the states: axes (data, zero), or only zero
    mesh: DeviceMesh | None
    sliced: bool  # whether the tensor group shares each expert


@dataclass(frozen=True, slots=True)
class StrategyGroups:
    """This rank's process groups under one strategy of its stage, and its place in them."""

    data: Group  # ranks that hold the same states and take other samples (for ZeRO's mesh)
    zero: Group  # ranks that share the states: ZeRO's, those of context and the spatial ones
    context: Group  # ranks that share the tokens of samples, attention included
    tensor: Group  # ranks that share the matmuls of each sample
    slices: Group  # ranks that share the channels of convolutions
    batch: Group  # data and zero together: ranks that take other samples; for statistics of all samples
    gradients: Group  # ranks that take other samples, tokens or pixels with equal slices of the parameters
    stage: Group  # all ranks of the stage; for gradients of parameters used on shares of tokens or channels
    everyone: Group  # all ranks of the stage; for moving activations between layouts
    depth: Group  # depth, height, width: ranks along a side of pictures
    height: Group
    width: Group
    zero_mesh: DeviceMesh | None  # for ``fully_shard``: axes (data, zero), or only zero; None without ZeRO
    batch_index: int  # which share of the samples this rank takes
    tensor_index: int  # this rank's place in ``tensor``
    expert: ExpertGroups | None = None  # groups of experts that are spread


@dataclass(frozen=True, slots=True)
class Meshes:
    """The world, and this rank's place in it."""

    rank: int  # this rank
    stages: int  # pipeline stages
    stage_devices: int  # ranks of one stage
    pipeline: Group  # ranks with this rank's place in every stage, in stage order
    # groups of strategies, of which only the degrees count, for this rank's stage
    by_degrees: Mapping[Strategy, StrategyGroups]
    first: int = 0  # rank of the first stage's first; not 0 where a part of the model has ranks of its own

    @property
    def world(self) -> int:
        """All ranks."""
        return self.stages * self.stage_devices

    @property
    def stage_index(self) -> int:
        """Which stage this rank works on."""
        return (self.rank - self.first) // self.stage_devices

    @property
    def index_in_stage(self) -> int:
        """This rank's place in its stage."""
        return (self.rank - self.first) % self.stage_devices

    def groups(self, strategy: Strategy) -> StrategyGroups:
        """This rank's groups under a strategy that a layer of its stage has."""
        return self.by_degrees[_degrees(strategy)]


def join_world(plan: Plan, device_type: str) -> None:
    """Start a process group where none runs, and raise LaunchError where it has not the plan's size."""
    join(torch.device(device_type))
    world = dist.get_world_size()
    if world != plan.devices:
        raise LaunchError(
            f"The plan is for {plan.devices} device(s), but {world} process(es) were launched. "
            f"Launch {plan.devices} (torchrun --nproc-per-node), or make a plan for {world} (--gpus {world})."
        )


def build_meshes(plan: Plan, device_type: str, groups: ProcessGroups | None = None) -> Meshes:
    """Every process group that the plan needs; all ranks must call it together.

    Starts a process group where none runs: from torchrun's environment, or of this process alone.
    """
    size, pipeline = plan.stage_devices, pipeline_of(plan)
    for run in (run for stage in plan.stages for run in stage.runs):
        if run.strategy.devices != size:
            remedy = f"It must take the stage's {size} devices."
            raise InputError(f"strategy of {run.first}", str(run.strategy), remedy)
    join_world(plan, device_type)
    rank = dist.get_rank()
    by_group = [
        _all_degrees(run.strategy for stage in pipeline.stages_of(group) for run in plan.stages[stage].runs)
        for group in range(plan.pipeline)
    ]
    keys = [key for group, every in enumerate(by_group) for one in every for key in _keys(one, group * size)]
    lines = [(PIPELINE, tuple(range(place, plan.devices, size))) for place in range(size)]
    world = _World([*keys, *lines], device_type, ProcessGroups() if groups is None else groups)
    group = rank // size
    views = {degrees: world.view(degrees, group * size) for degrees in by_group[group]}
    return Meshes(rank, plan.pipeline, size, world.group_of(lines), views)


def build_part_meshes(parts: Sequence[tuple[int, int, Sequence[Strategy]]], device_type: str) -> list[Meshes | None]:
    """Every process group of several parts of a model; all ranks must call it together, once the world is joined.

    Args:
        parts: first rank, number of consecutive ranks and strategies of each. Under a strategy of one device every rank
            does all the work.
        device_type: ``cuda`` or ``cpu``.

    Returns:
        By part: the groups of this rank; None where it is not one of the part's.
    """
    rank, by_part = dist.get_rank(), [(first, count, _all_degrees(every)) for first, count, every in parts]
    keys = [key for first, _, every in by_part for one in every for key in _keys(one, first)]
    world = _World(keys, device_type, ProcessGroups())
    meshes: list[Meshes | None] = []
    for first, count, every in by_part:
        if first <= rank < first + count:
            views = {one: world.view(one, first if one.devices > 1 else rank) for one in every}
            meshes.append(Meshes(rank, 1, count, None, views, first))
        else:
            meshes.append(None)
    return meshes


def _degrees(strategy: Strategy) -> Strategy:
    """A strategy of the same groups, the same for all strategies that have them."""
    plain = replace(strategy, sequence_parallel=False, recompute=Recompute.NONE, ulysses=False)
    plain = plain if plain.expert > 1 else replace(plain, expert_tensor=0)
    return replace(plain, zero_stage=3 if strategy.state_shards > 1 else 0)


def _all_degrees(strategies: Iterable[Strategy]) -> list[Strategy]:
    return sorted({_degrees(strategy) for strategy in strategies})


_ALL = ("data", "zero", "context", "tensor", *SIDES, "slices")
_SHARED = ("context", *SIDES)
"""Dimensions whose ranks share the tokens or pixels of samples."""
_GROUPS = {
    "data": (STATES, ("data",)),
    "zero": (STATES, ("zero", *_SHARED)),
    "context": (TOKENS, ("context",)),
    "tensor": (ACTIVATIONS, ("tensor",)),
    "slices": (ACTIVATIONS, ("slices",)),
    "batch": (ACTIVATIONS, ("data", "zero")),
    "gradients": (GRADIENTS, ("data", "zero", *_SHARED)),
    "stage": (GRADIENTS, _ALL),
    "everyone": (ACTIVATIONS, _ALL),
    **{side: (PIXELS, (side,)) for side in SIDES},
}
"""Of each group its purpose, and the dimensions in which its ranks differ; those that are added beside data."""


def _strides(degrees: Strategy) -> dict[str, int]:
    """Ranks from one to the next in each dimension, the outermost first."""
    strides = {**strides_of(degrees), "slices": 1, **{side: side_group(degrees, side).stride for side in SIDES}}
    return {name: int(strides[name]) for name in (*ADDED, *_ALL)}


def _lines(degrees: Strategy, start: int, names: Collection[str]) -> list[Ranks]:
    """Groups of the ranks that differ in these dimensions only, of a stage that starts at rank ``start``."""

    def offsets(inside: bool) -> list[int]:
        steps = [range(0, getattr(degrees, name) * stride, stride)
                 for name, stride in _strides(degrees).items() if (name in names) is inside]  # fmt: skip
        return [sum(place) for place in product(*steps)]

    return [tuple(start + first + offset for offset in offsets(inside=True)) for first in offsets(inside=False)]


def _named_keys(degrees: Strategy, start: int) -> dict[str, list[Key]]:
    skipped = ("data", "zero") if degrees.state_shards == 1 else ()
    return {
        name: [(purpose, ranks) for ranks in _lines(degrees, start, (*ADDED, *dims) if "data" in dims else dims)]
        if name not in skipped
        else []
        for name, (purpose, dims) in _GROUPS.items()
    }


def _keys(degrees: Strategy, start: int) -> list[Key]:
    named = [key for keys in _named_keys(degrees, start).values() for key in keys]
    if degrees.expert == 1:
        return named
    grid = _expert_grid(degrees, start)
    purposes = (EXPERTS, grid, 2), (GRADIENTS, grid.flatten(0, 1), 0), (STATES, grid, 1), (STATES, grid, 0)
    return named + [
        (purpose, tuple(row))
        for purpose, ranks, dim in purposes
        for row in ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    ]


def _expert_grid(degrees: Strategy, start: int) -> torch.Tensor:
    """The ranks of a stage by (replicas, shards, experts, slices)."""
    shards, slices = int(expert_spread_of(degrees).shards.size), int(expert_slices(degrees))
    return (start + torch.arange(degrees.devices)).reshape(-1, shards, degrees.expert, slices)


class _World:
    """One process group for every distinct key of more than one rank; the same order on every rank."""

    def __init__(self, keys: Sequence[Key], device_type: str, groups: ProcessGroups) -> None:
        self._rank, self._device = dist.get_rank(), device_type
        wanted = [key for key in dict.fromkeys(keys) if len(key[1]) > 1]
        self._groups = {(purpose, ranks): groups.group(ranks, purpose) for purpose, ranks in wanted}
        for (purpose, ranks), group in self._groups.items():
            if purpose in (PIXELS, TOKENS) and self._rank in ranks and device_type == "cuda":
                # the first messages from rank to rank make NCCL's communicator, and not every rank may have one to send
                dist.all_reduce(torch.zeros(1, device=device_type), group=group)

    def group_of(self, keys: Sequence[Key]) -> Group:
        """The group with this rank."""
        return next((self._groups[key] for key in keys if self._rank in key[1] and key in self._groups), None)

    def view(self, degrees: Strategy, start: int) -> StrategyGroups:
        """This rank's groups under a strategy of a stage that starts at rank ``start``."""
        groups = {name: self.group_of(keys) for name, keys in _named_keys(degrees, start).items()}
        rows = _lines(degrees, start, (*ADDED, "data", "zero", *_SHARED))
        grid = torch.tensor(next(row for row in rows if self._rank in row)).reshape(degrees.replicas, -1)
        place, strides = self._rank - start, _strides(degrees)
        return StrategyGroups(
            **groups,
            zero_mesh=self._state_mesh(groups["data"], groups["zero"], grid),
            batch_index=place // strides["zero"],
            tensor_index=place // strides["tensor"] % degrees.tensor,
            expert=self._experts(degrees, start) if degrees.expert > 1 else None,
        )

    def _experts(self, degrees: Strategy, start: int) -> ExpertGroups:
        grid = _expert_grid(degrees, start)
        replica, shard, expert, part = (int(at) for at in (grid == self._rank).nonzero()[0])
        holders = grid[:, :, expert, part]

        def group(purpose: str, ranks: torch.Tensor) -> Group:
            return self._groups.get((purpose, tuple(ranks.flatten().tolist())))

        pair = group(STATES, holders[:, shard]), group(STATES, holders[replica])
        return ExpertGroups(
            group(EXPERTS, grid[replica, shard, :, part]),
            group(GRADIENTS, holders),
            self._state_mesh(*pair, holders) if grid.shape[1] > 1 else None,
            sliced=degrees.tensor > 1 and grid.shape[3] == degrees.tensor,
        )

    def _state_mesh(self, replicate: Group, shard: Group, grid: torch.Tensor) -> DeviceMesh | None:
        """The mesh of replicas and shards, each a group or of one rank, and of the ranks (replicas, shards) of both."""
        if shard is None:
            return None
        if replicate is None:
            return DeviceMesh.from_group(shard, self._device, mesh_dim_names=(_axis("zero", shard),))
        names = _axis("data", replicate), _axis("zero", shard)
        return DeviceMesh.from_group([replicate, shard], self._device, mesh=grid, mesh_dim_names=names)


def _axis(name: str, group: dist.ProcessGroup) -> str:
    """A mesh axis' name, with that of its group: torch keeps results by mesh, and takes meshes of equal ranks and axis
    names for the same, even one whose groups were destroyed together with an earlier world of this process.
    """
    return f"{name}{group.group_name}"
