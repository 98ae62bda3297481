"""From a large model and its plan to ones that run in seconds on a few processes of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.model.batch import LossFn, map_tensors, sequence_length, slice_batch, tensors_of
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.example import example_batch
from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, Recompute, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.execution import check_runs
from galvatron_lite.plans.io import check_plan
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.placement import place_layers
from galvatron_lite.units import format_count
from galvatron_lite.verify.dry.roles import named_for
from galvatron_lite.verify.numbers.shrink_model import (
    calmed,
    can_drop,
    convolves,
    cut_batch,
    dropped,
    has_batch_norms,
    narrowed,
    with_samples,
)
from galvatron_lite.verify.numbers.shrink_plan import (
    Size,
    Spot,
    choose_size,
    differences,
    features,
    kept_spots,
    legal_for,
    reduced,
    small_plan,
    unkept,
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


class TooLargeError(GalvatronError):
    """The numbers of a plan cannot be had on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a small model and its plan are made; plain data, so that other processes make the same."""

    plan: Plan  # of the small model
    ways: int  # degree by which everything in it that is split divides; 0: it is as wide as the large one
    left_out: tuple[str, ...]  # paths of blocks that it does without
    said: tuple[str, ...]  # what was made smaller, and what could not be, a line each
    lost: tuple[str, ...]  # what the large plan uses and the small one does not


@dataclass(frozen=True, slots=True)
class Small:
    """A small model with what it is trained on."""

    model: nn.Module  # in training mode, without chances
    batches: tuple[Any, ...]  # of the plan's size, with values
    loss_fn: LossFn | None  # of the model
    layers: tuple[Layer, ...]  # of the model
    relative: float  # largest error allowed, in the largest entry of a tensor, is so many times the usual one
    normed: bool  # whether it takes statistics of the samples of a batch


def shrink(source: ModelSource, plan: Plan, processes: int | None = None) -> Recipe:
    """How to make a small model and a plan for it that uses what ``plan`` uses."""
    made = source.on_meta()
    layers = discover_layers(made[0], example_of(made))
    named = named_for(plan, layers)
    placed = [(number, one) for number, stage in enumerate(place_layers(named, layers)) for one in stage]
    spots = [Spot(one.layer.name, one.layer.kind, one.layer.role, number, one.strategy) for number, one in placed]
    strategies = list(dict.fromkeys(spot.strategy for spot in spots))
    size = choose_size(named, strategies, processes or FEW)
    if processes is None and unkept(strategies, size.devices):
        size = choose_size(named, strategies, MANY)
    room = {name for _, name in unkept(strategies, size.devices)}
    found: list[Recipe] = []
    reasons: list[str] = []
    for ways in (FEW, MANY, 0):
        try:
            found.append(_recipe(source, named, spots, size, ways))
        except TooLargeError as reason:
            reasons.append(str(reason))
            continue
        if set(found[-1].lost) <= {*room, STAGES}:
            break
    if not found:
        raise TooLargeError(reasons[-1])
    return min(found, key=lambda recipe: len(recipe.lost))


def _recipe(source: ModelSource, plan: Plan, spots: Sequence[Spot], size: Size, ways: int) -> Recipe:
    """One way to make it smaller."""
    try:
        model, batch, loss_fn, changes = _narrow(source, ways)
        kept, left_out = _shorter(model, spots, size)
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
    try:
        check_runs(check_plan(small))
    except InputError as error:
        raise TooLargeError(f"No smaller plan runs: {error}") from error
    _check_work(graph, small)
    pairs = list(dict.fromkeys((spot.strategy, chosen[spot.name]) for spot in kept))
    said = differences(plan, small, pairs) + changes + _size_lines(spots, kept, graph)
    lost = {name for spot in kept for name in features(spot.strategy) - features(chosen[spot.name])}
    lost |= {STAGES} if len(small.stages) < len(plan.stages) else set()
    return Recipe(small, ways, tuple(left_out), tuple(said), tuple(sorted(lost)))


def _narrow(source: ModelSource, ways: int) -> tuple[nn.Module, Any, LossFn | None, list[str]]:
    """The model without storages, with its example batch; narrower, and what changed, where ``ways`` is not 0."""
    made = source.on_meta()
    model, given, loss_fn = made
    if ways == 0:
        return model, example_of(made), loss_fn, ["sizes: as they are"]
    with torch.device("meta"):
        found = narrowed(model, ways, source.configured)
    if found is None:
        raise TooLargeError("The model is not made of a configuration with sizes that could be smaller.")
    small, changes = found
    batch = example_batch(small) if given is None else cut_for(given, small)
    return small, batch, loss_fn, [f"sizes: {', '.join(changes) or 'as they are'}"]


def cut_for(batch: Any, small: nn.Module) -> Any:
    """A user's batch for a narrower model."""
    config = getattr(small, "config", None)
    before, longest = sequence_length(batch), _longest(small)
    tokens = None if longest is None or longest >= before else (before, longest)
    return cut_batch(batch, tokens, getattr(config, "vocab_size", None) or getattr(config, "vocab", None))


