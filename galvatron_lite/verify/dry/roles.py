"""Group ranks into roles, and run one rank of each.

Ranks of a role send the same messages and hold the same bytes, each from its position in its groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

EDGES = frozenset({"before", "after"})  # layers of all models
PUBLISHED_NAMES = frozenset({"layers", "encoder.layers", "bridge", "decoder.layers"})
"""Names, without numbers, of layers in graphs made from published shapes, whose modules name them differently."""


def named_for(plan: Plan, layers: Sequence[Layer], parameters: int = 0) -> Plan:
    """Return the plan with its layers renamed to the model's, in order; the plan itself if the names are the model's.

    A plan's layer between an encoder and a decoder may be several layers of the model.

    Args:
        plan: for the model, or for a graph of its published shape.
        layers: of the model.
        parameters: items of the model; 0: unknown.

    Raises:
        InputError: the plan is for another model.
    """
    names, start = [layer.name for layer in layers], 0
    runs = [run for stage in plan.stages for run in stage.runs]
    ends = [name for run in runs for name in (run.first, run.last)]
    unknown = [name for name in ends if name not in names]
    counts = [run.count for run in runs]
    sizes = _run_sizes(counts, names)
    if not unknown and sizes == counts:
        return plan
    few = len(unknown) * 2 < len([name for name in ends if name not in EDGES])
    if unknown and (few or not {name.rstrip("0123456789").rstrip(".") for name in unknown} <= PUBLISHED_NAMES):
        raise InputError("plan: layer", unknown[0], f"The model has no such layer. Its layers are: {shorten(names)}.")
    if sum(sizes) != len(names):
        remedy = f"The plan is for {sum(sizes)} layers, the model has {len(names)}: give the model it was made for."
        raise InputError("plan", plan.model, remedy)
    for line in other_size(plan, parameters) if unknown and parameters else ():
        raise InputError("plan", plan.model, f"The model has no layer {unknown[0]}. {line}")
    stages, remaining_sizes = [], iter(sizes)
    for stage in plan.stages:
        renamed = []
        for run in stage.runs:
            size = next(remaining_sizes)
            renamed.append(replace(run, first=names[start], last=names[start + size - 1], count=size))
            start += size
        stages.append(replace(stage, runs=tuple(renamed)))
    return replace(plan, stages=tuple(stages))


def _run_sizes(counts: Sequence[int], names: Sequence[str]) -> list[int]:
    """Return how many of the model's layers each planned run of ``counts`` layers stands for.

    If the model has more layers than the plan, and its layers without a number lie together between an encoder and a
    decoder, one planned layer stands for all of those.
    """
    extra = len(names) - sum(counts)
    between = [index for index, name in enumerate(names) if not name.rpartition(".")[2].isdigit() and name not in EDGES]
    first = min(between, default=0)
    if extra <= 0 or between != list(range(first, first + extra + 1)):
        return list(counts)
    return [
        count + extra * (stop - count <= first < stop) for count, stop in zip(counts, accumulate(counts), strict=True)
    ]


Progress = Callable[[int, int, str], None]  # called with (roles done, all roles, label of the last one)


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that share a role."""

    stage: int  # the group of devices
    text: str  # distinguishes the role from others of the stage
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The rank that is run for all."""
        return self.ranks[0]


def roles_of(plan: Plan, even: bool = True, chained: bool = False, apart: bool = False) -> tuple[RankClass, ...]:
    """Return the roles of a plan, by stage.

    All ranks of a stage share one if every layer splits samples in the same way, and nothing that depends on a rank's
    position (pixels, tokens, channels, experts). Otherwise roles repeat with a period: the outermost dims of every
    strategy split samples, so ranks that are a common multiple of all inner degrees apart differ only in their
    samples. In any other order of ranks, each has its own role.

    Args:
        plan: of any kind.
        even: whether tensor groups split everything into equal slices; if not, the positions in them differ.
        chained: whether each layer reads the output of the previous layer alone; if not, a stage may receive the output
            of any layer of an earlier stage, in that layer's layout.
        apart: whether roles never repeat, because ZeRO's shards of some parameter have different sizes.
    """
    pipeline, width, classes = pipeline_of(plan), plan.stage_devices, list[RankClass]()
    for group in range(plan.pipeline):
        stages = pipeline.stages_of(group)
        runs = [run for stage in stages for run in plan.stages[stage].runs]
        senders = [run for stage in range(max(stages)) for run in plan.stages[stage].runs]
        if chained:
            senders = [plan.stages[stage - 1].runs[-1] for stage in stages if stage]
        positions = _positions_by_role([run.strategy for run in (*runs, *senders)], width, even=even, apart=apart)
        for text, members in positions.items():
            classes.append(RankClass(group, text, tuple(group * width + position for position in members)))
    return tuple(classes)


def _positions_by_role(strategies: Sequence[Strategy], width: int, *, even: bool, apart: bool) -> dict[str, list[int]]:
    """Return the positions of each role, by its text, in a stage of ``width`` ranks."""
    degrees = {(strategy.batch_degree, strategy.weight_slices) for strategy in strategies}
    lines = [lines_of(strategy) for strategy in strategies]
    uniform = len(degrees) == 1 and not any(line.uneven or line.tokens.size > 1 for line in lines)
    spreads = [line.spread for line in lines if line.spread is not None]
    expert_ranks = (spread.over.size * spread.sharing for spread in spreads if spread.over is not None)
    period = lcm(*(layout_of(strategy).replicas for strategy in strategies), *expert_ranks)
    if apart and not uniform:
        period = width
    peers_alike = uniform or (not apart and _are_tensor_peers_alike(strategies))
    inner = gcd(*(strategy.weight_slices for strategy in strategies)) if even and peers_alike else 1
    if period == inner:
        return {"all ranks": list(range(width))}
    share = f"of {width}" if period == width else f"of every {period}"
    return {
        f"place {first} {share}": [place for place in range(width) if place % period // inner == first // inner]
        for first in range(0, period, inner)
    }


def _are_tensor_peers_alike(strategies: Sequence[Strategy]) -> bool:
    """Whether the ranks of the smallest tensor group share a role.

    They do if all layers that split tokens split them over the same ranks. If not, which tokens a rank exchanges
    between two layers depends on its position.
    """
    batch_degrees = {strategy.batch_degree for strategy in strategies}
    if len(batch_degrees) > 1 or any(lines_of(strategy).uneven for strategy in strategies):
        return False
    slices = {layout_of(strategy): strategy.weight_slices for strategy in strategies}
    token_splits = {(layout.tokens, slices[layout]) for layout in slices if layout.tokens * layout.sequence > 1}
    return len(token_splits) < 2


def run_roles(
    subject: Subject,
    plan: Plan,
    progress: Progress = lambda *_: None,
    *,
    chained: bool = False,
) -> list[RoleRun]:
    """Run one rank of each role of a plan in this process, one after another.

    A rank that needs a message of a rank that has not run (with interleaved stages) starts again after that one.
    Micro-batches that repeat others are not run (``repeat``), unless some turn out to differ.

    Raises:
        DryRunError: the step depends on values, or ranks wait for one another.
        LaunchError: this process has joined a world.
    """
    roles = roles_of(plan, _are_slices_even(subject, plan), chained, apart=not _are_shards_even(subject, plan))
    try:
        return _run_roles(subject, plan, roles, progress, brief=True)
    except UnlikeError:
        return _run_roles(subject, plan, roles, progress, brief=False)
    except (GalvatronError, MemoryError):
        raise
    except Exception as error:  # operators and users' models may raise anything without data
        raise DryRunError(f"{type(error).__name__}: {error}") from error


def _run_roles(
    subject: Subject, plan: Plan, roles: Sequence[RankClass], progress: Progress, *, brief: bool
) -> list[RoleRun]:
    runs: dict[int, RoleRun] = {}
    announced: dict[int, Announced] = {}
    recorded_rank = {rank: role.rank for role in roles for rank in role.ranks}

    def hear(source: int, purpose: str, place: int, number: int) -> Tensor | None:
        values = announced.get(recorded_rank[source], {}).get((purpose, place), [])
        return values[number] if number < len(values) else None

    def count_announced() -> int:
        return sum(len(values) for by_receiver in announced.values() for values in by_receiver.values())

    waiting = list(roles)
    while waiting:
        count_before, interrupted = count_announced(), list[RankClass]()
        for role in waiting:
            by_receiver: Announced = {}
            try:
                run, _ = dry_run(subject, plan, role.rank, hear, by_receiver, brief=brief)
            except UnheardError:
                interrupted.append(role)
            else:
                runs[role.rank] = replace(run, role=role.text, ranks=role.ranks)
                progress(len(runs), len(roles), f"rank {role.rank}")
            announced[role.rank] = by_receiver
        if interrupted and count_announced() == count_before:
            raise DryRunError("Ranks wait for messages of one another: none of them can go on.")
        waiting = interrupted
    return [runs[role.rank] for role in roles]


def _are_shards_even(subject: Subject, plan: Plan) -> bool:
    """Whether ZeRO's shards of every parameter have the same size."""
    strategies = [run.strategy for stage in plan.stages for run in stage.runs for _ in range(run.count)]
    pairs = list(zip(subject.layers, strategies, strict=True))
    edges = {strategy for layer, strategy in pairs if layer.role is not LayerRole.BLOCK}
    blocks = {path: {strategy} for layer, strategy in pairs if layer.role is LayerRole.BLOCK for path in layer.modules}
    for name, parameter in subject.model.named_parameters():
        modules = accumulate(name.split(".")[:-1], "{}.{}".format)
        candidates = next((blocks[path] for path in reversed(list(modules)) if path in blocks), edges)
        for strategy in candidates:
            sharded = lines_of(strategy).states.shards.size > 1 and parameter.dim()
            if sharded and not _do_shards_divide(tuple(parameter.shape), strategy):
                return False
    return True


def _do_shards_divide(shape: tuple[int, ...], strategy: Strategy) -> bool:
    """Whether all shards of a parameter have one size, in whichever dim tensor ranks slice it."""
    states, spread = lines_of(strategy).states, lines_of(strategy).spread
    ways = 1 if spread is None or spread.over is None else spread.over.size
    if len(shape) > 2 and spread is not None and shape[0] % ways == 0:  # stacked experts
        shape, states = (shape[0] // ways, *shape[1:]), spread
    parts = states.shards.size * strategy.weight_slices
    return shape[cut_dim(shape, parts, strategy.zero_stage)] % parts == 0


def _are_slices_even(subject: Subject, plan: Plan) -> bool:
    """Whether tensor degrees divide the rows of every weight."""
    parameters = subject.model.named_parameters()
    rows = {len(weight) for name, weight in parameters if name.endswith("weight") and weight.dim() > 1}
    degrees = {run.strategy.weight_slices for stage in plan.stages for run in stage.runs}
    return all(size % degree == 0 for size in rows for degree in degrees)
