"""Making a model with branches ready: each branch a model of its own on its ranks, the trunk on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.pipeline.stage import drop_parameters
from galvatron_lite.parallelism.pipeline.tied import check_shared, find_shared
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.alike import broadcast_values, of_rank_zero, share_random_state
from galvatron_lite.runtime.branches.parts import PlacedPart, place_parts
from galvatron_lite.runtime.branches.post import BranchChannel
from galvatron_lite.runtime.branches.randomness import Stream
from galvatron_lite.runtime.branches.session import PassSetting, RankBranch
from galvatron_lite.runtime.branches.stand_in import StandIn, entrances, replace_module, resolve_outside, skeleton
from galvatron_lite.runtime.branches.templates import Foreseen
from galvatron_lite.runtime.mesh import Meshes, build_part_meshes, join_world
from galvatron_lite.runtime.setup import ModelFacts, SetupOptions, StageRuntime, assemble, examine


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

    Args:
        model: any.
        plan: with branches.
        layers: of the model.
        batch: an example.
        options: as for a model without branches.
        timeout: seconds after which a message that does not come is an error.

    Raises:
        LaunchError: the world's size is not the plan's.
        InputError: the plan does not fit the model.
    """
    parts = place_parts(plan, layers)
    join_world(plan, options.device.type)
    _check_ties(model, parts, layers)
    known = [examine(model, part.stage, part.stage, batch, options) for part in parts]
    paths = [entrances(model, part.roots, batch) for part in parts[1:]]
    meshes = build_part_meshes([part.mesh for part in parts], options.device.type)
    post = BranchChannel(options.device, timeout)
    broadcast_values(model, options.device)
    seed = int(of_rank_zero(torch.randint(2**31, (1,)), options.device))
    if parts[0].layout.replicas > 1 or parts[0].layout.devices == 1:
        share_random_state(options.device)
    trees = [skeleton(model, own) for own in paths]
    foreseen = [{path: Foreseen(path, model.get_submodule(path)) for path in own} for own in paths]
    setting: list[PassSetting] = []
    for tree, own in zip(trees, paths, strict=True):
        for path in own:
            module = tree.get_submodule(path)
            call = partial(_call, setting)
            replace_module(model, module, StandIn(path, module, call))
    runtimes = [
        _assembled(tree, part, mesh, one, options, own)
        for tree, part, mesh, one, own in zip([model, *trees], parts, meshes, known, [(), *paths], strict=True)
    ]
    trunk = runtimes[0]
    assert trunk is not None  # every rank runs the trunk
    branches = {
        path: branch
        for part, own, views, runtime in zip(parts[1:], paths, foreseen, runtimes[1:], strict=True)
        for branch in [RankBranch(part, views, runtime, Stream(_seed(seed, part), options.device))]
        for path in own
    }
    for runtime in runtimes:
        if runtime is not None:
            runtime.updates.guarded = True  # other branches are elsewhere
    setting.append(PassSetting(parts[0], trunk, branches, post))
    resolve_outside(model, [path for layer in parts[0].layers for path in layer.modules])
    own_trees = [tree for tree, runtime in zip(trees, runtimes[1:], strict=True) if runtime is not None]
    return Branches(setting[0], parts, own_trees, [one for one in runtimes if one is not None])


def _call(setting: Sequence[PassSetting], stand_in: StandIn, args: Any, kwargs: dict[str, Any]) -> Any:
    return setting[0].call(stand_in, args, kwargs)


def _assembled(
    tree: nn.Module,
    part: PlacedPart,
    meshes: Meshes | None,
    facts: ModelFacts,
    options: SetupOptions,
    paths: Sequence[str],
) -> StageRuntime | None:
    """A part that is split on its ranks; on others its modules have no parameters."""
    if meshes is None:
        drop_parameters(tree)
        return None
    roots = [tree.get_submodule(path) for path in paths] or [tree]
    return assemble(tree, part.layers, part.stage, meshes, facts, options, roots=roots)


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
    rank = dist.get_rank()
    alike = any(placed.strategy.devices > placed.strategy.batch_degree for placed in part.stage)
    return seed + part.first if alike else seed + rank
