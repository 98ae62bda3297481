"""The launched processes under a plan: the ranks of each stage, and the process groups of each strategy.

``parallelism.lines`` defines which ranks of a stage work together. All ranks create groups in the same order, and each
once: strategies that divide the ranks alike share groups. A group of one rank is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from galvatron_lite.errors import InputError, LaunchError
from galvatron_lite.parallelism.axes import ParameterSpread, Purpose, RankLine
from galvatron_lite.parallelism.lines import StageLines, StageRanks, lines_of
from galvatron_lite.parallelism.process_groups import ProcessGroups
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import pipeline_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.world import join

Group = dist.ProcessGroup | None
Ranks = tuple[int, ...]
Key = tuple[str, Ranks]
PIPELINE = "pipeline"
"""The purpose of groups across stages; for groups inside a stage see ``Purpose``."""


@dataclass(frozen=True, slots=True)
class StateGroups:
    """This rank's groups for some parameters of a layer, see ``ParameterSpread``."""

    gradients: Group  # ranks with the same part, which use it on other samples, tokens or pixels
    # for ``fully_shard``: axes (replicas, shards), or only shards; None if states are not sharded
    mesh: DeviceMesh | None
    over: Group = None  # ranks with other parts
    sliced: bool = False  # whether the ranks that share weights share each of these parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyGroups(StageRanks[Group]):
    """This rank's process groups under a strategy of its stage, and its place in them."""

    batch_index: int  # index of this rank's share of the samples
    weights_index: int  # index of its slice of the parameters
    states: StateGroups
    spread: StateGroups | None  # of parameters that a dimension spreads over other ranks
    added: tuple[Group, ...]  # of each added dimension


@dataclass(frozen=True, slots=True)
class Meshes:
    """The ranks of a model, and this rank's place in them."""

    rank: int  # this rank
    stages: int  # pipeline stages
    stage_devices: int  # ranks of one stage
    pipeline: Group  # ranks with this rank's place in every stage, in stage order
    by_lines: Mapping[StageLines, StrategyGroups]  # groups under the strategies of this rank's stage
    first: int = 0  # first rank of the first stage; not 0 for a branch, whose ranks are separate

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.stages * self.stage_devices

    @property
    def stage_index(self) -> int:
        """Index of this rank's stage; with several stages a rank, of its group of devices."""
        return (self.rank - self.first) // self.stage_devices

    @property
    def index_in_stage(self) -> int:
        """Index of this rank in its stage."""
        return (self.rank - self.first) % self.stage_devices

    def groups(self, strategy: Strategy) -> StrategyGroups:
        """This rank's groups under a strategy that a layer of its stage has."""
        return self.by_lines[lines_of(strategy)]


def join_world(plan: Plan, device_type: str) -> None:
    """Start the default process group if none runs, and raise LaunchError if it has not the plan's size."""
    join(torch.device(device_type))
    world = dist.get_world_size()
    if world != plan.devices:
        raise LaunchError(
            f"The plan is for {plan.devices} device(s), but {world} process(es) were launched. "
            f"Launch {plan.devices} (torchrun --nproc-per-node), or make a plan for {world} (--gpus {world})."
        )


def build_meshes(plan: Plan, device_type: str, groups: ProcessGroups | None = None) -> Meshes:
    """Create the process groups that a plan needs; all ranks must call it together.

    Starts the default process group if none runs: from torchrun's environment, or of this process alone.

    Raises:
        LaunchError: the number of processes is not the plan's.
        InputError: a strategy is for another number of devices than its stage has.
    """
    size, pipeline = plan.stage_devices, pipeline_of(plan)
    for run in (run for stage in plan.stages for run in stage.runs):
        if run.strategy.devices != size:
            remedy = f"It must take the stage's {size} devices."
            raise InputError(f"strategy of {run.first}", str(run.strategy), remedy)
    join_world(plan, device_type)
    parts = [
        (group * size, size, [run.strategy for stage in pipeline.stages_of(group) for run in plan.stages[stage].runs])
        for group in range(plan.pipeline)
    ]
    across = [(PIPELINE, tuple(range(place, plan.devices, size))) for place in range(size)]
    (meshes,) = filter(None, build_part_meshes(parts, device_type, groups, across))
    return replace(meshes, stages=plan.pipeline, first=0)


