"""From a large model and its plan to ones that run in seconds on a few processes of this machine.

The small plan uses all that the large one does, each degree as small as it can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from galvatron_lite.verify.source import ModelSource, example_of

Chosen = Mapping[str, Strategy]
LARGEST = 50_000_000  # parameters of a model that is run for real, at most
MOST_WORK = 4 * 10**11
"""FLOPs of a step of it, at most: with steps, processes and the reference a minute or two on two cores."""
BUILT = 500_000_000
"""Parameters of a whole model that is built for the sake of its factory's batch, at most."""
FEW, MANY = 4, 8  # processes that are started
STAGES = "every stage"
STEPS = 3  # batches that a small model is given
REPEATS = 2  # equal layers with equal strategies that are kept next to each other in a stage
MOST_LAYERS = 24  # layers beyond which only one is kept of such


class TooLargeError(GalvatronError):
    """The numbers of a plan cannot be had on this machine; the message says why."""


Legal = Callable[[Strategy], bool]


@dataclass(frozen=True, slots=True)
class Spot:
    """A layer of the large model, and where its plan puts it."""

    name: str  # of the layer
    kind: str  # of the layer; consecutive layers of one kind can stand in for each other
    role: Role  # where it stands
    stage: int  # number of its stage
    strategy: Strategy  # what the plan does with it


@dataclass(frozen=True, slots=True)
class Size:
    """How many processes there are, and how they are shared out."""

    groups: int  # of devices that the stages are spread over
    devices: int  # of each group
    stages: int  # of the plan

    def stage_of(self, number: int, stages: int) -> int:
        """The stage that one of so many ``stages`` becomes part of."""
        return number * self.stages // stages


def features(strategy: Strategy) -> frozenset[str]:
    """What a strategy uses, whatever the degrees: ``tensor``, ``zero3``, ``full recomputation``."""
    return frozenset(name for one in pinned() for name in one.features(strategy))


def reductions(strategy: Strategy, devices: int) -> Iterator[Strategy]:
    """Strategies on so many devices that use nothing this one does not, each degree a divisor of its own."""
    names = [name for name in degree_names() if getattr(strategy, name) > 1]
    for degrees in product(*(divisors(getattr(strategy, name)) for name in names)):
        if math.prod(degrees) == devices:
            smaller = changed(strategy, dict(zip(names, degrees, strict=True)))
            for settings in product(*(one.shrunk(smaller, strategy) for one in pinned())):
                yield changed(smaller, {name: value for part in settings for name, value in part.items()})


def reduced(strategy: Strategy, devices: int, legal: Legal = lambda _: True) -> Strategy | None:
    """The strategy on so many devices that uses most of what this one does; None where none is legal."""

    def worth(smaller: Strategy) -> tuple[int, int, tuple[int, ...]]:
        degrees = tuple(getattr(smaller, name) for name in degree_names())  # they decide between equals
        return len(features(smaller)), -max(degrees), degrees

    return max(filter(legal, reductions(strategy, devices)), key=worth, default=None)


def choose_size(plan: Plan, strategies: Sequence[Strategy], processes: int) -> Size:
    """How few processes keep most of what a plan uses: the features of its strategies, its pipeline, its stages."""
    groups, devices = max(
        (
            (groups, devices)
            for groups in range(min(2, plan.pipeline), min(plan.pipeline, processes) + 1)
            for devices in divisors(plan.stage_devices)
            if groups * devices <= processes
        ),
        key=lambda size: (-len(unkept(strategies, size[1])), size[0], -size[0] * size[1]),
    )
    return Size(groups, devices, groups * min(plan.virtual_stages, 2))


def unkept(strategies: Sequence[Strategy], devices: int) -> list[str]:
    """What strategies use, and so many devices have no room for; all of one that fits on them in no way."""
    lost: list[str] = []
    for strategy in strategies:
        smaller, used = reduced(strategy, devices), features(strategy)
        lost += used - features(smaller) if smaller else {*used, "itself"}
    return lost


def kept_spots(spots: Sequence[Spot], size: Size) -> list[Spot]:
    """The layers that stay: of equal ones next to each other in a stage of the small plan a few, of others all."""
    stages = max(spot.stage for spot in spots) + 1

    def alike(spot: Spot) -> tuple[object, ...]:
        return size.stage_of(spot.stage, stages), spot.kind, spot.strategy, spot.role is Role.BLOCK

    runs = [list(run) for _, run in groupby(spots, alike)]
    for repeats in (REPEATS, 1):
        kept = [spot for run in runs for spot in (run[:repeats] if run[0].role is Role.BLOCK else run)]
        if len(kept) <= MOST_LAYERS:
            break
    return kept


