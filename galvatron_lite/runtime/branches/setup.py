"""Making a model with branches ready: each branch a model of its own on its ranks, the trunk on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.pipeline.stage import drop_parameters
from galvatron_lite.parallelism.pipeline.tied import check_shared, find_shared
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.assignment import layer_plans, tensor_plans
from galvatron_lite.runtime.branches.parts import (
    PlacedPart,
    StandIn,
    Stream,
    entrances,
    place_parts,
    replace_module,
    resolve_outside,
    skeleton,
)
from galvatron_lite.runtime.branches.pending import Foreseen
from galvatron_lite.runtime.branches.session import PassSetting, RankBranch
from galvatron_lite.runtime.branches.transfer import BranchChannel
from galvatron_lite.runtime.mesh import build_part_meshes, join_world
from galvatron_lite.runtime.parallelize import SetupOptions, StageRuntime, assemble
from galvatron_lite.runtime.peers import broadcast_values, of_rank_zero, share_random_state


@dataclass(slots=True)
class Branches:
    """A model with branches, on this rank."""

    setting: PassSetting  # what its passes share
    parts: tuple[PlacedPart, ...]  # the trunk, then all branches
    trees: list[nn.Module]  # modules of this rank's branches, at their paths in the model
    runtimes: list[StageRuntime]  # of the trunk, then of this rank's branches


def set_up_branches(
    model: nn.Module, plan: Plan, layers: Sequence[Layer], batch: Any, options: SetupOptions, timeout: float
) -> Branches:
    """Split the model as the plan says, in place. All ranks call it together.

    Raises:
        LaunchError: the world's size is not the plan's.
        InputError: the plan does not fit the model.
    """
    parts = place_parts(plan, layers)
    join_world(plan, options.device.type)
    _check_ties(model, parts, layers)
    everything = [placed for part in parts for placed in part.stage]
    tensor = tensor_plans(model, everything, batch) if options.tensor_plans is None else options.tensor_plans
    splits = layer_plans(model, [part.stage for part in parts], tensor, batch)
    paths = [(), *(entrances(model, part.roots, batch) for part in parts[1:])]
    meshes = build_part_meshes([part.mesh for part in parts], options.device.type)
    channel = BranchChannel(options.device, timeout)
    broadcast_values(model, options.device)
    seed = int(of_rank_zero(torch.randint(2**31, (1,)), options.device))
    if parts[0].layout.replicas > 1 or parts[0].layout.devices == 1:
        share_random_state(options.device)
    trees = [model, *(skeleton(model, entered) for entered in paths[1:])]
    setting: list[PassSetting] = []

    def call(stand_in: StandIn, args: Any, kwargs: dict[str, Any]) -> Any:
        return setting[0].call(stand_in, args, kwargs)

    foreseen = {path: Foreseen(path, model.get_submodule(path)) for entered in paths for path in entered}
    for tree, entered in zip(trees, paths, strict=True):
        for path in entered:
            module = tree.get_submodule(path)
            replace_module(model, module, StandIn(path, module, call))
    runtimes: list[StageRuntime | None] = []
    for tree, part, mesh, entered in zip(trees, parts, meshes, paths, strict=True):
        if mesh is None:  # on other ranks its modules have no parameters
            drop_parameters(tree)
            runtimes.append(None)
            continue
        roots = [tree.get_submodule(path) for path in entered] or [tree]
        runtimes.append(assemble(tree, part.layers, part.stage, mesh, splits, options, roots=roots))
    branches: dict[str, RankBranch] = {}
    for part, entered, runtime in zip(parts[1:], paths[1:], runtimes[1:], strict=True):
        branch = RankBranch(part, foreseen, runtime, Stream(_seed(seed, part), options.device))
        branches |= dict.fromkeys(entered, branch)
    trunk = runtimes[0]
    assert trunk is not None  # every rank runs the trunk
    here = [(tree, runtime) for tree, runtime in zip(trees, runtimes, strict=True) if runtime is not None]
    for _, runtime in here:
        runtime.updates.guarded = True  # other branches are elsewhere
    setting.append(PassSetting(parts[0], trunk, branches, channel))
    resolve_outside(model, [path for layer in parts[0].layers for path in layer.modules])
    return Branches(setting[0], parts, [tree for tree, _ in here[1:]], [runtime for _, runtime in here])


def _check_ties(model: nn.Module, parts: Sequence[PlacedPart], layers: Sequence[Layer]) -> None:
    ties = find_shared(model, layers)
    home = {layer.name: part.name for part in parts for layer in part.layers}
    for tie in ties:
        homes = sorted({home[layer] for layer in tie.layers})
        if len(homes) > 1:
            remedy = f"{' and '.join(homes)} share it: make them one branch, or leave both in the trunk."
            raise InputError("parameter", tie.names[0], remedy)
    check_shared(ties, {placed.layer.name: placed.strategy for part in parts for placed in part.stage})


def _seed(seed: int, part: PlacedPart) -> int:
    """Of a branch's random numbers: ranks that have the same samples draw the same."""
    alike = any(placed.strategy.devices > placed.strategy.batch_degree for placed in part.stage)
    return seed + (part.first if alike else dist.get_rank())
