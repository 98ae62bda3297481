"""One rank of each role: ranks that do the same, each at its own place, are run once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd, lcm

from torch import Tensor

from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.model.graph import Layer
from galvatron_lite.model.graph import Role as LayerRole
from galvatron_lite.parallelism.layout import layout_of
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.zero.cost import cut_dim
from galvatron_lite.plans.describe import other_size
from galvatron_lite.plans.io import pipeline_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.assignment import shorten
from galvatron_lite.verify.dry.mode import DryRunError
from galvatron_lite.verify.dry.repeat import UnlikeError
from galvatron_lite.verify.dry.step import Subject, dry_run
from galvatron_lite.verify.dry.world import Announced, UnheardError
from galvatron_lite.verify.schema import RoleRun

SHARED = frozenset({"before", "after"})  # names that layers of all models have


CLOSED = frozenset({"layers", "encoder.layers", "bridge", "decoder.layers"})
"""What closed forms call layers of models that call them otherwise themselves; their numbers left out."""


def named_for(plan: Plan, layers: Sequence[Layer], parameters: int = 0) -> Plan:
    """The plan with its layers called as the model's, which are taken in order; itself where it knows them.

    A layer between an encoder and a decoder may be several of the model's.

    Args:
        parameters: items of the model; 0 where they are not known.

    Raises:
        InputError: the plan is for another model: for one of other layers, or of other names and as many layers.
    """
    names, start = [layer.name for layer in layers], 0
    runs = [run for stage in plan.stages for run in stage.runs]
    ends = [name for run in runs for name in (run.first, run.last)]
    strange = [name for name in ends if name not in names]
    counts = [run.count for run in runs]
    sizes = _sizes(counts, names)
    if not strange and sizes == counts:
        return plan
    few = len(strange) * 2 < len([name for name in ends if name not in SHARED])
    if strange and (few or not {name.rstrip("0123456789").rstrip(".") for name in strange} <= CLOSED):
        raise InputError("plan: layer", strange[0], f"The model has no such layer. Its layers are: {shorten(names)}.")
    if sum(sizes) != len(names):
        remedy = f"The plan is for {sum(sizes)} layers, the model has {len(names)}: give the model it was made for."
        raise InputError("plan", plan.model, remedy)
    for line in other_size(plan, parameters) if strange and parameters else ():
        raise InputError("plan", plan.model, f"The model has no layer {strange[0]}. {line}")
    stages, left = [], iter(sizes)
    for stage in plan.stages:
        renamed = []
        for run, size in zip(stage.runs, left, strict=False):
            renamed.append(replace(run, first=names[start], last=names[start + size - 1], count=size))
            start += size
        stages.append(replace(stage, runs=tuple(renamed)))
    return replace(plan, stages=tuple(stages))


def _sizes(counts: Sequence[int], names: Sequence[str]) -> list[int]:
    """Layers of the model that each run of so many planned ones stands for.

    If the model has more of them, and those without a number lie together between the repeated ones (encoder and
    decoder), then the plan has one in their stead.
    """
    more = len(names) - sum(counts)
    between = [
        place for place, name in enumerate(names) if not name.rpartition(".")[2].isdigit() and name not in SHARED
    ]
    if more <= 0 or between != list(range(min(between, default=0), min(between, default=0) + more + 1)):
        return list(counts)
    ends = accumulate(counts)
    return [count + more * (0 <= between[0] - end + count < count) for count, end in zip(counts, ends, strict=True)]


Progress = Callable[[int, int, str], None]  # told how many roles were run, of how many, and the last one


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that do the same."""

    stage: int  # the group of devices
    text: str  # what is particular about them
    ranks: tuple[int, ...]  # all of them; the first is run

    @property
    def rank(self) -> int:
        """The one that is run."""
        return self.ranks[0]


def roles_of(plan: Plan, even: bool = True, chained: bool = False, apart: bool = False) -> tuple[RankClass, ...]:
    """The roles of a plan, by stage.

    All ranks of a stage play one where they split every layer's samples alike, and nothing that depends on a rank's
    place: no pixels, tokens, channels or experts. Else places repeat: samples are shared by the outermost dims of every
    strategy, so a rank that lies by a whole number of all their inner ranks further does the same, with samples that
    lie as much further in each layer. Where ranks lie in another order, each has a role of its own.

    Args:
        plan: of any kind.
        even: whether tensor groups split everything into equal parts; if not, their places differ.
        chained: whether each layer takes from the one before it alone; else a stage may be given what any layer of an
            earlier one has made, as that had it.
        apart: whether places never repeat, since ZeRO's shards of a parameter are not all alike.
    """
    pipeline, width, classes = pipeline_of(plan), plan.stage_devices, list[RankClass]()
    for group in range(plan.pipeline):
        stages = pipeline.stages_of(group)
        runs = [run for stage in stages for run in plan.stages[stage].runs]
        given = [run for stage in range(max(stages)) for run in plan.stages[stage].runs]
        if chained:
            given = [plan.stages[stage - 1].runs[-1] for stage in stages if stage]
        places = _places([run.strategy for run in (*runs, *given)], width, even=even, apart=apart)
        for text, alike in places.items():
            classes.append(RankClass(group, text, tuple(group * width + place for place in alike)))
    return tuple(classes)


