"""What a plan costs by Hetu-Galvatron's own formulas: a plan, then a layer.

Iteration time (``pipeline_costmodel``): with c_i the milliseconds of one micro-batch of stage i without the sum of
gradients, embedding and head included, r_i the layers' with it, p stages and m micro-batches,

    A = sum c + (m - 1) c_last
    B = max(min(p - 1, m - 1) c_0, sum of c_1..) + max(0, m + 1 - p) c_0
    T = max(A, B) + max(0, max_i (r_i - sum of c_0..c_i))

Stages in the middle count in sum c alone, so it means something for even splits only. The optimizer's time and what
moves between unlike layers are not in it.

A layer (``TimeCostModelBase`` and ``MemoryCostModelBase``):

Units are its own: MB (2^20 bytes) and milliseconds. Symbols: b samples of one micro-batch on a device's group, s the
ranks that share a sample, n the ranks that share states, P the fp32 MB of parameters, F and B forward and backward, o
the mutual slow-down, D ms a MB.

    F = line(b / s),  B = 2 F (3 F checkpointed),  M = 2 (n - 1) / n * P / tensor (half of it in half precision)
    T = F + o * min(B, M D) + what is left of the longer + tensor or Ulysses + M D / 2 (ZeRO-3) + sends

A stage's sends, forth and back, are shared out over its layers. Different in v2.4.0: 4 collectives of tensor
parallelism instead of 6; half of backward hides gradients where tensor groups hold half of the stage; Ulysses'
gradients are summed over the replicas alone; samples are not rounded down.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from galvatron_lite.errors import InputError
from galvatron_lite.peers.hetu.model import BIAS, CONTEXT_MB, EdgeMemory, Engine, HetuHardware, HetuModel, LayerType
from galvatron_lite.peers.hetu.plan import DataType, HetuPlan, HetuStrategy

if TYPE_CHECKING:
    from collections.abc import Sequence


RESERVE_ABOVE_MB, RESERVE = 20 * 1024, 0.2
"""Budgets above keep a share back for PyTorch's allocator."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What its command line says once for a search."""

    engine: Engine = Engine.MAIN  # whose formulas
    async_reduce: bool = True  # whether gradients are summed behind the last micro-batch only
    tables: bool = True  # whether collectives of tensor groups come from the latency tables (``--sp_space tp+sp``)
    least_tensor: int = 1  # v2.4.0's ``min_tp`` of the search that found a plan


@dataclass(frozen=True, slots=True)
class HetuCost:
    """A plan priced by its formulas."""

    seconds: float  # of one step
    memory: tuple[int, ...]  # MB of each stage, as it compares them with its budget


def usable_mb(budget_gb: float) -> int:
    """MB of a budget in GB that its search fills: all of it up to 20 GB, four fifths above."""
    whole = int(budget_gb * 1024)
    return whole - int(whole * RESERVE) if whole // 1024 > RESERVE_ABOVE_MB // 1024 else whole


def price(model: HetuModel, hardware: HetuHardware, plan: HetuPlan, rules: Rules | None = None) -> HetuCost:
    """Step time and memory of a plan by its formulas.

    Raises:
        InputError: the plan is not the model's, or needs a figure that was not profiled.
    """
    known = rules or Rules()
    _check(model, hardware, plan)
    try:
        return HetuCost(step_ms(model, hardware, plan, known) / 1000, memory_mb(model, plan, known))
    except KeyError as missing:
        raise InputError("plan", missing.args[0], "Nothing was profiled for groups of so many ranks.") from None


def _check(model: HetuModel, hardware: HetuHardware, plan: HetuPlan) -> None:
    if len(plan.layers) != model.layers:
        raise InputError("tp_sizes_enc", len(plan.layers), f"The model {model.name} has {model.layers} layers.")
    if plan.devices != hardware.devices:
        raise InputError("world_size", plan.devices, f"The hardware profile is of {hardware.devices} GPUs.")


