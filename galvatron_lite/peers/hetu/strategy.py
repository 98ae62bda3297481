"""Hetu-Galvatron's plan as its runtime reads it: JSON with comma-joined strings, one figure a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from galvatron_lite.errors import InputError


class DataType(StrEnum):
    """What data-parallel ranks do with states."""

    DDP = "ddp"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


@dataclass(frozen=True, slots=True)
class HetuStrategy:
    """What one layer does with the GPUs of its stage.

    Attributes:
        tensor: ranks of its tensor group; 1 where Ulysses is used.
        ulysses: ranks of its Ulysses group.
        data: replicas.
        kind: what those do with states.
        checkpoint: whether it is computed again in backward.
    """

    tensor: int
    ulysses: int
    data: int
    kind: DataType
    checkpoint: bool = False

    @property
    def sharing(self) -> int:
        """Ranks that share one sample."""
        return max(self.tensor, self.ulysses)

    @property
    def shards(self) -> int:
        """Ranks that share states under ZeRO, and sum gradients."""
        return self.data * self.ulysses


@dataclass(frozen=True, slots=True)
class HetuPlan:
    """A plan.

    Attributes:
        devices: GPUs.
        pipeline: stages.
        batch: samples a step.
        chunks: micro-batches.
        division: layers of each stage.
        layers: the strategy of each layer.
        edges: the strategy of embedding and head.
        schedule: ``gpipe`` or ``pipedream_flush`` (1F1B).
        default: what ``dp_types_enc`` 0 stands for.
    """

    devices: int
    pipeline: int
    batch: int
    chunks: int
    division: tuple[int, ...]
    layers: tuple[HetuStrategy, ...]
    edges: HetuStrategy
    schedule: str = "pipedream_flush"
    default: DataType = DataType.ZERO2


def read_hetu_plan(data: Mapping[str, Any], field: str, devices: int = 0, batch: int = 0) -> HetuPlan:
    """A plan from its JSON, of searched plans (figures of each layer) or of GLOBAL mode (one strategy by flags).

    Args:
        data: what the file holds.
        field: names the file in errors.
        devices: GPUs, for files without ``world_size`` (v2.4.0's).
        batch: samples a step, for files without ``global_bsz``.

    Raises:
        InputError: a key that is missing or cannot be used.
    """
    if "tp_sizes_enc" not in data:
        return _global_plan(data, field, devices, batch)
    stages = _whole(data, "pp_deg", field)
    tensor = _list(data, "tp_sizes_enc", field)
    count = len(tensor)
    world = _whole(data, "world_size", field, devices or stages * max(tensor))
    types, ulysses, checkpoint = (_list(data, key, field, count) for key in ("dp_types_enc", "use_sp", "checkpoint"))
    if any(size != 1 for size in _list(data, "cp_sizes_enc", field, count, 1)):
        raise InputError(f"{field}, cp_sizes_enc", data["cp_sizes_enc"], "Context parallelism is not modelled by it.")
    default = _default(data, field)
    layers = tuple(
        _strategy(world // stages, *figures, default, f"{field}, layer {place}")
        for place, figures in enumerate(zip(tensor, ulysses, types, checkpoint, strict=True))
    )
    size, shared, sharded = (
        _whole(data, key, field, other) for key, other in (("vtp", 1), ("vsp", 0), ("embed_sdp", 0))
    )
    sharded = _whole(data, "vocab_sdp", field, sharded)
    edges = _strategy(world // stages, size, shared, sharded, 0, default, f"{field}, vtp")
    division = tuple(_list(data, "pp_division", field, stages, count // stages))
    if sum(division) != count or len(division) != stages:
        raise InputError(f"{field}, pp_division", data.get("pp_division"), f"It must share {count} layers on {stages}.")
    return HetuPlan(
        world, stages, _whole(data, "global_bsz", field, batch or None), _whole(data, "chunks", field, 1), division,
        layers, edges, _schedule(data, field), default,
    )  # fmt: skip


def write_hetu_plan(plan: HetuPlan) -> dict[str, Any]:
    """The JSON object of a plan, as its search engine writes it.

    Raises:
        InputError: a layer whose data-parallel kind is neither ZeRO-3 nor the plan's default.
    """
    for place, layer in enumerate((*plan.layers, plan.edges)):
        if layer.data > 1 and layer.kind not in (plan.default, DataType.ZERO3):
            where = f"layer {place}" if place < len(plan.layers) else "embedding and head"
            raise InputError(where, layer.kind.value, f"Its files know {plan.default.value} or zero3 in one plan.")
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


def _joined(figures: Any) -> str:
    return ",".join(str(figure) for figure in figures)


def _global_plan(data: Mapping[str, Any], field: str, devices: int, batch: int) -> HetuPlan:
    """GLOBAL mode: one strategy for all layers, by its training flags."""
    world = _whole(data, "world_size", field, devices or None)
    stages, count = _whole(data, "pp_deg", field, 1), _whole(data, "num_layers", field)
    if _whole(data, "global_cp_deg", field, 1) != 1:
        raise InputError(f"{field}, global_cp_deg", data["global_cp_deg"], "Context parallelism is not modelled by it.")
    default = _default(data, field)
    size, shared, sharded, again = (
        _whole(data, key, field, other)
        for key, other in (("global_tp_deg", 1), ("use_ulysses", 0), ("sdp", 0), ("global_checkpoint", 0))
    )
    layer = _strategy(world // stages, size, shared, sharded, again, default, f"{field}, global_tp_deg")
    vocab, vocab_shared, vocab_sharded = (
        _whole(data, key, field, other) for key, other in (("vocab_tp", 1), ("vocab_sp", 0), ("vocab_sdp", 0))
    )
    edges = _strategy(world // stages, vocab, vocab_shared, vocab_sharded, 0, default, f"{field}, vocab_tp")
    each = count // stages
    division = (*(each for _ in range(stages - 1)), count - each * (stages - 1))
    return HetuPlan(
        world, stages, _whole(data, "global_train_batch_size", field, batch or None), _whole(data, "chunks", field, 1),
        division, (layer,) * count, edges, _schedule(data, field), default,
    )  # fmt: skip


def _strategy(
    devices: int, size: int, shared: int, sharded: int, again: int, default: DataType, field: str
) -> HetuStrategy:
    if size < 1 or devices % size:
        raise InputError(field, size, f"It must divide the {devices} GPUs of a stage.")
    kind = DataType.ZERO3 if sharded else default
    tensor, ulysses = (1, size) if shared else (size, 1)
    return HetuStrategy(tensor, ulysses, devices // size, kind, bool(again))


def _default(data: Mapping[str, Any], field: str) -> DataType:
    given = data.get("default_dp_type", "ddp")
    if given not in ("ddp", "zero2"):
        raise InputError(f"{field}, default_dp_type", given, "It is ddp or zero2.")
    return DataType(given)


def _schedule(data: Mapping[str, Any], field: str) -> str:
    given = data.get("pipeline_type", "pipedream_flush")
    if given not in ("gpipe", "pipedream_flush"):
        raise InputError(f"{field}, pipeline_type", given, "It is gpipe or pipedream_flush.")
    return str(given)


def _whole(data: Mapping[str, Any], key: str, field: str, other: int | None = None) -> int:
    given = data.get(key, other)
    if not isinstance(given, int) or given < 0:
        raise InputError(f"{field}, {key}", given, "It must be a whole number.")
    return int(given)


def _list(data: Mapping[str, Any], key: str, field: str, count: int = 0, other: int = 0) -> list[int]:
    """Comma-joined whole numbers; ``other`` so many times where there are none."""
    if key not in data and count:
        return [other] * count
    try:
        figures = [int(part) for part in str(data[key]).split(",")]
    except (KeyError, ValueError):
        raise InputError(f"{field}, {key}", data.get(key), "It must be whole numbers joined by commas.") from None
    if count and len(figures) != count:
        raise InputError(f"{field}, {key}", len(figures), f"It must have {count} numbers.")
    return figures