def _places(strategies: Sequence[Strategy], width: int, *, even: bool, apart: bool) -> dict[str, list[int]]:
    """Places in a stage of so many ranks that do the same, by what is particular about them."""
    # whether no rank does anything that its neighbours do not
    degrees = {(strategy.batch_degree, strategy.weight_slices) for strategy in strategies}
    lines = [lines_of(strategy) for strategy in strategies]
    alike = len(degrees) == 1 and not any(line.uneven or line.tokens.size > 1 for line in lines)
    spread = [line.spread for line in lines if line.spread is not None]
    over = (one.over.size * one.sharing for one in spread if one.over is not None)
    repeats = lcm(*(layout_of(strategy).replicas for strategy in strategies), *over)
    if apart and not alike:
        repeats = width
    peers = alike or (not apart and _tensor_peers_alike(strategies))
    inner = gcd(*(one.weight_slices for one in strategies)) if even and peers else 1
    if repeats == inner:
        return {"all ranks": list(range(width))}
    share = f"of {width}" if repeats == width else f"of every {repeats}"
    return {
        f"place {place} {share}": [one for one in range(width) if one % repeats // inner == place // inner]
        for place in range(0, repeats, inner)
    }


def _tensor_peers_alike(strategies: Sequence[Strategy]) -> bool:
    """Whether the ranks of a tensor group, of the narrowest, do the same.

    They do where tokens that are split anywhere are split over the same ranks everywhere, or not at all: elsewhere it
    depends on a rank's place which of its tokens another layer wants.
    """
    if len({strategy.batch_degree for strategy in strategies}) > 1 or any(
        lines_of(strategy).uneven for strategy in strategies
    ):
        return False
    layouts = {layout_of(strategy): strategy.weight_slices for strategy in strategies}
    return len({(one.tokens, slices) for one, slices in layouts.items() if one.tokens * one.sequence > 1}) < 2


def run_roles(
    subject: Subject,
    plan: Plan,
    progress: Progress = lambda *_: None,
    *,
    chained: bool = False,
) -> list[RoleRun]:
    """Run one rank of each role of a plan, in this process, in the order in which what is announced goes.

    A rank that waits for something announced by a rank that comes later (stages that go round the groups of devices
    more than once) is begun again once that has been run so far.

    Micro-batches that repeat others are not run (``repeat``); all are where some turn out not to.

    Raises:
        DryRunError: what runs depends on values, or ranks wait for one another.
        LaunchError: this process has joined a world.
    """
    roles = roles_of(plan, _is_even(subject, plan), chained, apart=not _shards_alike(subject, plan))
    try:
        return _run_roles(subject, plan, roles, progress, brief=True)
    except UnlikeError:
        return _run_roles(subject, plan, roles, progress, brief=False)
    except (GalvatronError, MemoryError):
        raise
    except Exception as error:  # whatever an operator, or a user's model, does that has no meaning without data
        raise DryRunError(f"{type(error).__name__}: {error}") from error


def _run_roles(
    subject: Subject, plan: Plan, roles: Sequence[RankClass], progress: Progress, *, brief: bool
) -> list[RoleRun]:
    runs: dict[int, RoleRun] = {}
    announced: dict[int, Announced] = {}
    first = {rank: role.rank for role in roles for rank in role.ranks}

    def hear(source: int, purpose: str, place: int, number: int) -> Tensor | None:
        """What a rank announced is what the one that was run of its role did."""
        values = announced.get(first[source], {}).get((purpose, place), [])
        return values[number] if number < len(values) else None

    waiting = list(roles)
    while waiting:
        before, late = _amount(announced), list[RankClass]()
        for role in waiting:
            words: Announced = {}
            try:
                run, _ = dry_run(subject, plan, role.rank, hear, words, brief=brief)
            except UnheardError:
                late.append(role)
            else:
                runs[role.rank] = replace(run, role=role.text, ranks=role.ranks)
                progress(len(runs), len(roles), f"rank {role.rank}")
            announced[role.rank] = words
        if late and _amount(announced) == before:
            raise DryRunError("Ranks wait for what others announce, and none comes any further.")
        waiting = late
    return [runs[role.rank] for role in roles]


def _amount(announced: Mapping[int, Announced]) -> int:
    return sum(len(values) for by_stage in announced.values() for values in by_stage.values())


def _shards_alike(subject: Subject, plan: Plan) -> bool:
    """Whether ZeRO's shards divide the rows of every parameter."""
    chosen = [run.strategy for stage in plan.stages for run in stage.runs for _ in range(run.count)]
    owned = list(zip(subject.layers, chosen, strict=True))
    edges = {strategy for layer, strategy in owned if layer.role is not LayerRole.BLOCK}
    inside = {path: {strategy} for layer, strategy in owned if layer.role is LayerRole.BLOCK for path in layer.modules}
    for name, parameter in subject.model.named_parameters():
        owners = (inside[path] for path in _paths_above(name) if path in inside)
        for one in next(owners, edges):
            if lines_of(one).states.shards.size > 1 and parameter.dim() and not _divides(tuple(parameter.shape), one):
                return False
    return True


def _divides(shape: tuple[int, ...], strategy: Strategy) -> bool:
    """Whether all shards of a parameter are of one size, however tensor ranks slice it."""
    states, spread = lines_of(strategy).states, lines_of(strategy).spread
    ways = 1 if spread is None or spread.over is None else spread.over.size
    if len(shape) > 2 and spread is not None and shape[0] % ways == 0:  # experts that are stacked
        shape, states = (shape[0] // ways, *shape[1:]), spread
    parts = states.shards.size * strategy.weight_slices
    return shape[cut_dim(shape, parts, strategy.zero_stage)] % parts == 0


def _paths_above(name: str) -> Iterator[str]:
    """Of the modules that hold what has this name, innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _is_even(subject: Subject, plan: Plan) -> bool:
    rows = {len(one) for name, one in subject.model.named_parameters() if name.endswith("weight") and one.dim() > 1}
    degrees = {run.strategy.weight_slices for stage in plan.stages for run in stage.runs}
    return all(size % degree == 0 for size in rows for degree in degrees)