def legal_for(kinds: Sequence[LayerKind], devices: int) -> Legal:
    """What the planner may do with layers of all these kinds on so many devices, and the runtime runs."""
    runnable = Narrowed(GALVATRON.values)
    offered = [set(strategies_for(kind, devices, narrowed=runnable)) for kind in kinds]
    return lambda strategy: GALVATRON.combines(strategy) and all(strategy in one for one in offered)


def small_plan(
    plan: Plan, size: Size, kept: Sequence[Spot], names: Sequence[str], chosen: Mapping[str, Strategy]
) -> Plan:
    """The plan for the small model; ``chosen`` are strategies by names of the large model's layers."""
    layers: list[list[tuple[str, Strategy]]] = [[] for _ in range(size.stages)]
    for spot, name in zip(kept, names, strict=True):
        layers[size.stage_of(spot.stage, len(plan.stages))].append((name, chosen[spot.name]))
    stages = []
    for stage in layers:
        runs = [(strategy, [name for name, _ in run]) for strategy, run in groupby(stage, lambda layer: layer[1])]
        stages.append(Stage(tuple(LayerRun(run[0], run[-1], len(run), strategy) for strategy, run in runs)))
    microbatches = min(plan.microbatches, 2 * size.groups)
    return _plain(
        plan,
        devices=size.groups * size.devices,
        global_batch=math.lcm(*(one.batch_degree for one in chosen.values())) * microbatches,
        microbatches=microbatches,
        stages=tuple(stages),
        virtual_stages=size.stages // size.groups,
        order=None,
    )


def _plain(plan: Plan, **changes: Any) -> Plan:
    """A changed plan in float32, without predictions."""
    plain = replace(plan, precision="fp32", prediction=None, alternatives=(), left_out=(), provenance=None)
    return replace(plain, **changes)


def differences(plan: Plan, small: Plan, pairs: Sequence[tuple[Strategy, Strategy]]) -> list[str]:
    """What the small plan has less of than the large one, a line each."""
    before, after = (
        f"{one.devices} devices, {len(one.stages)} stage{'s' * (len(one.stages) > 1)}, batch {one.global_batch} in "
        f"{one.microbatches} micro-batch{'es' * (one.microbatches > 1)}"
        for one in (plan, small)
    )
    lines = [f"plan: {before} -> {after}"]
    for large, smaller in pairs:
        lost = ", ".join(sorted(features(large) - features(smaller)))
        if large != smaller:
            lines.append(f"strategy: {large} -> {smaller}{lost and f'; not kept: {lost}'}")
    return lines


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a small model and its plan are made; plain data, so that other processes make the same."""

    plan: Plan  # of the small model
    divisor: int  # degree by which everything in it that is split divides; 0: it is as wide as the large one
    left_out: tuple[str, ...]  # paths of blocks that it does without
    changes: tuple[str, ...]  # what was made smaller, and what could not be, a line each
    lost: tuple[str, ...]  # what the large plan uses and the small one does not


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A small model with what it is trained on."""

    model: nn.Module  # in training mode, without chances
    batches: tuple[Any, ...]  # of the plan's size, with values
    loss_fn: LossFn | None  # of the model
    layers: tuple[Layer, ...]  # of the model
    relative: float  # largest error allowed, in the largest entry of a tensor, is so many times the usual one
    normed: bool  # whether it takes statistics of the samples of a batch
    synchronised: bool  # whether its batch norms were made to take those of all ranks


def shrink(source: ModelSource, plan: Plan, processes: int | None = None) -> Recipe:
    """How to make a small model and a plan for it that uses what ``plan`` uses."""
    parts = source.on_meta()
    layers = discover_layers(parts[0], example_of(parts))
    if plan.branches:
        return _first(partial(_branched, source, plan, place_parts(plan, layers), processes or MANY))
    named = named_for(plan, layers, items_of(parts[0].parameters()))
    placed = [(number, one) for number, stage in enumerate(place_layers(named, layers)) for one in stage]
    spots = [Spot(one.layer.name, one.layer.kind, one.layer.role, number, one.strategy) for number, one in placed]
    strategies = list(dict.fromkeys(spot.strategy for spot in spots))
    size = choose_size(named, strategies, processes or FEW)
    if processes is None and unkept(strategies, size.devices):
        size = choose_size(named, strategies, MANY)
    no_room = {*unkept(strategies, size.devices), STAGES}
    return _first(partial(_recipe, source, named, spots, size), no_room)


