"""Shrink a model and its plan until they train in seconds on a few processes of this machine.

The small plan uses every dimension, option and schedule that the large one does, each degree as small as possible. The
small model has fewer and narrower layers of the same kinds. What has no room is listed, not dropped silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product
from typing import Any

import torch
from torch import nn

from galvatron_lite.capture.shared import items_of
from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.model.batch import LossFn, map_tensors, slice_batch, tensors_of
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.example import example_batch
from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, Recompute, Role
from galvatron_lite.model.trace.meta import BATCH_NORMS, LOCAL_BATCH_NORMS
from galvatron_lite.parallelism.backends import GALVATRON
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.registry import pinned
from galvatron_lite.parallelism.strategy import Strategy, changed, degree_names
from galvatron_lite.plans.io import check_plan, check_runs
from galvatron_lite.plans.schema import LayerRun, Plan, Stage
from galvatron_lite.runtime.assignment import place_layers
from galvatron_lite.runtime.branches.parts import PlacedPart, place_parts
from galvatron_lite.search.space import Narrowed, strategies_for
from galvatron_lite.units import format_count
from galvatron_lite.verify.dry.roles import named_for
from galvatron_lite.verify.numbers.shrink_model import (
    calmed,
    can_drop,
    cut_for,
    dropped,
    narrowed,
    with_samples,
)
from galvatron_lite.verify.source import ModelParts, ModelSource, example_of

MOST_PARAMETERS = 50_000_000  # of a model that is trained
MOST_FLOPS = 4 * 10**11  # of its step; all steps, with the reference, then take a minute or two on two cores
MOST_BUILT_PARAMETERS = 500_000_000  # of a full-size model that is built only for its factory's example batch
FEW, MANY = 4, 8  # processes; also the degrees by which the sizes of a narrow model divide
STAGES = "every stage"
STEPS = 3  # batches that a small model gets
REPEATS = 2  # of consecutive equal layers of a stage with equal strategies, so many stay
MOST_LAYERS = 24  # if more layers than this would stay, one of such layers stays


class TooLargeError(GalvatronError):
    """No model and plan can be made that are small enough to train on this machine; the message says why."""


Legal = Callable[[Strategy], bool]
Narrow = Callable[[int], tuple[nn.Module, Any, LossFn | None, list[str]]]  # see ``_narrow_model``, by divisor


@dataclass(frozen=True, slots=True)
class LargeLayer:
    """A layer of the large model, with its stage and strategy in the large plan."""

    name: str
    kind: str  # consecutive layers of one kind can stand in for each other
    role: Role
    stage: int
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class Size:
    """Devices and stages of a small plan."""

    groups: int  # of devices, each with the same number of stages
    devices: int  # in each group
    stages: int

    def stage_of(self, stage: int, stages: int) -> int:
        """Return the stage of the small plan that takes the layers of one of the ``stages`` of the large plan."""
        return stage * self.stages // stages


def features(strategy: Strategy) -> frozenset[str]:
    """Return what a strategy uses, whatever its degrees: ``tensor``, ``zero3``, ``full recomputation``."""
    return frozenset(name for dimension in pinned() for name in dimension.features(strategy))


def smaller_strategies(strategy: Strategy, devices: int) -> Iterator[Strategy]:
    """Yield strategies on ``devices`` devices that add no feature, with degrees that divide those of ``strategy``."""
    names = [name for name in degree_names() if getattr(strategy, name) > 1]
    for degrees in product(*(divisors(getattr(strategy, name)) for name in names)):
        if math.prod(degrees) == devices:
            smaller = changed(strategy, dict(zip(names, degrees, strict=True)))
            for settings in product(*(dimension.shrunk(smaller, strategy) for dimension in pinned())):
                yield changed(smaller, {name: value for setting in settings for name, value in setting.items()})


def shrink_strategy(strategy: Strategy, devices: int, legal: Legal = lambda _: True) -> Strategy | None:
    """Return the legal strategy on ``devices`` devices that keeps the most features; None if none is legal."""

    def rank(smaller: Strategy) -> tuple[int, int, tuple[int, ...]]:
        degrees = tuple(getattr(smaller, name) for name in degree_names())  # the last entry breaks ties
        return len(features(smaller)), -max(degrees), degrees

    return max(filter(legal, smaller_strategies(strategy, devices)), key=rank, default=None)


def choose_size(plan: Plan, strategies: Sequence[Strategy], processes: int) -> Size:
    """Return the size that loses the fewest features; among equals the one with most groups, then fewest devices."""
    groups, devices = max(
        (
            (groups, devices)
            for groups in range(min(2, plan.pipeline), min(plan.pipeline, processes) + 1)
            for devices in divisors(plan.stage_devices)
            if groups * devices <= processes
        ),
        key=lambda size: (-len(lost_features(strategies, size[1])), size[0], -size[0] * size[1]),
    )
    return Size(groups, devices, groups * min(plan.virtual_stages, 2))


def lost_features(strategies: Sequence[Strategy], devices: int) -> list[str]:
    """Return features that have no room on ``devices`` devices; ``itself`` too for a strategy that does not fit."""
    lost: list[str] = []
    for strategy in strategies:
        smaller, used = shrink_strategy(strategy, devices), features(strategy)
        lost += used - features(smaller) if smaller else {*used, "itself"}
    return lost


def select_layers(layers: Sequence[LargeLayer], size: Size) -> list[LargeLayer]:
    """Return the layers that stay: all but repeats of a block that follow each other in a stage of the small plan."""
    stages = max(layer.stage for layer in layers) + 1

    def run_key(layer: LargeLayer) -> tuple[object, ...]:
        return size.stage_of(layer.stage, stages), layer.kind, layer.strategy, layer.role is Role.BLOCK

    runs = [list(run) for _, run in groupby(layers, run_key)]
    for repeats in (REPEATS, 1):
        selected = [layer for run in runs for layer in (run[:repeats] if run[0].role is Role.BLOCK else run)]
        if len(selected) <= MOST_LAYERS:
            break
    return selected


def legal_for(kinds: Sequence[LayerKind], devices: int) -> Legal:
    """Return a predicate: whether the planner offers a strategy for all these kinds, and the runtime runs it."""
    runnable = Narrowed(GALVATRON.values)
    offered = [set(strategies_for(kind, devices, narrowed=runnable)) for kind in kinds]
    return lambda strategy: GALVATRON.combines(strategy) and all(strategy in choices for choices in offered)


def small_plan(
    plan: Plan, size: Size, layers: Sequence[LargeLayer], names: Sequence[str], strategies: Mapping[str, Strategy]
) -> Plan:
    """Return the plan of the small model.

    Its layers stand for ``layers`` of the large model and are called ``names``; ``strategies`` are by the large names.
    """
    by_stage: list[list[tuple[str, Strategy]]] = [[] for _ in range(size.stages)]
    for layer, name in zip(layers, names, strict=True):
        by_stage[size.stage_of(layer.stage, len(plan.stages))].append((name, strategies[layer.name]))
    stages = []
    for stage in by_stage:
        runs = [(strategy, [name for name, _ in run]) for strategy, run in groupby(stage, lambda layer: layer[1])]
        stages.append(Stage(tuple(LayerRun(run[0], run[-1], len(run), strategy) for strategy, run in runs)))
    microbatches = min(plan.microbatches, 2 * size.groups)
    return replace(
        _without_predictions(plan),
        devices=size.groups * size.devices,
        global_batch=math.lcm(*(strategy.batch_degree for strategy in strategies.values())) * microbatches,
        microbatches=microbatches,
        stages=tuple(stages),
        virtual_stages=size.stages // size.groups,
        order=None,
    )


def _without_predictions(plan: Plan) -> Plan:
    """Return the plan in float32, without what was computed for the large one."""
    return replace(plan, precision="fp32", prediction=None, alternatives=(), left_out=(), provenance=None)


def describe_changes(plan: Plan, small: Plan, pairs: Sequence[tuple[Strategy, Strategy]]) -> list[str]:
    """Return lines that say what is smaller in the small plan; ``pairs`` are strategies before and after."""
    before, after = (
        f"{each.devices} devices, {len(each.stages)} stage{'s' * (len(each.stages) > 1)}, batch {each.global_batch} in "
        f"{each.microbatches} micro-batch{'es' * (each.microbatches > 1)}"
        for each in (plan, small)
    )
    lines = [f"plan: {before} -> {after}"]
    for large, smaller in pairs:
        lost = ", ".join(sorted(features(large) - features(smaller)))
        if large != smaller:
            lines.append(f"strategy: {large} -> {smaller}{lost and f'; not kept: {lost}'}")
    return lines


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make a small model and its plan; can be pickled, so that every process makes the same ones."""

    plan: Plan  # of the small model
    divisor: int  # of the sizes of the small model; 0: it is as wide as the large one
    left_out: tuple[str, ...]  # paths of the large model's blocks that the small one does not have
    changes: tuple[str, ...]  # lines that say what is smaller, and what stayed as it was
    lost: tuple[str, ...]  # features of the large plan that the small one does not use


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A small model and its data."""

    model: nn.Module  # in training mode, without dropout
    batches: tuple[Any, ...]  # of the plan's batch size
    loss_fn: LossFn | None
    layers: tuple[Layer, ...]
    relative: float  # factor on the usual tolerance
    normed: bool  # whether it has batch norms of any kind
    synchronised: bool  # whether its batch norms were converted to ``SyncBatchNorm``


def shrink(source: ModelSource, plan: Plan, processes: int | None = None) -> Recipe:
    """Return how to make a small model, and a plan for it that uses what ``plan`` uses.

    Args:
        source: of the large model.
        plan: of the large model.
        processes: the most that are started; if not given, ``FEW``, or ``MANY`` if features have no room on those.

    Raises:
        TooLargeError: no model and plan are small enough.
    """
    model_parts = source.on_meta()
    model_layers = discover_layers(model_parts[0], example_of(model_parts))
    narrow = partial(_narrow_model, source.configured, model_parts)
    if plan.branches:
        parts = place_parts(plan, model_layers)
        return _best_recipe(partial(_branched_recipe, narrow, plan, parts, processes or MANY))
    named = named_for(plan, model_layers, items_of(model_parts[0].parameters()))
    layers = [
        LargeLayer(placed.layer.name, placed.layer.kind, placed.layer.role, number, placed.strategy)
        for number, stage in enumerate(place_layers(named, model_layers))
        for placed in stage
    ]
    strategies = list(dict.fromkeys(layer.strategy for layer in layers))
    size = choose_size(named, strategies, processes or FEW)
    if processes is None and lost_features(strategies, size.devices):
        size = choose_size(named, strategies, MANY)
    no_room = {*lost_features(strategies, size.devices), STAGES}
    return _best_recipe(partial(_recipe, narrow, named, layers, size), no_room)


def _best_recipe(recipe_of: Callable[[int], Recipe], no_room: Collection[str] = ()) -> Recipe:
    """Return the narrowest recipe that loses nothing but ``no_room``; else the one that loses the fewest features."""
    recipes: list[Recipe] = []
    reason = ""
    for divisor in (FEW, MANY, 0):
        try:
            recipes.append(recipe_of(divisor))
        except TooLargeError as error:
            reason = str(error)
            continue
        if set(recipes[-1].lost) <= set(no_room):
            break
    if not recipes:
        raise TooLargeError(reason)
    return min(recipes, key=lambda recipe: len(recipe.lost))


def _recipe(narrow: Narrow, plan: Plan, layers: Sequence[LargeLayer], size: Size, divisor: int) -> Recipe:
    with _failures_as("A smaller model does not run"):
        model, batch, loss_fn, changes = narrow(divisor)
        selected = {layer.name for layer in select_layers(layers, size)}
        left_out = [layer.name for layer in layers if layer.name not in selected and can_drop(model, layer.name)]
        remaining = [layer for layer in layers if layer.name not in left_out]
        graph = trace(dropped(model, left_out), batch, loss_fn=loss_fn)
    if len(graph.layers) != len(remaining):
        raise TooLargeError("A shorter model has other layers.")
    strategies = _small_strategies(graph, remaining, size)
    small = small_plan(plan, size, remaining, [layer.name for layer in graph.layers], strategies)
    _check_size(graph, small)
    pairs = list(dict.fromkeys((layer.strategy, strategies[layer.name]) for layer in remaining))
    before, after = (sum(layer.role is Role.BLOCK for layer in some) for some in (layers, remaining))
    changes = [
        *describe_changes(plan, small, pairs),
        *changes,
        f"blocks: {before} -> {after}" if before > after else f"blocks: all {before}",
        f"model: {format_count(graph.parameters)} parameters",
    ]
    lost = {name for large, smaller in pairs for name in features(large) - features(smaller)}
    lost |= {STAGES} if len(small.stages) < len(plan.stages) else set()
    return Recipe(small, divisor, tuple(left_out), tuple(changes), tuple(sorted(lost)))


def _branched_recipe(narrow: Narrow, plan: Plan, parts: Sequence[PlacedPart], processes: int, divisor: int) -> Recipe:
    """Return a recipe for a plan with branches on separate devices; it keeps all layers, devices and strategies."""
    if plan.devices > processes:
        raise TooLargeError(f"Plans with branches are run on all of their {plan.devices} devices or not at all.")
    with _failures_as("The model does not run"):
        model, batch, loss_fn, changes = narrow(divisor)
        graph = trace(model, batch, loss_fn=loss_fn)
    kinds = {layer.name: graph.kind_of(layer) for layer in graph.layers}
    placed_layers = [placed for part in parts for placed in part.stage]
    for placed in placed_layers:
        kind, strategy = kinds.get(placed.layer.name), placed.strategy
        if kind is not None and not legal_for([kind], strategy.devices)(strategy):
            raise TooLargeError(f"{placed.layer.name} has no strategy {strategy}.")
    microbatches = min(plan.microbatches, 2)
    # a trunk without layers shares samples where its devices divide them
    degrees = [math.gcd(plan.microbatch, plan.devices), *(placed.strategy.batch_degree for placed in placed_layers)]
    global_batch = math.lcm(*degrees) * microbatches
    small = replace(_without_predictions(plan), global_batch=global_batch, microbatches=microbatches)
    _check_size(graph, small)
    changes = [*describe_changes(plan, small, ()), *changes, f"model: {format_count(graph.parameters)} parameters"]
    return Recipe(small, divisor, (), tuple(changes), ())


@contextmanager
def _failures_as(message: str) -> Iterator[None]:
    """Raise ``TooLargeError`` for whatever a model raises that was built with other sizes."""
    try:
        yield
    except TooLargeError:
        raise
    except (GalvatronError, RuntimeError, ValueError, TypeError, IndexError) as error:
        raise TooLargeError(f"{message}: {error}") from error


def _check_size(graph: ModelGraph, small: Plan) -> None:
    """Raise ``TooLargeError`` if a small model and plan do not run, or not in reasonable time."""
    try:
        check_runs(check_plan(small))
    except InputError as error:
        raise TooLargeError(f"No smaller plan runs: {error}") from error
    if graph.parameters > MOST_PARAMETERS:
        raise TooLargeError(
            f"It still has {format_count(graph.parameters)} parameters; up to {format_count(MOST_PARAMETERS)} are run. "
            "Models of the zoo and of transformers are made narrower by their configuration, others only shorter."
        )
    if (flops := graph.flops * small.global_batch) > MOST_FLOPS:
        raise TooLargeError(f"A step of it still takes {flops:.1e} FLOPs; up to {MOST_FLOPS:.0e} are run.")


def _narrow_model(configured: bool, large: ModelParts, divisor: int) -> tuple[nn.Module, Any, LossFn | None, list[str]]:
    """Return the (narrower, unless ``divisor`` is 0) model on meta, with its batch, loss and a line on its sizes."""
    model, batch, loss_fn = large
    if divisor == 0:
        return model, example_of(large), loss_fn, ["sizes: as they are"]
    with torch.device("meta"):
        narrow = narrowed(model, divisor, configured)
    if narrow is None:
        raise TooLargeError("The model is not made of a configuration with sizes that could be smaller.")
    small, changes = narrow
    batch = example_batch(small) if batch is None else cut_for(batch, small)
    return small, batch, loss_fn, [f"sizes: {', '.join(changes) or 'as they are'}"]


def _small_strategies(graph: ModelGraph, layers: Sequence[LargeLayer], size: Size) -> dict[str, Strategy]:
    """Return the small plan's strategies by name in the large model.

    A strategy becomes one that is legal for all kinds of layers that have it; if there is none, one for each kind.
    """
    kinds = {layer.name: graph.kind_of(small) for layer, small in zip(layers, graph.layers, strict=True)}
    users: dict[Strategy, dict[str, LayerKind]] = {}
    for layer in layers:
        users.setdefault(layer.strategy, {})[kinds[layer.name].name] = kinds[layer.name]
    chosen: dict[tuple[Strategy, str], Strategy] = {}
    devices = size.devices
    for strategy, user_kinds in users.items():
        common = shrink_strategy(strategy, devices, legal_for(list(user_kinds.values()), devices))
        # the planner may not offer these for a single kind of layer
        plain = replace(strategy, recompute=Recompute.NONE, sequence_parallel=False, expert=1, expert_tensor=0)
        for name, kind in user_kinds.items():
            legal = legal_for([kind], devices)
            smaller = common or shrink_strategy(strategy, devices, legal) or shrink_strategy(plain, devices, legal)
            if smaller is None:
                raise TooLargeError(f"No strategy on {devices} processes is like {strategy} in layers of kind {name}.")
            chosen[strategy, name] = smaller
    return {layer.name: chosen[layer.strategy, kinds[layer.name].name] for layer in layers}


def make_small(source: ModelSource, recipe: Recipe, large: ModelParts | None) -> SmallModel:
    """Return the small model with the same values on every call, and batches that differ from one another.

    ``large`` is the large model on meta, to build a narrower one from; None if the small one is as wide.
    """
    torch.manual_seed(0)
    model, batch, loss_fn = large or source.make()
    narrow = narrowed(model, recipe.divisor, source.configured) if recipe.divisor else None
    small = model if narrow is None else narrow[0]
    batch_size = recipe.plan.global_batch
    if any(tensor.is_meta for tensor in tensors_of(batch)):
        # the factory returns values only together with the full-size model
        builds = sum(parameter.numel() for parameter in model.parameters()) <= MOST_BUILT_PARAMETERS
        batch = source.make()[1] if builds else None
    if batch is not None and narrow is not None:
        batch = cut_for(batch, small)
    samples = batch_size * STEPS
    batch = example_batch(small, samples) if batch is None else with_samples(batch, samples)
    small = calmed(dropped(small, recipe.left_out)).float().train()
    normed = any(isinstance(module, BATCH_NORMS) for module in small.modules())
    synchronised = any(isinstance(module, LOCAL_BATCH_NORMS) for module in small.modules())
    if synchronised:
        small = nn.SyncBatchNorm.convert_sync_batchnorm(small)  # type: ignore[no-untyped-call]
    # sums over pixels are long: in float32 their order changes the result visibly
    convolves = sum(isinstance(module, (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)) for module in small.modules()) > 1
    # and branches on separate devices run another number of samples at once than the trunk
    precision = torch.float64 if convolves or recipe.plan.branches else torch.float32
    small = small.to(precision)
    batch = map_tensors(batch, lambda tensor: tensor.to(precision) if tensor.is_floating_point() else tensor)
    layers = discover_layers(small, batch)
    batches = tuple(slice_batch(batch, step * batch_size, (step + 1) * batch_size) for step in range(STEPS))
    return SmallModel(small, batches, loss_fn, layers, 10.0 if convolves else 1.0, normed, synchronised)
