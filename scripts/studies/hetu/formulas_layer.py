"""What a layer costs by Hetu-Galvatron's own formulas: ``TimeCostModelBase`` and ``MemoryCostModelBase``.

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

from galvatron_lite.peers.hetu.model import BIAS, Engine, HetuHardware, HetuModel, LayerType
from galvatron_lite.peers.hetu.plan import DataType, HetuPlan, HetuStrategy


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
