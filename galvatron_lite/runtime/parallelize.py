"""How a plan is applied to a model, in order; each step stands in the module that it is imported from.

``auto`` has read and checked the plan. Layers are assigned to stages and examined (``preparation``), process groups
made (``mesh``), and this rank's stages cut out (``stages``). Each stage's layers are split, dimension by dimension
(``sharding``). What a rank then holds of every parameter, and the layouts in which layers meet, make the stage's
runtime; stages are joined into a pipeline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.data.apply import GradientReducer
from galvatron_lite.parallelism.pipeline.tied import shared_before, tie
from galvatron_lite.parallelism.precision import hold_frozen, narrow_experts, narrow_norms
from galvatron_lite.parallelism.sharded.calls import intercept_custom_functions
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.activations.hooks import hooks_of, install_hooks
from galvatron_lite.runtime.activations.layout import ActivationLayout
from galvatron_lite.runtime.activations.traffic import redistributor_of
from galvatron_lite.runtime.assignment import LayerAssignment
from galvatron_lite.runtime.compiled import compile_blocks
from galvatron_lite.runtime.loss.routers import install_router_losses
from galvatron_lite.runtime.mesh import Meshes
from galvatron_lite.runtime.parameters.guard import hides_norm, read_full_values
from galvatron_lite.runtime.parameters.managed import Updates, managed_parameters, reduced_parameters
from galvatron_lite.runtime.parameters.materialize import Materializer
from galvatron_lite.runtime.peers import broadcast_values, share_random_state, shares_samples
from galvatron_lite.runtime.preparation import Examined, Prepared, SetupOptions, prepare
from galvatron_lite.runtime.sharding import StageSplitter
from galvatron_lite.runtime.stages import StageRuntime, cut_stages, join_stages


def parallelize(
    model: nn.Module, plan: Plan, layers: Sequence[Layer], batch: Any, meshes: Meshes, options: SetupOptions
) -> list[StageRuntime]:
    """Split the model as the plan says, in place; all ranks call it together. The runtimes of this rank's stages."""
    prepared = prepare(model, plan, layers, batch, meshes.stage_index, options)
    broadcast_values(model, options.device)
    if shares_samples(plan):
        share_random_state(options.device)
    runtimes = build(model, prepared, meshes, options)
    if runtimes[0].shared is not None:
        runtimes[0].shared.start_equal()
        for runtime in runtimes:
            runtime.updates.take()
    return runtimes


def build(
    model: nn.Module,
    prepared: Prepared,
    meshes: Meshes,
    options: SetupOptions,
    place: Callable[[nn.Module, Layer], None] | None = None,
) -> list[StageRuntime]:
    """Split the full model in place, and make what trains it. All ranks call it together; it moves no values.

    ``place`` brings a layer of a structure onto the device; gives it its values if not given.
    """
    cuts = cut_stages(model, prepared, meshes, options.device)
    runtimes: list[StageRuntime] = []
    for number, cut in enumerate(cuts):
        earlier = {cut.number: cut.model for cut in cuts[:number]}
        tied = shared_before(earlier, cut.number, prepared.ties, prepared.names)
        at = None if place is None else functools.partial(place, cut.model)
        stage = prepared.stages[cut.number]
        runtimes.append(
            split_stage(
                cut.model, prepared.layers, stage, meshes, prepared.examined, options, cut.incoming, place=at, tied=tied
            )
        )
        runtimes[-1].is_last = stage is prepared.stages[-1]
    join_stages(runtimes, cuts, prepared, meshes, options)
    return runtimes


def split_stage(
    model: nn.Module,
    layers: Sequence[Layer],
    stage: tuple[LayerAssignment, ...],
    meshes: Meshes,
    examined: Examined,
    options: SetupOptions,
    incoming: Collection[ActivationLayout] = (),
    roots: Sequence[nn.Module] = (),
    place: Callable[[Layer], None] | None = None,
    tied: Mapping[str, nn.Parameter] | None = None,
) -> StageRuntime:
    """Split a stage in place and make what trains it, without pipeline. All ranks of the stage call it together.

    Args:
        model: holds the stage's layers, and no real parameter of others.
        incoming: layouts in which what stages before this one send may lie.
        roots: the modules of the model that are called; the model itself if not given.
        place: brings a layer onto the device; gives it its values if not given.
        tied: parameters that another stage of this rank has and trains, by their names here.
    """
    intercept_custom_functions()
    read_full_values()
    users, tied = hooks_of(model), tied or {}
    compile_blocks(model, stage, meshes, options.compile)
    if options.compute is not None:
        narrow_experts(model)
    place = place or Materializer(model, layers, options.device, options.seed, options.init_fn).place
    for layer in layers:
        # it has no parameters on later stages, but its buffers may still be read
        if layer.role is Role.BEFORE and all(placed.layer is not layer for placed in stage):
            place(layer)
    splitter = StageSplitter(model, stage, meshes, examined, options)
    sharded = splitter.split(place, roots or [model])
    if options.compute is not None:
        narrow_norms(model)
        hold_frozen(model)
    traffic = redistributor_of(stage, meshes, examined.sampled, options.compute)
    install_hooks(model, stage, sharded.borders, traffic, incoming, users)
    install_router_losses(model, stage, meshes, sharded.experts)
    tie(model, tied)
    elsewhere = {id(parameter) for parameter in tied.values()}
    every = managed_parameters(model, stage, meshes, sharded.shards, sharded.experts, options.compute)
    owned = [one for one in every if id(one.parameter) not in elsewhere]
    reducer = GradientReducer(reduced_parameters(owned))
    updates = Updates(owned, reducer, guarded=hides_norm(owned, meshes.stage_devices))
    return StageRuntime(stage, meshes, owned, sharded, reducer, traffic, updates, model)
