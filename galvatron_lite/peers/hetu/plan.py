"""Convert plans of Hetu-Galvatron (JSON files) to ours, and ours to its files, as far as these can express them.

Its ``zero2`` keeps whole parameters and gradients between micro-batches and reduces gradients after the last one, as
our ZeRO stage 1 does. With a single micro-batch gradients are scattered as they are computed, as in our stage 2, or
stage 1 in a profile whose gradients are as in its runtime (``Profile.accumulates``). Its ``zero3`` is our stage 3.
Embedding and head have the same strategy (``vtp``, ``vsp``, ``embed_sdp``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Recompute, Role
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.peers.hetu.model import Engine
from galvatron_lite.plans.io import check_plan
from galvatron_lite.plans.schema import PLAN_VERSION, Plan, Schedule, Stage, layer_runs
from galvatron_lite.profiler.schema import Profile


class DataType(StrEnum):
    """How data-parallel ranks shard states."""

    DDP = "ddp"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


@dataclass(frozen=True, slots=True)
class HetuStrategy:
    """The strategy of one layer."""

    tensor: int  # ranks of its tensor group; 1 with Ulysses
    ulysses: int  # ranks of its Ulysses group
    data: int  # data-parallel ranks
    kind: DataType  # how these shard states
    checkpoint: bool = False  # whether it is recomputed in backward

    @property
    def sharing(self) -> int:
        """Ranks that share one sample."""
        return max(self.tensor, self.ulysses)

    @property
    def shards(self) -> int:
        """Ranks that shard states under ZeRO, and reduce gradients."""
        return self.data * self.ulysses


@dataclass(frozen=True, slots=True)
class HetuPlan:
    """A plan in its terms."""

    devices: int  # number of GPUs
    pipeline: int  # number of stages
    batch: int  # samples a step
    chunks: int  # number of micro-batches
    division: tuple[int, ...]  # layers of each stage
    layers: tuple[HetuStrategy, ...]  # of each layer
    edges: HetuStrategy  # of embedding and head
    schedule: str = "pipedream_flush"  # ``gpipe`` or ``pipedream_flush`` (1F1B)
    default: DataType = DataType.ZERO2  # meaning of 0 in ``dp_types_enc``


def read_hetu_plan(data: Mapping[str, Any], field: str, devices: int = 0, batch: int = 0) -> HetuPlan:
    """Parse a plan from JSON: a searched plan with figures of each layer, or one strategy by flags (GLOBAL mode).

    Args:
        data: the JSON object.
        field: name of the file in errors.
        devices: number of GPUs, if the file does not say.
        batch: samples a step, if the file does not say.

    Raises:
        InputError: a missing or wrong number; names it.
    """
    searched = "tp_sizes_enc" in data
    stages, default = _integer(data, "pp_deg", field, None if searched else 1), _default(data, field)
    if searched:
        tensor = _list(data, "tp_sizes_enc", field)
        count = len(tensor)
        world = _integer(data, "world_size", field, devices or stages * max(tensor))
        shapes = [tensor, *(_list(data, key, field, count) for key in ("use_sp", "dp_types_enc", "checkpoint"))]
        context = _list(data, "cp_sizes_enc", field, count, 1)
        division = tuple(_list(data, "pp_division", field, stages, count // stages))
    else:
        count, world = _integer(data, "num_layers", field), _integer(data, "world_size", field, devices or None)
        flags = (("global_tp_deg", 1), ("use_ulysses", 0), ("sdp", 0), ("global_checkpoint", 0))
        shapes = [[_integer(data, key, field, other, other)] * count for key, other in flags]
        context = [_integer(data, "global_cp_deg", field, 1)]
        division = (*([count // stages] * (stages - 1)), count - count // stages * (stages - 1))
    if any(size != 1 for size in context):
        key = "cp_sizes_enc" if searched else "global_cp_deg"
        raise InputError(f"{field}, {key}", data[key], "Context parallelism is not modelled by it.")
    if sum(division) != count or len(division) != stages:
        raise InputError(f"{field}, pp_division", data.get("pp_division"), f"It must share {count} layers on {stages}.")
    layers = tuple(
        _strategy(world // stages, shape, default, f"{field}, {f'layer {place}' if searched else 'global_tp_deg'}")
        for place, shape in enumerate(zip(*shapes, strict=True))
    )
    names = ("vtp", "vsp", "embed_sdp") if searched else ("vocab_tp", "vocab_sp", "vocab_sdp")
    size = _integer(data, names[0], field, 1)
    shared, sharded = (_integer(data, key, field, 0, 0) for key in names[1:])
    sharded = _integer(data, "vocab_sdp", field, sharded, 0)
    edges = _strategy(world // stages, (size, shared, sharded, 0), default, f"{field}, {names[0]}")
    samples = _integer(data, "global_bsz" if searched else "global_train_batch_size", field, batch or None)
    chunks = _integer(data, "chunks", field, 1)
    return HetuPlan(world, stages, samples, chunks, division, layers, edges, _schedule(data, field), default)


def write_hetu_plan(plan: HetuPlan) -> dict[str, Any]:
    """Convert a plan to the JSON object that its search engine writes."""
    for place, layer in enumerate((*plan.layers, plan.edges)):
        if layer.data > 1 and layer.kind not in (plan.default, DataType.ZERO3):
            field = f"layer {place}" if place < len(plan.layers) else "embedding and head"
            raise InputError(field, layer.kind.value, f"Its files know {plan.default.value} or zero3 in one plan.")
    return {
        "pp_deg": plan.pipeline,
        "tp_sizes_enc": _joined(layer.sharing for layer in plan.layers),
        "tp_consecutive_flags": _joined(1 for _ in plan.layers),
        "dp_types_enc": _joined(int(layer.kind is DataType.ZERO3) for layer in plan.layers),
        "use_sp": _joined(int(layer.ulysses > 1) for layer in plan.layers),
        "checkpoint": _joined(int(layer.checkpoint) for layer in plan.layers),
        "world_size": plan.devices,
        "global_bsz": plan.batch,
        "chunks": plan.chunks,
        "pp_division": _joined(plan.division),
        "pipeline_type": plan.schedule,
        "default_dp_type": plan.default.value,
        "vtp": plan.edges.sharing,
        "vsp": int(plan.edges.ulysses > 1),
        "embed_sdp": int(plan.edges.kind is DataType.ZERO3),
    }


def _joined(figures: Iterable[int]) -> str:
    return ",".join(str(figure) for figure in figures)


def _strategy(devices: int, shape: Sequence[int], default: DataType, field: str) -> HetuStrategy:
    """``shape``: group size, whether it uses Ulysses, whether states are ZeRO-3, whether it is recomputed."""
    size, ulysses, zero3, checkpoint = shape
    if size < 1 or devices % size:
        raise InputError(field, size, f"It must divide the {devices} GPUs of a stage.")
    kind = DataType.ZERO3 if zero3 else default
    groups = (1, size) if ulysses else (size, 1)
    return HetuStrategy(*groups, devices // size, kind, bool(checkpoint))


def _default(data: Mapping[str, Any], field: str) -> DataType:
    word = data.get("default_dp_type", "ddp")
    if word not in ("ddp", "zero2"):
        raise InputError(f"{field}, default_dp_type", word, "It is ddp or zero2.")
    return DataType(word)


def _schedule(data: Mapping[str, Any], field: str) -> str:
    word = data.get("pipeline_type", "pipedream_flush")
    if word not in ("gpipe", "pipedream_flush"):
        raise InputError(f"{field}, pipeline_type", word, "It is gpipe or pipedream_flush.")
    return str(word)


def _integer(data: Mapping[str, Any], key: str, field: str, default: int | None = None, least: int = 1) -> int:
    value = data.get(key, default)
    if type(value) is not int or value < least:
        raise InputError(f"{field}, {key}", value, f"It must be a whole number, at least {least}.")
    return value


def _list(data: Mapping[str, Any], key: str, field: str, count: int = 0, default: int = 0) -> list[int]:
    """Whole numbers joined by commas; without the key ``count`` times the default."""
    if key not in data and count:
        return [default] * count
    try:
        figures = [int(part) for part in str(data[key]).split(",")]
    except (KeyError, ValueError):
        raise InputError(f"{field}, {key}", data.get(key), "It must be whole numbers joined by commas.") from None
    if count and len(figures) != count:
        raise InputError(f"{field}, {key}", len(figures), f"It must have {count} numbers.")
    return figures


UNNAMED = "hetu"
"""Model name of plans that are read without a profile, as its files do not name the model."""
SCHEDULES = {"gpipe": Schedule.GPIPE, "pipedream_flush": Schedule.ONE_F_ONE_B}


def to_plan(
    plan: HetuPlan,
    profile: Profile | None = None,
    *,
    async_reduce: bool = True,
    engine: Engine = Engine.MAIN,
) -> Plan:
    """Convert their plan to ours.

    Args:
        plan: theirs.
        profile: of the model, for its name and the names of its layers. Without one sequence parallelism is assumed.
        async_reduce: whether gradients are reduced only after the last micro-batch (its ``async_grad_reduce``); if not,
            ``zero2`` is our stage 2.
        engine: v2.4.0 shards the states of embedding and head over a Ulysses group of one replica, too.

    Raises:
        InputError: the profile's model has another number of layers.
    """
    layers = _layers(plan, profile)
    shared = profile is None or all(point.sequence_parallel for point in profile.layers if point.tensor > 1)
    stage = 1 if async_reduce and (plan.chunks > 1 or (profile is not None and profile.accumulates)) else 2
    edges = our_strategy(plan.edges, shared, stage, alone=engine is Engine.V240)
    strategies = [edges, *(our_strategy(layer, shared, stage) for layer in plan.layers), edges]
    ends = list(accumulate(plan.division))
    ends[-1] += 1
    stages = tuple(
        Stage(tuple(layer_runs(layers[start:end], strategies[start:end])))
        for start, end in zip([0, *(end + 1 for end in ends[:-1])], [end + 1 for end in ends], strict=True)
    )
    graph = profile.graph if profile else None
    return check_plan(
        Plan(
            PLAN_VERSION, graph.name if graph else UNNAMED, plan.devices, plan.batch, plan.chunks,
            SCHEDULES[plan.schedule], graph.precision if graph else "bf16", stages,
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


def our_strategy(layer: HetuStrategy, sequence_parallel: bool, zero2: int = 1, *, alone: bool = False) -> Strategy:
    """Convert the strategy of a layer.

    Args:
        layer: their strategy.
        sequence_parallel: whether tensor groups share the tokens.
        zero2: our ZeRO stage of their ``zero2``.
        alone: shard states over a Ulysses group of one replica, too.
    """
    replicated = layer.kind is DataType.DDP or (layer.shards if alone else layer.data) == 1
    stage = 3 if layer.kind is DataType.ZERO3 else zero2
    return Strategy(
        data=layer.data if replicated else 1,
        zero=1 if replicated else layer.data,
        zero_stage=0 if replicated else stage,
        tensor=layer.tensor,
        sequence_parallel=sequence_parallel and layer.tensor > 1,
        recompute=Recompute.FULL if layer.checkpoint else Recompute.NONE,
        context=layer.ulysses,
        ulysses=layer.ulysses > 1,
    )


def from_plan(plan: Plan) -> HetuPlan:
    """Convert our plan to theirs.

    Raises:
        InputError: their files cannot express it.
    """
    schedule = next((name for name, schedule in SCHEDULES.items() if schedule is plan.schedule), None)
    if schedule is None or plan.virtual_stages > 1:
        raise InputError("schedule", plan.schedule.value, f"Hetu-Galvatron runs {', '.join(SCHEDULES)}.")
    named = [
        (run.first if run.count == 1 else f"{run.first}..{run.last}", run.strategy)
        for stage in plan.stages
        for run in stage.runs
        for _ in range(run.count)
    ]
    first, *blocks, last = [(name, _hetu_strategy(name, strategy)) for name, strategy in named]
    if first[1] != last[1]:
        raise InputError(f"strategy of {last[0]}", str(named[-1][1]), f"It must be that of {first[0]}: {named[0][1]}.")
    counts = [sum(run.count for run in stage.runs) for stage in plan.stages]
    counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
    if len(counts) == 1:
        counts = [len(blocks)]
    strategies, edge = [strategy for _, strategy in blocks], first[1]
    replicated = any(layer.kind is DataType.DDP and layer.data > 1 for layer in (*strategies, edge))
    return HetuPlan(
        plan.devices, plan.pipeline, plan.global_batch, plan.microbatches, tuple(counts), tuple(strategies), edge,
        schedule, DataType.DDP if replicated else DataType.ZERO2,
    )  # fmt: skip


def _hetu_strategy(name: str, strategy: Strategy) -> HetuStrategy:
    unsupported = {
        "replicas of shards": strategy.data > 1 and strategy.zero > 1,
        "context parallelism by rings": strategy.context > 1 and not strategy.ulysses,
        "Ulysses and tensor parallelism in one layer": strategy.context > 1 and strategy.tensor > 1,
        "experts": strategy.expert > 1,
        "offload": strategy.offload is not Offload.NONE,
        "selective recomputation": strategy.recompute is Recompute.SELECTIVE,
    }
    reason = next((text for text, is_used in unsupported.items() if is_used), "")
    if reason:
        raise InputError(f"strategy of {name}", str(strategy), f"Hetu-Galvatron's files cannot say it: {reason}.")
    kind = {0: DataType.DDP, 1: DataType.ZERO2, 2: DataType.ZERO2, 3: DataType.ZERO3}[strategy.zero_stage]
    checkpoint = strategy.recompute is Recompute.FULL
    return HetuStrategy(strategy.tensor, strategy.context, strategy.batch_degree, kind, checkpoint)


def exported(plan: Plan) -> dict[str, Any]:
    """Convert our plan to their JSON object.

    Raises:
        InputError: their files cannot express it; names options of ``galvatron plan`` for a plan that they can.
    """
    try:
        return write_hetu_plan(from_plan(plan))
    except InputError as error:
        remedy = f"{error.remedy} A plan that they can say comes of: galvatron plan ... {' '.join(options(plan))}"
        raise InputError(error.field, error.value, remedy) from error


def options(plan: Plan) -> list[str]:
    """Options of ``galvatron plan`` for a plan of the same model that their files can express.

    Without replicas all layers are ZeRO-2, ZeRO-3 or not split by samples, which their files distinguish. Embedding and
    head, which have one strategy in their files, are ZeRO-3.
    """
    ends = plan.stages[0].runs[0].first, plan.stages[-1].runs[-1].last
    pins = [f"--fix {name}.{pin}" for name in ends for pin in ("zero=3", "tp=1")]
    selective = any(run.strategy.recompute is Recompute.SELECTIVE for stage in plan.stages for run in stage.runs)
    schedule = [] if plan.schedule in SCHEDULES.values() else ["--schedule 1f1b"]
    return [*schedule, "--forbid data", *pins, *["--fix recompute=full"] * selective]
