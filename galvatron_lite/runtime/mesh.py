"""The launched world as the plan sees it: stages of ranks, and the process groups of every strategy.

World ranks are row-major over (stages, data, zero, tensor), tensor innermost. Groups are made by all ranks in the same
order, and made once: strategies that split the ranks alike share them. Groups of one rank are None: nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from galvatron_lite.errors import InputError, LaunchError
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.parallelism.pipeline.schedule import EXECUTABLE
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.world import join

Group = dist.ProcessGroup | None
Ranks = tuple[int, ...]
Key = tuple[str, Ranks]
Degrees = tuple[int, int, int]

GRADIENTS, STATES, ACTIVATIONS, PIPELINE = "gradients", "states", "activations", "pipeline"
"""Purposes: groups of equal ranks are separate by purpose, so that traffic of one kind waits for no other."""


@dataclass(frozen=True, slots=True)
class StrategyGroups:
    """This rank's process groups under one strategy of its stage, and its place in them.

    Attributes:
        data: ranks that hold the same states and take other samples (for ZeRO's mesh).
        zero: ranks that share the states.
        tensor: ranks that share the matmuls of each sample.
        batch: data and zero together: ranks that take other samples; for gradients.
        stage: all ranks of the stage; for gradients of parameters used on token shards.
        everyone: all ranks of the stage; for moving activations between layouts.
        zero_mesh: what ``fully_shard`` takes: axes (data, zero), or only zero; None without ZeRO.
        batch_index: which share of the samples this rank takes.
        tensor_index: this rank's place in ``tensor``.
    """

    data: Group
    zero: Group
    tensor: Group
    batch: Group
    stage: Group
    everyone: Group
    zero_mesh: DeviceMesh | None
    batch_index: int
    tensor_index: int


@dataclass(frozen=True, slots=True)
class Meshes:
    """The world, and this rank's place in it.

    Attributes:
        rank: this rank.
        stages: pipeline stages.
        stage_devices: ranks of one stage.
        pipeline: ranks with this rank's place in every stage, in stage order.
        by_degrees: groups by (data, zero, tensor), for this rank's stage.
    """

    rank: int
    stages: int
    stage_devices: int
    pipeline: Group
    by_degrees: Mapping[Degrees, StrategyGroups]

    @property
    def world(self) -> int:
        """All ranks."""
        return self.stages * self.stage_devices

    @property
    def stage_index(self) -> int:
        """Which stage this rank works on."""
        return self.rank // self.stage_devices

    @property
    def index_in_stage(self) -> int:
        """This rank's place in its stage."""
        return self.rank % self.stage_devices

    def groups(self, strategy: Strategy) -> StrategyGroups:
        """This rank's groups under a strategy that a layer of its stage has."""
        return self.by_degrees[_degrees(strategy)]


def build_meshes(plan: Plan, device_type: str) -> Meshes:
    """Every process group that the plan needs; all ranks must call it together.

    Starts a process group where none runs: from torchrun's environment, or of this process alone.

    Args:
        plan: how the model is split.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        LaunchError: the world has another size than the plan.
        InputError: a strategy does not take exactly the devices of its stage.
    """
    _check_schedule(plan)
    _check_strategies(plan)
    join(torch.device(device_type))
    world = dist.get_world_size()
    if world != plan.devices:
        raise LaunchError(
            f"The plan is for {plan.devices} device(s), but {world} process(es) were launched. "
            f"Launch {plan.devices} (torchrun --nproc-per-node), or make a plan for {world} (--gpus {world})."
        )
    return _build(plan, device_type, dist.get_rank())


def _check_schedule(plan: Plan) -> None:
    if plan.virtual_stages != 1:
        raise InputError("virtual_stages", plan.virtual_stages, "Plans are trained with one stage a group of devices.")
    if len(plan.stages) > 1 and plan.schedule not in EXECUTABLE:
        offered = " or ".join(schedule.value for schedule in EXECUTABLE)
        raise InputError("schedule", plan.schedule.value, f"It is priced, but not trained with yet; use {offered}.")


def _check_strategies(plan: Plan) -> None:
    for stage in plan.stages:
        for run in stage.runs:
            if run.strategy.devices != plan.stage_devices:
                raise InputError(
                    f"strategy of {run.first}",
                    str(run.strategy),
                    f"It must take the stage's {plan.stage_devices} devices.",
                )


def _degrees(strategy: Strategy) -> Degrees:
    return strategy.data, strategy.zero, strategy.tensor


def _stage_degrees(plan: Plan) -> list[list[Degrees]]:
    return [sorted({_degrees(run.strategy) for run in stage.runs}) for stage in plan.stages]


def _build(plan: Plan, device_type: str, rank: int) -> Meshes:
    per_stage, size = _stage_degrees(plan), plan.stage_devices
    keys = [key for stage, all_degrees in enumerate(per_stage) for d in all_degrees for key in _keys(d, stage * size)]
    keys += [(PIPELINE, tuple(range(place, plan.devices, size))) for place in range(size)]
    made = _make_groups(keys)
    stage = rank // size
    views = {degrees: _view(degrees, stage * size, rank, made, device_type) for degrees in per_stage[stage]}
    pipeline = _own(made, [(PIPELINE, tuple(range(rank % size, plan.devices, size)))], rank)
    return Meshes(rank, len(plan.stages), size, pipeline, views)


def _lines(degrees: Degrees, start: int) -> dict[str, list[Ranks]]:
    """Rank groups of a stage starting at rank ``start``, by axis."""
    data, zero, tensor = degrees
    grid = (start + torch.arange(data * zero * tensor)).reshape(data, zero, tensor)
    shapes = {
        "data": grid.permute(1, 2, 0).reshape(-1, data),
        "zero": grid.permute(0, 2, 1).reshape(-1, zero),
        "tensor": grid.reshape(-1, tensor),
        "batch": grid.permute(2, 0, 1).reshape(tensor, -1),
        "stage": grid.reshape(1, -1),
    }
    return {axis: [tuple(int(r) for r in row) for row in rows] for axis, rows in shapes.items()}


def _named_keys(degrees: Degrees, start: int) -> dict[str, list[Key]]:
    lines = _lines(degrees, start)
    purposes = {"data": STATES, "zero": STATES, "tensor": ACTIVATIONS, "batch": GRADIENTS, "stage": GRADIENTS}
    named = {axis: [(purpose, ranks) for ranks in lines[axis]] for axis, purpose in purposes.items()}
    if degrees[1] == 1:
        named["data"] = named["zero"] = []
    return named | {"everyone": [(ACTIVATIONS, ranks) for ranks in lines["stage"]]}


def _keys(degrees: Degrees, start: int) -> list[Key]:
    return [key for keys in _named_keys(degrees, start).values() for key in keys]


def _make_groups(keys: Sequence[Key]) -> dict[Key, dist.ProcessGroup]:
    """One process group for every distinct key of more than one rank; the same order on every rank."""
    wanted = [key for key in dict.fromkeys(keys) if len(key[1]) > 1]
    return {(purpose, ranks): dist.new_group(list(ranks), group_desc=purpose) for purpose, ranks in wanted}


def _own(made: Mapping[Key, dist.ProcessGroup], keys: Sequence[Key], rank: int) -> Group:
    return next((made[key] for key in keys if rank in key[1] and key in made), None)


def _view(
    degrees: Degrees, start: int, rank: int, made: Mapping[Key, dist.ProcessGroup], device_type: str
) -> StrategyGroups:
    named, place = _named_keys(degrees, start), rank - start
    own = {axis: _own(made, keys, rank) for axis, keys in named.items()}
    return StrategyGroups(
        **own,
        zero_mesh=_zero_mesh(degrees, start, rank, own, device_type),
        batch_index=place // degrees[2],
        tensor_index=place % degrees[2],
    )


def _zero_mesh(
    degrees: Degrees, start: int, rank: int, own: Mapping[str, Group], device_type: str
) -> DeviceMesh | None:
    data, zero, tensor = degrees
    shard, replicate = own["zero"], own["data"]
    if shard is None:
        return None
    if replicate is None:
        return DeviceMesh.from_group(shard, device_type, mesh_dim_names=(_axis("zero", shard),))
    grid = (start + torch.arange(data * zero * tensor)).reshape(data, zero, tensor)[..., (rank - start) % tensor]
    names = _axis("data", replicate), _axis("zero", shard)
    return DeviceMesh.from_group([replicate, shard], device_type, mesh=grid, mesh_dim_names=names)


def _axis(name: str, group: dist.ProcessGroup) -> str:
    """A mesh axis' name, with that of its group: torch keeps results by mesh, and takes meshes of equal ranks and axis
    names for the same, even one whose groups were destroyed together with an earlier world of this process.
    """
    return f"{name}{group.group_name}"