def _first(recipe: Callable[[int], Recipe], no_room: Collection[str] = ()) -> Recipe:
    """The narrowest model whose plan loses no more than there is no room for; else what loses least."""
    recipes: list[Recipe] = []
    reason = ""
    for divisor in (FEW, MANY, 0):
        try:
            recipes.append(recipe(divisor))
        except TooLargeError as error:
            reason = str(error)
            continue
        if set(recipes[-1].lost) <= set(no_room):
            break
    if not recipes:
        raise TooLargeError(reason)
    return min(recipes, key=lambda recipe: len(recipe.lost))


def _recipe(source: ModelSource, plan: Plan, spots: Sequence[Spot], size: Size, divisor: int) -> Recipe:
    try:
        model, batch, loss_fn, changes = _narrow(source, divisor)
        wanted = {spot.name for spot in kept_spots(spots, size)}
        left_out = [spot.name for spot in spots if spot.name not in wanted and can_drop(model, spot.name)]
        kept = [spot for spot in spots if spot.name not in left_out]
        graph = trace(dropped(model, left_out), batch, loss_fn=loss_fn)
    except TooLargeError:
        raise
    except (GalvatronError, RuntimeError, ValueError, TypeError, IndexError) as error:
        raise TooLargeError(f"A smaller model does not run: {error}") from error
    names = [layer.name for layer in graph.layers]
    if len(names) != len(kept):
        raise TooLargeError("A shorter model has other layers.")
    chosen = _strategies(graph, kept, names, size)
    small = small_plan(plan, size, kept, names, chosen)
    _check_size(graph, small)
    pairs = list(dict.fromkeys((spot.strategy, chosen[spot.name]) for spot in kept))
    blocks, left = (sum(spot.role is Role.BLOCK for spot in some) for some in (spots, kept))
    changes = [
        *differences(plan, small, pairs),
        *changes,
        f"blocks: {blocks} -> {left}" if blocks > left else f"blocks: all {blocks}",
        f"model: {format_count(graph.parameters)} parameters",
    ]
    lost = {name for spot in kept for name in features(spot.strategy) - features(chosen[spot.name])}
    lost |= {STAGES} if len(small.stages) < len(plan.stages) else set()
    return Recipe(small, divisor, tuple(left_out), tuple(changes), tuple(sorted(lost)))


def _branched(source: ModelSource, plan: Plan, parts: Sequence[PlacedPart], processes: int, divisor: int) -> Recipe:
    """With branches on devices of their own: all layers, devices and strategies stay as they are."""
    if plan.devices > processes:
        raise TooLargeError(f"Plans with branches are run on all of their {plan.devices} devices or not at all.")
    try:
        model, batch, loss_fn, changes = _narrow(source, divisor)
        graph = trace(model, batch, loss_fn=loss_fn)
    except TooLargeError:
        raise
    except (GalvatronError, RuntimeError, ValueError, TypeError, IndexError) as error:
        raise TooLargeError(f"The model does not run: {error}") from error
    kinds = {layer.name: graph.kind_of(layer) for layer in graph.layers}
    placed = [one for part in parts for one in part.stage]
    for one in placed:
        if one.layer.name in kinds and not legal_for([kinds[one.layer.name]], one.strategy.devices)(one.strategy):
            raise TooLargeError(f"{one.layer.name} has no strategy {one.strategy}.")
    count = min(plan.microbatches, 2)
    # a trunk without layers shares samples where its devices divide them
    degrees = [math.gcd(plan.microbatch, plan.devices), *(one.strategy.batch_degree for one in placed)]
    small = _plain(plan, global_batch=math.lcm(*degrees) * count, microbatches=count)
    _check_size(graph, small)
    changes = [*differences(plan, small, ()), *changes, f"model: {format_count(graph.parameters)} parameters"]
    return Recipe(small, divisor, (), tuple(changes), ())