def build_part_meshes(
    parts: Sequence[tuple[int, int, Sequence[Strategy]]],
    device_type: str,
    groups: ProcessGroups | None = None,
    across: Sequence[Key] = (),
) -> list[Meshes | None]:
    """Create the process groups of several parts of a model; all ranks must call it together, once they have joined.

    Args:
        parts: first rank, number of consecutive ranks and strategies of each part. Under a strategy of one device every
            rank does all the work.
        device_type: ``cuda`` or ``cpu``.
        groups: creates a group for each distinct key of several ranks, in the same order on every rank.
        across: purposes and ranks of groups of ranks of several parts.

    Returns:
        By part, the groups of this rank; None if the rank has no share in the part.
    """
    rank, groups = dist.get_rank(), groups or ProcessGroups()
    by_part = [(first, count, list(dict.fromkeys(map(lines_of, strategies)))) for first, count, strategies in parts]
    keys = [
        (line.purpose.value, tuple(first + place for place in places))
        for first, _, lines_of_part in by_part
        for lines in lines_of_part
        for line in lines
        for places in line.groups(lines.everyone.size)
    ]
    by_key = {key: groups.group(key[1], key[0]) for key in dict.fromkeys([*keys, *across]) if len(key[1]) > 1}
    for (purpose, ranks), group in by_key.items():
        if purpose in (Purpose.PIXELS, Purpose.TOKENS) and rank in ranks and device_type == "cuda":
            # the first messages from rank to rank create NCCL's communicator, and not every rank may have one to send
            dist.all_reduce(torch.zeros(1, device=device_type), group=group)
    pipeline = next((by_key[key] for key in across if rank in key[1] and key in by_key), None)
    meshes: list[Meshes | None] = []
    for first, count, lines_of_part in by_part:
        if first <= rank < first + count:
            by_lines = {
                lines: _strategy_groups(lines, first if lines.everyone.size > 1 else rank, by_key, device_type)
                for lines in lines_of_part
            }
            meshes.append(Meshes(rank, 1, count, pipeline, by_lines, first))
        else:
            meshes.append(None)
    return meshes


def _strategy_groups(
    lines: StageLines, start: int, by_key: Mapping[Key, dist.ProcessGroup], device_type: str
) -> StrategyGroups:
    """This rank's groups of a stage that starts at rank ``start``."""
    place = dist.get_rank() - start

    def group(line: RankLine) -> Group:
        return by_key.get((line.purpose.value, tuple(start + other for other in line.through(place))))

    def states(spread: ParameterSpread) -> StateGroups:
        ranks = torch.tensor([start + other for other in spread.gradients.through(place)])
        mesh = _state_mesh(group(spread.replicas), group(spread.shards), ranks, device_type)
        over = None if spread.over is None else group(spread.over)
        return StateGroups(group(spread.gradients), mesh, over, spread.sharing == lines.weights.size > 1)

    return StrategyGroups(
        *map(group, lines.lines()),
        batch_index=lines.batch.index(place),
        weights_index=lines.weights.index(place),
        states=states(lines.states),
        spread=None if lines.spread is None else states(lines.spread),
        added=tuple(map(group, lines.added)),
    )


def _state_mesh(replicate: Group, shard: Group, ranks: torch.Tensor, device_type: str) -> DeviceMesh | None:
    """The mesh of replicas and shards, whose groups are None for one rank; ``ranks`` are those of both, in order."""
    if shard is None:
        return None
    if replicate is None:
        return DeviceMesh.from_group(shard, device_type, mesh_dim_names=(_axis("shards", shard),))
    names = _axis("replicas", replicate), _axis("shards", shard)
    grid = ranks.reshape(dist.get_world_size(replicate), -1)
    return DeviceMesh.from_group([replicate, shard], device_type, mesh=grid, mesh_dim_names=names)


def _axis(name: str, group: dist.ProcessGroup) -> str:
    """The name of a mesh axis, which contains that of its group.

    torch caches by mesh, and meshes of equal ranks and axis names are equal to it, even if the groups of one were
    destroyed with an earlier world of this process.
    """
    return f"{name}{group.group_name}"