def step_ms(model: HetuModel, hardware: HetuHardware, plan: HetuPlan, rules: Rules) -> float:
    """Milliseconds of one step; see the module."""
    alike = _alike(model, plan)
    known = {place: layer_ms(model, hardware, plan, place, rules.engine, rules.tables) for place in set(alike)}
    pairs = [known[place] for place in alike]
    edges = edges_ms(model, hardware, plan, rules)
    summed, plain, start = [], [], 0
    for stage, count in enumerate(plan.division):
        own = pairs[start : start + count]
        summed.append(sum(pair[0] for pair in own))
        plain.append(sum(pair[1] for pair in own) + edges[stage])
        start += count
    return iteration(summed, plain, plan.chunks)


def _alike(model: HetuModel, plan: HetuPlan) -> list[int]:
    """For each layer, the first one of its type with its strategy."""
    types = [number for number, kind in enumerate(model.types) for _ in range(kind.layers)]
    first: dict[tuple[int, HetuStrategy], int] = {}
    return [first.setdefault(key, place) for place, key in enumerate(zip(types, plan.layers, strict=True))]


def iteration(summed: Sequence[float], plain: Sequence[float], chunks: int) -> float:
    """``pipeline_costmodel``: the time of all micro-batches from r and c of each stage."""
    stages = len(plain)
    forth = sum(plain) + plain[-1] * (chunks - 1)
    ahead = max(min(stages - 1, chunks - 1) * plain[0], sum(plain[1:])) + plain[0] * max(0, chunks + 1 - stages)
    late = max(gradient - sum(plain[: stage + 1]) for stage, gradient in enumerate(summed))
    return max(forth, ahead) + max(late, 0.0)


def edges_ms(model: HetuModel, hardware: HetuHardware, plan: HetuPlan, rules: Rules) -> list[float]:
    """Milliseconds of embedding and head in each stage, one micro-batch, gradients not summed.

    Under ZeRO-3 parameters are gathered twice; that slows compute but is not slowed by it.
    """
    edge, result = plan.edges, [0.0] * plan.pipeline
    ranks = edge.shards
    rate = hardware.ms_per_mb(ranks, apart=edge.tensor > 1) * (ranks - 1) / ranks
    sharded = edge.kind is DataType.ZERO3 and (edge.data > 1 or rules.engine is Engine.V240)
    held = plan.batch / plan.chunks / (edge.data * edge.sharing)
    size = _edge_samples(plan, rules)
    forward = model.edges.at(size / edge.sharing if rules.engine is Engine.MAIN else held) / min(plan.pipeline, 2)
    messages = _edge_messages(model, hardware, plan, rules)
    half = 0.5 if model.mixed and rules.engine is Engine.MAIN else 1.0
    for place, stage in enumerate(sorted({0, plan.pipeline - 1})):
        states = _edge_memory(model, plan, stage, rules).states[edge.tensor]
        gathered = states / 4 * half * rate * (0.5 if sharded else 0.0)
        both = _hidden(gathered, forward, hardware.overlap) + _hidden(gathered, 2 * forward, hardware.overlap)
        result[stage] = both + (sum(messages) if plan.pipeline == 1 else messages[place])
    return result


def _hidden(traffic: float, compute: float, slow: float) -> float:
    """Only compute is slowed: it takes ``slow`` times as long beside the traffic."""
    return traffic + max(compute - traffic / slow, 0.0)


def _edge_memory(model: HetuModel, plan: HetuPlan, stage: int, rules: Rules) -> EdgeMemory:
    if plan.pipeline == 1:
        return model.together
    if rules.engine is Engine.V240:  # it reads the first stage's for both, under Ulysses the last one's
        return model.last if plan.edges.ulysses > 1 else model.first
    return model.first if stage == 0 else model.last


def _edge_samples(plan: HetuPlan, rules: Rules) -> float:
    """Samples of one micro-batch over the ranks that share embedding and head; v2.4.0: over ``min_tp`` ranks."""
    if rules.engine is Engine.MAIN:
        return plan.batch // plan.chunks // plan.edges.data
    return plan.batch / plan.chunks / (plan.devices / plan.pipeline / rules.least_tensor)