def _check_size(graph: ModelGraph, small: Plan) -> None:
    """Raises TooLargeError where a small model and plan do not run, or not in reasonable time."""
    try:
        check_runs(check_plan(small))
    except InputError as error:
        raise TooLargeError(f"No smaller plan runs: {error}") from error
    if graph.parameters > LARGEST:
        raise TooLargeError(
            f"It still has {format_count(graph.parameters)} parameters; up to {format_count(LARGEST)} are run. Models "
            "of the zoo and of transformers are made narrower by their configuration, others only shorter."
        )
    if (work := graph.flops * small.global_batch) > MOST_WORK:
        raise TooLargeError(f"A step of it still takes {work:.1e} FLOPs; up to {MOST_WORK:.0e} are run.")


def _narrow(source: ModelSource, divisor: int) -> tuple[nn.Module, Any, LossFn | None, list[str]]:
    """The model without storages, with its example batch; narrower, and what changed, where ``divisor`` is not 0."""
    parts = source.on_meta()
    model, batch, loss_fn = parts
    if divisor == 0:
        return model, example_of(parts), loss_fn, ["sizes: as they are"]
    with torch.device("meta"):
        narrow = narrowed(model, divisor, source.configured)
    if narrow is None:
        raise TooLargeError("The model is not made of a configuration with sizes that could be smaller.")
    small, changes = narrow
    batch = example_batch(small) if batch is None else cut_for(batch, small)
    return small, batch, loss_fn, [f"sizes: {', '.join(changes) or 'as they are'}"]


def _strategies(graph: ModelGraph, kept: Sequence[Spot], names: Sequence[str], size: Size) -> Chosen:
    """What becomes of each strategy: legal for all the layers that have it; by kind of layer where none is."""
    kinds = dict(zip(names, (graph.kind_of(layer) for layer in graph.layers), strict=True))
    users: dict[Strategy, dict[str, LayerKind]] = {}
    for spot, name in zip(kept, names, strict=True):
        users.setdefault(spot.strategy, {})[kinds[name].name] = kinds[name]
    chosen: dict[tuple[Strategy, str], Strategy] = {}
    for strategy, user in users.items():
        together = reduced(strategy, size.devices, legal_for(list(user.values()), size.devices))
        # for one kind of layer, what the planner would not do there is left out
        plain = replace(strategy, recompute=Recompute.NONE, sequence_parallel=False, expert=1, expert_tensor=0)
        for name, kind in user.items():
            legal = legal_for([kind], size.devices)
            smaller = together or reduced(strategy, size.devices, legal) or reduced(plain, size.devices, legal)
            if smaller is None:
                like = f"is like {strategy} in layers of kind {name}."
                raise TooLargeError(f"No strategy on {size.devices} processes {like}")
            chosen[strategy, name] = smaller
    return {spot.name: chosen[spot.strategy, kinds[name].name] for spot, name in zip(kept, names, strict=True)}


def make_small(source: ModelSource, recipe: Recipe) -> SmallModel:
    """The small model with values, always the same ones; its batches differ from one another."""
    torch.manual_seed(0)
    model, batch, loss_fn = source.on_meta() if recipe.divisor else source.make()
    narrow = narrowed(model, recipe.divisor, source.configured) if recipe.divisor else None
    small = model if narrow is None else narrow[0]
    each = recipe.plan.global_batch
    if any(tensor.is_meta for tensor in tensors_of(batch)):
        # the factory makes values beside the full model, where that is not too large
        batch = source.make()[1] if sum(one.numel() for one in model.parameters()) <= BUILT else None
    if batch is not None and narrow is not None:
        batch = cut_for(batch, small)
    batch = example_batch(small, each * STEPS) if batch is None else with_samples(batch, each * STEPS)
    small = calmed(dropped(small, recipe.left_out)).float().train()
    normed = any(isinstance(module, BATCH_NORMS) for module in small.modules())
    synchronised = any(isinstance(module, LOCAL_BATCH_NORMS) for module in small.modules())
    if synchronised:
        small = nn.SyncBatchNorm.convert_sync_batchnorm(small)  # type: ignore[no-untyped-call]
    # sums over pixels are long: in float32 another order of them shows
    convolves = sum(isinstance(module, (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)) for module in small.modules()) > 1
    # and branches on devices of their own run other numbers of samples at once than the trunk does
    precision = torch.float64 if convolves or recipe.plan.branches else torch.float32
    small = small.to(precision)
    batch = map_tensors(batch, lambda one: one.to(precision) if one.is_floating_point() else one)
    layers = discover_layers(small, batch)
    batches = tuple(slice_batch(batch, number * each, (number + 1) * each) for number in range(STEPS))
    return SmallModel(small, batches, loss_fn, layers, 10.0 if convolves else 1.0, normed, synchronised)
