"""Hetu-Galvatron's plans as ours, and back where its files can say what ours do.

Its ``zero2`` keeps parameters and gradients whole from micro-batch to micro-batch and sums gradients behind the last
one, which is our ZeRO stage 1; with a single micro-batch gradients are scattered as they form, which is our stage 2, or
stage 1 in a profile that has gradients as its runtime has them (``Profile.accumulates``). Its ``zero3`` is our stage 3.
Embedding and head have one strategy (``vtp``, ``vsp``, ``embed_sdp``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Recompute, Role
from galvatron_lite.parallelism.strategy import Offload, Strategy, Strided
from galvatron_lite.peers.hetu.model import Engine
from galvatron_lite.peers.hetu.strategy import DataType, HetuPlan, HetuStrategy
from galvatron_lite.plans.io import check_plan
from galvatron_lite.plans.schema import PLAN_VERSION, Plan, Schedule, Stage
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.validate.plans import runs

SCHEDULES = {"gpipe": Schedule.GPIPE, "pipedream_flush": Schedule.ONE_F_ONE_B}


def to_plan(
    plan: HetuPlan,
    profile: Profile | None = None,
    *,
    name: str = "",
    precision: str = "bf16",
    tokens: bool = True,
    async_reduce: bool = True,
    engine: Engine = Engine.MAIN,
) -> Plan:
    """Our plan of theirs.

    Args:
        plan: theirs.
        profile: of the model, for its name and the names of its layers.
        name, precision: of the model, where there is no profile.
        tokens: whether tensor groups share the tokens too (its ``sequence_parallel``).
        async_reduce: whether gradients are summed behind the last micro-batch only (its ``async_grad_reduce``); after
            each micro-batch else, which is our stage 2.
        engine: v2.4.0 shards the states of embedding and head over a Ulysses group of one replica too.

    Raises:
        InputError: the profile's model has another number of layers, or numbers do not divide.
    """
    layers = _layers(plan, profile)
    shared = _shares_tokens(profile) if profile else tokens
    stage = 1 if async_reduce and (plan.chunks > 1 or (profile is not None and profile.accumulates)) else 2
    edges = our_strategy(plan.edges, shared, stage, alone=engine is Engine.V240)
    strategies = [edges, *(our_strategy(one, shared, stage) for one in plan.layers), edges]
    ends = list(accumulate(plan.division))
    ends[-1] += 1
    stages = tuple(
        Stage(tuple(runs(layers[start:end], strategies[start:end])))
        for start, end in zip([0, *(end + 1 for end in ends[:-1])], [end + 1 for end in ends], strict=True)
    )
    graph = profile.graph if profile else None
    return check_plan(
        Plan(
            PLAN_VERSION, graph.name if graph else name or "hetu", plan.devices, plan.batch, plan.chunks,
            SCHEDULES[plan.schedule], graph.precision if graph else precision, stages,
        )
    )  # fmt: skip


def _layers(plan: HetuPlan, profile: Profile | None) -> list[Layer]:
    if profile is None:
        blocks = [Layer(f"layers.{place}", "block", Role.BLOCK) for place in range(len(plan.layers))]
        return [Layer("embed", "embed", Role.BEFORE), *blocks, Layer("head", "head", Role.AFTER)]
    layers = list(profile.graph.layers)
    if len(layers) != len(plan.layers) + 2:
        remedy = f"The profile's model {profile.graph.name} has {len(layers) - 2} between embedding and head."
        raise InputError("tp_sizes_enc", len(plan.layers), remedy)
    return layers


def _shares_tokens(profile: Profile) -> bool:
    return all(point.sequence_parallel for point in profile.layers if point.tensor > 1)


def our_strategy(one: HetuStrategy, tokens: bool, zero2: int = 1, *, alone: bool = False) -> Strategy:
    """Our strategy of one of theirs.

    Args:
        one: theirs.
        tokens: as in ``to_plan``.
        zero2: the stage that stands for its ``zero2``.
        alone: whether the Ulysses group of a single replica shards states.
    """
    replicated = one.kind is DataType.DDP or (one.shards if alone else one.data) == 1
    stage = 3 if one.kind is DataType.ZERO3 else zero2
    return Strategy(
        data=one.data if replicated else 1,
        zero=1 if replicated else one.data,
        zero_stage=0 if replicated else stage,
        tensor=one.tensor,
        sequence_parallel=tokens and one.tensor > 1,
        recompute=Recompute.FULL if one.checkpoint else Recompute.NONE,
        context=one.ulysses,
        ulysses=one.ulysses > 1,
    )


def from_plan(plan: Plan, edges: str = "") -> HetuPlan:
    """Their plan of ours.

    Args:
        plan: ours.
        edges: ``first`` or ``last``: whose strategy embedding and head both get where they are unlike; refused if
            empty.

    Raises:
        InputError: what their files cannot say; names the layer and its strategy.
    """
    schedule = next((name for name, known in SCHEDULES.items() if known is plan.schedule), None)
    if schedule is None or plan.virtual_stages > 1:
        raise InputError("schedule", plan.schedule.value, f"Hetu-Galvatron runs {', '.join(SCHEDULES)}.")
    named = [
        (run.first if run.count == 1 else f"{run.first}..{run.last}", run.strategy)
        for stage in plan.stages
        for run in stage.runs
        for _ in range(run.count)
    ]
    first, *blocks, last = [(name, _hetu_strategy(name, strategy)) for name, strategy in named]
    if first[1] != last[1] and not edges:
        raise InputError(f"strategy of {last[0]}", str(named[-1][1]), f"It must be that of {first[0]}: {named[0][1]}.")
    counts = [sum(run.count for run in stage.runs) for stage in plan.stages]
    counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
    if len(counts) == 1:
        counts = [len(blocks)]
    own, edge = [strategy for _, strategy in blocks], (last if edges == "last" else first)[1]
    return HetuPlan(
        plan.devices, plan.pipeline, plan.global_batch, plan.microbatches, tuple(counts), tuple(own), edge,
        schedule, _default([*own, edge]),
    )  # fmt: skip


def _default(strategies: Sequence[HetuStrategy]) -> DataType:
    plain = any(one.kind is DataType.DDP and one.data > 1 for one in strategies)
    return DataType.DDP if plain else DataType.ZERO2


def _hetu_strategy(name: str, one: Strategy) -> HetuStrategy:
    reason = next((said for unsaid, said in _unsaid(one) if unsaid), "")
    if reason:
        raise InputError(f"strategy of {name}", str(one), f"Hetu-Galvatron's files cannot say it: {reason}.")
    kind = {0: DataType.DDP, 1: DataType.ZERO2, 2: DataType.ZERO2, 3: DataType.ZERO3}[one.zero_stage]
    again = one.recompute is Recompute.FULL
    return HetuStrategy(one.tensor, one.context, one.batch_degree, kind, again)


def _unsaid(one: Strategy) -> tuple[tuple[bool, str], ...]:
    """What their files have no words for."""
    return (
        (one.data > 1 and one.zero > 1, "replicas of shards"),
        (one.context > 1 and not one.ulysses, "context parallelism by rings"),
        (one.context > 1 and one.tensor > 1, "Ulysses and tensor parallelism in one layer"),
        (one.expert > 1, "experts"),
        (one.strided is not Strided.NONE, "placement"),
        (one.offload is not Offload.NONE, "offload"),
        (one.recompute is Recompute.SELECTIVE, "selective recomputation"),
    )