def _longest(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    names = ("max_position_embeddings", "n_positions", "sequence")
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def _shorter(model: nn.Module, spots: Sequence[Spot], size: Size) -> tuple[list[Spot], list[str]]:
    """The layers that stay, and paths of those that go."""
    wanted = {spot.name for spot in kept_spots(spots, size)}
    gone = [spot.name for spot in spots if spot.name not in wanted and can_drop(model, spot.name)]
    return [spot for spot in spots if spot.name not in gone], gone


def _strategies(graph: ModelGraph, kept: Sequence[Spot], names: Sequence[str], size: Size) -> Chosen:
    """What becomes of each strategy: legal for all the layers that have it; by kind of layer where none is."""
    kinds = dict(zip(names, (graph.kind_of(layer) for layer in graph.layers), strict=True))
    users: dict[Strategy, dict[str, LayerKind]] = {}
    for spot, name in zip(kept, names, strict=True):
        users.setdefault(spot.strategy, {})[kinds[name].name] = kinds[name]
    chosen: dict[tuple[Strategy, str], Strategy] = {}
    for strategy, own in users.items():
        together = reduced(strategy, size.devices, legal_for(list(own.values()), size.devices))
        for name, kind in own.items():
            chosen[strategy, name] = together or _alone(strategy, kind, size.devices)
    return {spot.name: chosen[spot.strategy, kinds[name].name] for spot, name in zip(kept, names, strict=True)}


def _alone(strategy: Strategy, kind: LayerKind, devices: int) -> Strategy:
    """For one kind of layer: what the planner would not do there is left out."""
    plain = replace(strategy, recompute=Recompute.NONE, sequence_parallel=False, expert=1, expert_tensor=0)
    legal = legal_for([kind], devices)
    found = reduced(strategy, devices, legal) or reduced(plain, devices, legal)
    if found is None:
        raise TooLargeError(f"No strategy on {devices} processes is like {strategy} in layers of kind {kind.name}.")
    return found


def _check_work(graph: ModelGraph, plan: Plan) -> None:
    """Raise TooLargeError where the small model is not small."""
    if graph.parameters > LARGEST:
        raise TooLargeError(
            f"It still has {format_count(graph.parameters)} parameters; up to {format_count(LARGEST)} are run. Models "
            "of the zoo and of transformers are made narrower by their configuration, others only shorter."
        )
    work = graph.flops * plan.global_batch
    if work > MOST_WORK:
        raise TooLargeError(f"A step of it still takes {work:.1e} FLOPs; up to {MOST_WORK:.0e} are run.")


def _size_lines(spots: Sequence[Spot], kept: Sequence[Spot], graph: ModelGraph) -> list[str]:
    blocks, left = (sum(spot.role is Role.BLOCK for spot in some) for some in (spots, kept))
    return [
        f"blocks: {blocks} -> {left}" if blocks > left else f"blocks: all {blocks}",
        f"model: {format_count(graph.parameters)} parameters",
    ]


def make_small(source: ModelSource, recipe: Recipe) -> Small:
    """The small model with values, always the same ones; its batches differ from one another."""
    torch.manual_seed(0)
    model, given, loss_fn = source.on_meta() if recipe.ways else source.make()
    made = narrowed(model, recipe.ways, source.configured) if recipe.ways else None
    small = model if made is None else made[0]
    samples = recipe.plan.global_batch * STEPS
    given = _with_values(source, model, given)
    cut = given if given is None or made is None else cut_for(given, small)
    example = example_batch(small, samples) if cut is None else with_samples(cut, samples)
    small = calmed(dropped(small, recipe.left_out)).float().train()
    normed, long = has_batch_norms(small), convolves(small)
    if normed:
        small = nn.SyncBatchNorm.convert_sync_batchnorm(small)  # type: ignore[no-untyped-call]
    small = small.double() if long else small
    layers = discover_layers(small, example)
    each = samples // STEPS
    batches = tuple(_as(slice_batch(example, start, start + each), long) for start in range(0, samples, each))
    return Small(small, batches, loss_fn, layers, 10.0 if long else 1.0, normed)


def _with_values(source: ModelSource, model: nn.Module, batch: Any) -> Any:
    """The user's batch; made again beside the full model where it has no values and that is not too large; or None."""
    if batch is None or not any(tensor.is_meta for tensor in tensors_of(batch)):
        return batch
    whole = sum(parameter.numel() for parameter in model.parameters())
    return source.make()[1] if whole <= BUILT else None


def _as(batch: Any, double: bool) -> Any:
    kind = torch.float64 if double else torch.float32

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(kind) if tensor.is_floating_point() else tensor

    return map_tensors(batch, cast)