def _edge_messages(model: HetuModel, hardware: HetuHardware, plan: HetuPlan, rules: Rules) -> tuple[float, float]:
    """Milliseconds of the collectives of a vocabulary that is split, at the model's two ends."""
    ranks = plan.edges.tensor
    if ranks == 1:
        return 0.0, 0.0
    unit = _edge_samples(plan, rules) * (2 if model.mixed else 4) / 2**20
    sizes = [unit * kind.sequence * model.types[0].hidden for kind in model.types]
    if rules.engine is Engine.MAIN:
        times = [hardware.gather[ranks].at(size) for size in sizes]
        return times[0], times[-1]
    if rules.tables:
        times = [hardware.gather[ranks].line.at(size) for size in sizes]
    else:
        rate = hardware.ms_per_mb(ranks, apart=plan.edges.data > 1)
        times = [(ranks - 1) / ranks * size * rate for size in sizes]
    return (sum(times), times[-1]) if plan.pipeline == 1 else (times[0], times[-1])


def memory_mb(model: HetuModel, plan: HetuPlan, rules: Rules) -> tuple[int, ...]:
    """MB of each stage as its search adds them up: layers rounded up one by one, embedding and head, buffer."""
    start, result = 0, []
    buffer, alike = int(buffer_mb(model, plan)), _alike(model, plan)
    for stage, count in enumerate(plan.division):
        places = Counter(alike[start : start + count])
        layers = sum(
            ceil(layer_mb(model, plan, place, stage, rules.engine, rules.async_reduce)) * many
            for place, many in places.items()
        )
        result.append(layers + ceil(edges_mb(model, plan, stage, rules)) + buffer)
        start += count
    return tuple(result)


def edges_mb(model: HetuModel, plan: HetuPlan, stage: int, rules: Rules) -> float:
    """MB of embedding, head and context in a stage."""
    if stage not in (0, plan.pipeline - 1):
        return CONTEXT_MB
    memory = model.together if plan.pipeline == 1 else model.first if stage == 0 else model.last
    edge = plan.edges
    held = samples(plan, edge, rules.engine) * in_flight(plan, stage)
    ratio = states_ratio(model, plan, edge, rules.engine, rules.async_reduce, edges=True)
    return memory.states[edge.tensor] * ratio + memory.activation[edge.sharing] * held + CONTEXT_MB


