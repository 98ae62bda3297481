"""A model that trains by a plan with branches on the launched processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import places, slice_batch
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.trace.run import check_folded, sample_arguments
from galvatron_lite.parallelism.pipeline.stage import drop_parameters
from galvatron_lite.parallelism.pipeline.tied import check_shared, find_shared
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, PLAN_VERSION, BranchPlacement, LayerRun, Plan, Stage
from galvatron_lite.profiler.measure_hardware import prepare
from galvatron_lite.profiler.timing import Across, Term, TimingRule, as_single_lap, time_difference
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
from galvatron_lite.runtime.branches.pending import OutputTemplates
from galvatron_lite.runtime.branches.session import BranchSession, Origins, PassSetting, RankBranch
from galvatron_lite.runtime.branches.transfer import BranchChannel
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.mesh import build_part_meshes, join_world
from galvatron_lite.runtime.peers import broadcast_values, of_rank_zero, share_random_state
from galvatron_lite.runtime.preparation import SetupOptions, check_samples_move, layer_plans, tensor_plans
from galvatron_lite.runtime.stages import StageRuntime, split_stage


def _check_ties(model: nn.Module, parts: Sequence[PlacedPart], layers: Sequence[Layer]) -> None:
    """Raise ``InputError`` for a parameter that several parts share."""
    ties = find_shared(model, layers)
    home = {layer.name: part.name for part in parts for layer in part.layers}
    for tie in ties:
        homes = sorted({home[layer] for layer in tie.layers})
        if len(homes) > 1:
            remedy = f"{' and '.join(homes)} share it: make them one branch, or leave both in the trunk."
            raise InputError("parameter", tie.names[0], remedy)
    check_shared(ties, {placed.layer.name: placed.strategy for part in parts for placed in part.stage})


class BranchedModel(ParallelModel):
    """A model whose branches run on separate ranks. It is used like ``ParallelModel``.

    In ``module``, stand-ins replace the branches; ``copies`` contains the modules of this rank's branches.

    Args:
        arguments: see ``ParallelModel``.
        timeout: seconds until a missing message of another rank is an error.
        options: see ``ParallelModel``.
    """

    def __init__(self, *arguments: Any, timeout: float = 600.0, **options: Any) -> None:
        self._timeout = timeout
        super().__init__(*arguments, timeout=timeout, **options)

    def _set_up(
        self, model: nn.Module, layers: Sequence[Layer], batch: Any, options: SetupOptions
    ) -> Sequence[StageRuntime]:
        self._origins: dict[int, Origins] = {}
        parts = place_parts(self.plan, layers)
        join_world(self.plan, options.device.type)
        _check_ties(model, parts, layers)
        everything = [placed for part in parts for placed in part.stage]
        tensor = tensor_plans(model, everything, batch) if options.tensor_plans is None else options.tensor_plans
        paths = [(), *(entrances(model, part.roots, batch) for part in parts[1:])]
        for part, entered in zip(parts, paths, strict=True):
            check_samples_move(model, [part.stage], batch)
            if part.layout.batch != parts[0].layout.batch:
                check_folded(sample_arguments(model, entered, batch), outputs=True)
        splits = layer_plans(model, [part.stage for part in parts], tensor, batch)
        groups = [(part.first, part.devices, [placed.strategy for placed in part.stage]) for part in parts]
        meshes = build_part_meshes(groups, options.device.type)
        self._setting = setting = PassSetting(BranchChannel(options.device, self._timeout), parts[0])
        broadcast_values(model, options.device)
        seed = int(of_rank_zero(torch.randint(2**31, (1,)), options.device))
        if parts[0].layout.replicas > 1 or parts[0].layout.devices == 1:
            share_random_state(options.device)
        trees = [model, *(skeleton(model, entered) for entered in paths[1:])]
        templates = {path: OutputTemplates(path, model.get_submodule(path)) for entered in paths for path in entered}
        for tree, entered in zip(trees, paths, strict=True):
            for path in entered:
                module = tree.get_submodule(path)
                replace_module(model, module, StandIn(path, module, setting.call))
        runtimes = list[StageRuntime]()
        for tree, part, mesh, entered in zip(trees, parts, meshes, paths, strict=True):
            runtime = None
            if mesh is None:  # the part runs on other ranks
                drop_parameters(tree)
            else:
                roots = [tree.get_submodule(path) for path in entered] or [tree]
                runtime = split_stage(tree, part.layers, part.stage, mesh, splits, options, roots=roots)
                runtime.updates.guarded = True  # other branches are on other ranks
                runtimes.append(runtime)
            if part is not parts[0]:
                # ranks with the same samples must draw the same random numbers
                shares_samples = any(placed.strategy.devices > placed.strategy.batch_degree for placed in part.stage)
                stream = Stream(seed + (part.first if shares_samples else dist.get_rank()), options.device)
                setting.branches |= dict.fromkeys(entered, RankBranch(part, templates, runtime, stream))
        setting.runtime = runtimes[0]  # every rank runs the trunk
        resolve_outside(model, [path for layer in parts[0].layers for path in layer.modules])
        self.streams = list(dict.fromkeys(branch.stream for branch in setting.branches.values()))
        return runtimes

    def _parts(self, batch: Any, count: int) -> list[list[Any]]:
        parts, rows = super()._parts(batch, count), self.calls.rows
        self._origins = {
            id(part): _origins(part, slice_batch(batch, number * rows, (number + 1) * rows), rows)
            for number, part in enumerate(parts[0])
        }
        return parts

    def local_loss(self, part: Any) -> Tensor:
        """See ``ParallelModel``."""
        with self._passing(part) as session:
            return session.settle(super().local_loss(part))

    def _outputs(self, part: Any) -> Any:
        with self._passing(part) as session:
            return session.deliver(super()._outputs(part))

    @contextmanager
    def _passing(self, part: Any) -> Iterator[BranchSession]:
        setting = self._setting
        setting.session = session = BranchSession(setting, self.calls.rows, self._origins.get(id(part), {}))
        try:
            yield session
        finally:
            setting.session = None


def _origins(part: Any, batch: Any, rows: int) -> Origins:
    """The full tensors of the micro-batch that the tensors of this rank belong to."""
    full_tensors = dict(places(batch))
    pairs = ((tensor, full_tensors[place]) for place, tensor in places(part))
    return {id(tensor): (tensor, full) for tensor, full in pairs if full.dim() and full.shape[0] == rows}


_NAMES = ("first", "second")
_WIDTH = 8
_BYTES = 4


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(_WIDTH, _WIDTH) for _ in _NAMES)

    def forward(self, hidden: Tensor) -> Tensor:
        """A loss."""
        joined: Tensor = self.first(hidden) + self.second(hidden)
        return joined.mean()


def branch_seconds(device: torch.device, rule: TimingRule) -> float:
    """Measure the host seconds that a call of a branch adds in forward and backward, without its work and transfers.

    A model with two branches on the first two ranks is timed, and the time of the same model in one process and of two
    messages per branch is subtracted. If the difference is smaller than the noise, the noise is returned. All ranks
    call it together; there must be at least two.
    """
    batch = {"hidden": torch.ones(1, _WIDTH, device=device)}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        layers = [Layer(name, "branch", Role.BLOCK, (name,)) for name in _NAMES]
        apart = BranchedModel(_Pair(), _plan(dist.get_world_size()), layers, batch, device=device)
        alone = _Pair().to(device)
    message = prepare(Collective.SEND_RECV, _WIDTH * _BYTES, None, device)
    terms = (
        Term(1.0, as_single_lap(lambda: apart.backward_step(batch)), Across.MAX),
        Term(-1.0, as_single_lap(lambda: alone(**batch).backward()), Across.MAX),
        Term(-2.0 * len(_NAMES), as_single_lap(message), Across.MAX),
    )
    difference = time_difference(terms, device, rule)
    return max(difference.seconds, difference.noise) / len(_NAMES)


def _plan(devices: int) -> Plan:
    placed = tuple(
        BranchPlacement(name, (name,), number, 1, (LayerRun(name, name, 1, Strategy()),))
        for number, name in enumerate(_NAMES)
    )
    return Plan(PLAN_VERSION, "pair", devices, 1, 1, DEFAULT_SCHEDULE, "fp32", (Stage(()),), branches=placed)
