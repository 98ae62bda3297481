"""The launched world as the plan sees it: stages of ranks, and the process groups of every strategy.

World ranks are row-major over (stages, data, zero, context, tensor, depth, height, width, channel), the last innermost.
Groups are made by all ranks in the same order, and made once: strategies that split the ranks alike share them. Groups
of one rank are None: nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from galvatron_lite.errors import InputError, LaunchError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.process_groups import ProcessGroups
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.execution import pipeline_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.expert_groups import ExpertGroups, expert_groups, expert_keys
from galvatron_lite.world import join

Group = dist.ProcessGroup | None
Ranks = tuple[int, ...]
Key = tuple[str, Ranks]

GRADIENTS, STATES, ACTIVATIONS, PIXELS, PIPELINE = "gradients", "states", "activations", "pixels", "pipeline"
TOKENS = "tokens"
"""Purposes: groups of equal ranks are separate by purpose, so that traffic of one kind waits for no other."""


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
    zero_mesh: DeviceMesh | None  # what ``fully_shard`` takes: axes (data, zero), or only zero; None without ZeRO
    batch_index: int  # which share of the samples this rank takes
    tensor_index: int  # this rank's place in ``tensor``
    expert: ExpertGroups | None = None  # groups of experts that are spread; None where they are not


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


def build_meshes(plan: Plan, device_type: str, groups: ProcessGroups | None = None) -> Meshes:
    """Every process group that the plan needs; all ranks must call it together.

    Starts a process group where none runs: from torchrun's environment, or of this process alone.

    Args:
        plan: how the model is split.
        device_type: ``cpu`` or ``cuda``.
        groups: makes them.

    Raises:
        LaunchError: the world has another size than the plan.
        InputError: a strategy does not take exactly the devices of its stage.
    """
    _check_strategies(plan)
    join_world(plan, device_type)
    return _build(plan, device_type, dist.get_rank(), ProcessGroups() if groups is None else groups)


def join_world(plan: Plan, device_type: str) -> None:
    """Start a process group where none runs, and see that it has the plan's size.

    Raises:
        LaunchError: it has another.
    """
    join(torch.device(device_type))
    world = dist.get_world_size()
    if world != plan.devices:
        raise LaunchError(
            f"The plan is for {plan.devices} device(s), but {world} process(es) were launched. "
            f"Launch {plan.devices} (torchrun --nproc-per-node), or make a plan for {world} (--gpus {world})."
        )


@dataclass(frozen=True, slots=True)
class MeshPart:
    """Layers that have ranks of their own, and no pipeline."""

    first: int  # their first rank
    devices: int  # how many consecutive ranks
    strategies: tuple[Strategy, ...]  # of the layers. Those of one device: every rank does the whole work


def build_part_meshes(parts: Sequence[MeshPart], device_type: str) -> list[Meshes | None]:
    """Every process group of several parts of a model; all ranks must call it together, once the world is joined.

    Returns:
        By part: the groups of this rank; None where it is not one of the part's.
    """
    rank = dist.get_rank()
    keys = [key for part in parts for degrees in _part_degrees(part) for key in _keys(degrees, part.first)]
    made = _make_groups(keys, device_type, ProcessGroups())
    return [_part_view(part, rank, made, device_type) for part in parts]


def _part_degrees(part: MeshPart) -> list[Strategy]:
    return sorted({_degrees(strategy) for strategy in part.strategies})


def _part_view(part: MeshPart, rank: int, groups: Mapping[Key, dist.ProcessGroup], device_type: str) -> Meshes | None:
    if not part.first <= rank < part.first + part.devices:
        return None
    views = {
        degrees: _view(degrees, part.first if degrees.devices > 1 else rank, rank, groups, device_type)
        for degrees in _part_degrees(part)
    }
    return Meshes(rank, 1, part.devices, None, views, part.first)


def _check_strategies(plan: Plan) -> None:
    for stage in plan.stages:
        for run in stage.runs:
            if run.strategy.devices != plan.stage_devices:
                raise InputError(
                    f"strategy of {run.first}",
                    str(run.strategy),
                    f"It must take the stage's {plan.stage_devices} devices.",
                )


def _degrees(strategy: Strategy) -> Strategy:
    """A strategy of the same groups, the same for all strategies that have them."""
    sharded = strategy.state_shards > 1
    plain = replace(strategy, sequence_parallel=False, recompute=Recompute.NONE, ulysses=False)
    plain = plain if plain.expert > 1 else replace(plain, expert_tensor=0)
    return replace(plain, zero_stage=3 if sharded else 0)


def _group_degrees(plan: Plan) -> list[list[Strategy]]:
    """By group of devices: the degrees of all its stages."""
    pipeline = pipeline_of(plan)
    runs = [
        [run for stage in pipeline.stages_of(group) for run in plan.stages[stage].runs]
        for group in range(plan.pipeline)
    ]
    return [sorted({_degrees(run.strategy) for run in own}) for own in runs]


def _build(plan: Plan, device_type: str, rank: int, groups: ProcessGroups) -> Meshes:
    per_stage, size = _group_degrees(plan), plan.stage_devices
    keys = [key for stage, all_degrees in enumerate(per_stage) for d in all_degrees for key in _keys(d, stage * size)]
    keys += [(PIPELINE, tuple(range(place, plan.devices, size))) for place in range(size)]
    made = _make_groups(keys, device_type, groups)
    stage = rank // size
    views = {degrees: _view(degrees, stage * size, rank, made, device_type) for degrees in per_stage[stage]}
    pipeline = _group_of(made, [(PIPELINE, tuple(range(rank % size, plan.devices, size)))], rank)
    return Meshes(rank, plan.pipeline, size, pipeline, views)


_ORDER = ("data", "zero", "context", "tensor", "depth", "height", "width", "slices")
"""Fields of ``Strategy`` in the order of ranks."""
_SPATIAL = ("depth", "height", "width")
_SHARED = ("context", *_SPATIAL)
"""Those whose ranks share the tokens or pixels of samples."""
_GROUPS = {
    "data": (STATES, ("data",)),
    "zero": (STATES, ("zero", *_SHARED)),
    "context": (TOKENS, ("context",)),
    "tensor": (ACTIVATIONS, ("tensor",)),
    "slices": (ACTIVATIONS, ("slices",)),
    "batch": (ACTIVATIONS, ("data", "zero")),
    "gradients": (GRADIENTS, ("data", "zero", *_SHARED)),
    "stage": (GRADIENTS, _ORDER),
    "everyone": (ACTIVATIONS, _ORDER),
    **{side: (PIXELS, (side,)) for side in _SPATIAL},
}
"""Of each group its purpose, and the degrees in which its ranks differ."""


def _lines(degrees: Strategy, start: int, names: Sequence[str]) -> list[Ranks]:
    """Groups of the ranks that differ in these degrees only, of a stage that starts at rank ``start``."""
    shape = [getattr(degrees, name) for name in _ORDER]
    grid = (start + torch.arange(degrees.devices)).reshape(shape)
    inside = [place for place, name in enumerate(_ORDER) if name in names]
    outside = [place for place in range(len(shape)) if place not in inside]
    rows = grid.permute(outside + inside).reshape(-1, prod(shape[place] for place in inside))
    return [tuple(int(rank) for rank in row) for row in rows]


def _named_keys(degrees: Strategy, start: int) -> dict[str, list[Key]]:
    skipped = ("data", "zero") if degrees.state_shards == 1 else ()
    return {
        axis: [(purpose, ranks) for ranks in _lines(degrees, start, names)] if axis not in skipped else []
        for axis, (purpose, names) in _GROUPS.items()
    }


def _keys(degrees: Strategy, start: int) -> list[Key]:
    named = [key for keys in _named_keys(degrees, start).values() for key in keys]
    return named + expert_keys(degrees, start, STATES, GRADIENTS)


def _make_groups(keys: Sequence[Key], device_type: str, groups: ProcessGroups) -> dict[Key, dist.ProcessGroup]:
    """One process group for every distinct key of more than one rank; the same order on every rank."""
    wanted = [key for key in dict.fromkeys(keys) if len(key[1]) > 1]
    made = {(purpose, ranks): groups.group(ranks, purpose) for purpose, ranks in wanted}
    for (purpose, ranks), group in made.items():
        if purpose in (PIXELS, TOKENS) and dist.get_rank() in ranks and device_type == "cuda":
            # the first messages from rank to rank make NCCL's communicator, and not every rank may have one to send
            dist.all_reduce(torch.zeros(1, device=device_type), group=group)
    return made


def _group_of(groups: Mapping[Key, dist.ProcessGroup], keys: Sequence[Key], rank: int) -> Group:
    return next((groups[key] for key in keys if rank in key[1] and key in groups), None)


def _view(
    degrees: Strategy, start: int, rank: int, groups: Mapping[Key, dist.ProcessGroup], device_type: str
) -> StrategyGroups:
    own = {axis: _group_of(groups, keys, rank) for axis, keys in _named_keys(degrees, start).items()}
    mesh = partial(_state_mesh, device_type=device_type)
    place, inner = rank - start, degrees.spatial * degrees.slices
    shared = degrees.tensor * degrees.context
    return StrategyGroups(
        **own,
        zero_mesh=_zero_mesh(degrees, start, rank, own, device_type),
        batch_index=place // (inner * shared),
        tensor_index=place // inner % degrees.tensor,
        expert=expert_groups(degrees, start, rank, groups, (STATES, GRADIENTS), mesh),
    )


def _zero_mesh(
    degrees: Strategy, start: int, rank: int, groups: Mapping[str, Group], device_type: str
) -> DeviceMesh | None:
    if groups["zero"] is None:
        return None
    rows = _lines(degrees, start, ("data", "zero", *_SHARED))
    mine = next(row for row in rows if rank in row)
    return _state_mesh((groups["data"], groups["zero"]), torch.tensor(mine).reshape(degrees.data, -1), device_type)


def _state_mesh(groups: Sequence[Group], grid: torch.Tensor, device_type: str) -> DeviceMesh | None:
    """The mesh of replicas and shards, each a group or of one rank, and of the ranks (replicas, shards) of both."""
    replicate, shard = groups
    if shard is None:
        return None
    if replicate is None:
        return DeviceMesh.from_group(shard, device_type, mesh_dim_names=(_axis("zero", shard),))
    names = _axis("data", replicate), _axis("zero", shard)
    return DeviceMesh.from_group([replicate, shard], device_type, mesh=grid, mesh_dim_names=names)


def _axis(name: str, group: dist.ProcessGroup) -> str:
    """A mesh axis' name, with that of its group: torch keeps results by mesh, and takes meshes of equal ranks and axis
    names for the same, even one whose groups were destroyed together with an earlier world of this process.
    """
    return f"{name}{group.group_name}"