def buffer_mb(model: HetuModel, plan: HetuPlan, degree: int = 0) -> float:
    """MB of the buffer that tensor groups gather tokens in; ``degree``: the largest group the search allowed.

    None for plans with Ulysses and without tensor groups, which its search of Ulysses alone finds.
    """
    own = (*plan.layers, plan.edges)
    most = degree or max(layer.sharing for layer in own)
    alone = not degree and most > 1 and all(layer.tensor == 1 for layer in own)
    if not model.sequence_parallel or alone:
        return 0.0
    size = plan.batch / plan.chunks / (plan.devices // plan.pipeline // most)
    longest = max(kind.sequence for kind in model.types)
    return size * model.types[0].hidden * longest * (2 if model.mixed else 4) / 2**20


def samples(plan: HetuPlan, strategy: HetuStrategy, engine: Engine) -> float:
    """Samples of one micro-batch that a device, or the group that shares them, works on."""
    if engine is Engine.MAIN:
        return plan.batch // plan.chunks // strategy.data
    return plan.batch / plan.chunks / strategy.data


def layer_ms(
    model: HetuModel, hardware: HetuHardware, plan: HetuPlan, place: int, engine: Engine, table_volume: bool = True
) -> tuple[float, float]:
    """Milliseconds of one micro-batch of a layer: with the sum of its gradients, and without."""
    kind, strategy = model.type_of(place), plan.layers[place]
    size = samples(plan, strategy, engine)
    forward = kind.forward.at(size / strategy.sharing)
    backward = forward * (3 if strategy.checkpoint else 2)
    volume, rate = _gradients(model, hardware, kind, strategy, engine)
    shared = _sharing_ms(model, hardware, kind, strategy, size, engine, table_volume)
    rest = shared + (0.5 * volume * rate if strategy.kind is DataType.ZERO3 and strategy.data > 1 else 0.0)
    rest += _send_ms(model, hardware, plan, kind, size)
    early = backward / 2 if engine is Engine.V240 and strategy.sharing > 1 and strategy.data == 2 else 0.0
    alone = strategy.data == 1
    summed = backward if alone else early + overlapped(backward - early, volume * rate, hardware.overlap)
    return forward + summed + rest, forward + backward + rest


def overlapped(compute: float, traffic: float, slow: float) -> float:
    """Time until both are done, each ``slow`` times slower while both run."""
    if traffic >= compute:
        return compute * slow + traffic - compute
    return traffic * slow + compute - traffic


def _gradients(
    model: HetuModel, hardware: HetuHardware, kind: LayerType, strategy: HetuStrategy, engine: Engine
) -> tuple[float, float]:
    """MB of the gradients' all-reduce, and milliseconds a MB."""
    ranks = strategy.shards if engine is Engine.MAIN else strategy.data
    half = 0.5 if model.mixed else 1.0
    volume = 2 * (ranks - 1) / ranks * kind.parameters / strategy.tensor * half
    return volume, hardware.ms_per_mb(strategy.shards, apart=strategy.tensor > 1)


def _sharing_ms(
    model: HetuModel,
    hardware: HetuHardware,
    kind: LayerType,
    strategy: HetuStrategy,
    size: float,
    engine: Engine,
    table_volume: bool,
) -> float:
    """What ranks that share samples exchange in one micro-batch."""
    ranks = strategy.sharing
    if ranks == 1:
        return 0.0
    message = size * kind.sequence * kind.hidden * (2 if model.mixed else 4) / 2**20
    calls = (6 if engine is Engine.MAIN and strategy.tensor > 1 else 4) * (1.5 if strategy.checkpoint else 1.0)
    if not table_volume:
        rate = hardware.ms_per_mb(ranks, apart=False)
        return 2 * (ranks - 1) / ranks * message * calls * rate
    tables = hardware.gather if strategy.tensor > 1 else hardware.exchange
    return calls * tables[ranks].at(message)


def _send_ms(model: HetuModel, hardware: HetuHardware, plan: HetuPlan, kind: LayerType, size: float) -> float:
    if plan.pipeline == 1:
        return 0.0
    message = plan.pipeline * 2 * size * kind.sequence * kind.hidden * (2 if model.mixed else 4) / 2**20
    return message / hardware.send[plan.pipeline] / kind.layers


def layer_mb(
    model: HetuModel, plan: HetuPlan, place: int, stage: int, engine: Engine, async_reduce: bool = True
) -> float:
    """MB that a layer of a stage holds: its states, and its activations of all micro-batches in flight."""
    kind, strategy = model.type_of(place), plan.layers[place]
    states = 4 * kind.parameters / strategy.tensor * states_ratio(model, plan, strategy, engine, async_reduce)
    held = samples(plan, strategy, engine) * in_flight(plan, stage)
    if not strategy.checkpoint:
        return states + kind.activation[strategy.sharing] * held
    split = strategy.ulysses > 1 if engine is Engine.MAIN else False
    shares = strategy.sharing if split or model.sequence_parallel else 1
    return states + kind.checkpoint * held / shares


def in_flight(plan: HetuPlan, stage: int) -> int:
    """Micro-batches whose activations a stage holds."""
    if plan.pipeline == 1:
        return 1
    return plan.chunks if plan.schedule == "gpipe" else min(plan.pipeline - stage, plan.chunks)


def states_ratio(
    model: HetuModel,
    plan: HetuPlan,
    strategy: HetuStrategy,
    engine: Engine,
    async_reduce: bool = True,
    *,
    edges: bool = False,
) -> float:
    """Share of the states that a device holds.

    With several micro-batches and gradients summed behind the last one, gradients stay whole, under ZeRO-2 the
    parameters too; with gradients summed after each, they are kept in fp32. It counts states whole where there is one
    replica, whatever the Ulysses group; v2.4.0 not those of embedding and head (``edges``).
    """
    ranks = strategy.shards
    alone = strategy.data == 1 and not (edges and engine is Engine.V240)
    if strategy.kind is DataType.DDP or alone:
        return 1.0
    share = 1 / ranks + BIAS
    unit = 1 / 8 if model.mixed else 1 / 4
    once = plan.chunks == 1
    if strategy.kind is DataType.ZERO3:
        if once:
            return share
        return (1 - unit) * share + unit if async_reduce else share * 5 / 4
    if once or not async_reduce:
        ratio = (1 - unit) * share + unit
        return ratio if once or not model.mixed else ratio * 5 / 4
    return (1 - 2 * unit) * share + 2 * unit
