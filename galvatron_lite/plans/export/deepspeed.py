"""DeepSpeed's JSON configuration, as typed values: its parser takes a misspelt key at the top level in silence.

Names and meanings are those of https://www.deepspeed.ai/docs/config-json/; what is not named keeps DeepSpeed's default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.export.fields import Field, Tool, dump_json, parse_yaml, same
from galvatron_lite.plans.export.settings import Settings, World, filled
from galvatron_lite.plans.schema import Plan


@dataclass(frozen=True, slots=True)
class OffloadTarget:
    """Where states are kept."""

    device: str = ""  # ``cpu``: host memory
    pin_memory: bool = False  # whether host memory is locked, for quicker copies; of no use without a GPU


@dataclass(frozen=True, slots=True)
class ZeroOptimization:
    """ZeRO."""

    stage: int  # 0 (plain data parallelism) to 3
    offload_optimizer: OffloadTarget | None = None  # where optimizer states are kept and updated; None: on the device


@dataclass(frozen=True, slots=True)
class Precision:
    """bf16 or fp16 (with dynamic loss scaling)."""

    enabled: bool


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """AutoTP: how many devices share the matmuls."""

    autotp_size: int


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig:
    """The whole file. Fields without a default are always written: where DeepSpeed has one, it is not always the plain
    choice (it clips gradients to norm 1 where nothing is said).
    """

    train_batch_size: int  # samples a step
    train_micro_batch_size_per_gpu: int  # of one micro-batch on one device
    gradient_accumulation_steps: int  # micro-batches
    zero_optimization: ZeroOptimization
    bf16: Precision  # compute in bf16, float32 master weights
    fp16: Precision  # compute in fp16, dynamic loss scaling
    gradient_clipping: float  # largest norm of the gradient; 0: not clipped
    tensor_parallel: TensorParallel | None = None  # AutoTP
    zero_allow_untested_optimizer: bool | None = None  # any torch optimizer is taken
    zero_force_ds_cpu_optimizer: bool | None = None  # whether states in host memory need DeepSpeed's own Adam


def config_of(
    plan: Plan,
    strategy: Strategy,
    *,
    precision: str | None = None,
    max_grad_norm: float | None = None,
    pinned: bool = True,
) -> DeepSpeedConfig:
    """The configuration that does to all layers what a strategy says."""
    compute = plan.precision if precision is None else precision
    if compute not in ("fp32", "bf16", "fp16"):
        raise InputError("precision", compute, "DeepSpeed trains in fp32, bf16 or fp16.")
    return DeepSpeedConfig(
        plan.global_batch,
        plan.microbatch // strategy.batch_degree,
        plan.microbatches,
        _zero(strategy, pinned),
        Precision(compute == "bf16"),
        Precision(compute == "fp16"),
        max_grad_norm or 0.0,
        TensorParallel(strategy.tensor) if strategy.tensor > 1 else None,
        zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=False if strategy.offloads_states else None,
    )


def zero_stage(strategy: Strategy) -> int:
    """DeepSpeed's stage of a strategy. States in host memory belong to ZeRO there, so one device has stage 1 with them;
    a stage over no ranks is none."""
    stage = strategy.zero_stage if strategy.zero > 1 else 0
    return max(stage, 1) if strategy.offloads_states else stage


def _zero(strategy: Strategy, pinned: bool) -> ZeroOptimization:
    stage = zero_stage(strategy)
    target = OffloadTarget("cpu", pinned) if strategy.offloads_states else None
    return ZeroOptimization(stage, target)


def _zero_of(settings: Settings) -> int:
    return zero_stage(settings.strategy)


def _moved(value: Any) -> dict[str, Any]:
    if value not in ("cpu", "none"):
        raise ValueError("Give cpu or none: NVMe is not priced.")
    return {"offload": Offload.STATES if value == "cpu" else Offload.NONE}


def _again(settings: Settings) -> int | None:
    return (settings.recomputed or settings.blocks) if settings.strategy.recompute is Recompute.FULL else None


def _enabled(name: str) -> Field:
    return Field(
        f"{name}.enabled",
        lambda chosen: chosen.precision == name,
        lambda value: {"precision": name} if value in (True, "true") else {},
    )


def _settings(stated: dict[str, Any], world: World) -> Settings:
    if stated.get("again", 0) >= world.blocks:
        stated["recompute"] = Recompute.FULL
    elif stated.get("again"):
        stated |= {"recompute": Recompute.FULL, "recomputed": stated["again"]}
    return filled({"precision": "fp32", **stated}, world)


def _by_hand(settings: Settings) -> Iterator[str]:
    if settings.strategy.recompute is not Recompute.NONE:
        yield "recompute in every block: model.gradient_checkpointing_enable(), or deepspeed.checkpointing.checkpoint"


DEEPSPEED = Tool(
    name="deepspeed",
    software="DeepSpeed 0.19",
    fields=(
        same("train_batch_size", "batch"),
        same("train_micro_batch_size_per_gpu", "samples"),
        same("gradient_accumulation_steps", "microbatches"),
        Field("zero_optimization.stage", _zero_of, same("", "zero_stage").read),
        Field(
            "zero_optimization.offload_optimizer.device",
            lambda chosen: "cpu" if chosen.strategy.offloads_states else None,
            _moved,
        ),
        Field(
            "zero_optimization.offload_optimizer.pin_memory",
            lambda chosen: chosen.strategy.offloads_states or None,
            lambda _: {},
        ),
        _enabled("bf16"),
        _enabled("fp16"),
        Field("gradient_clipping", lambda _: 0.0, lambda _: {}),
        same("tensor_parallel.autotp_size", "tensor", plain=1),
        # The file's one word on recomputation: how many checkpoints the model makes.
        Field("activation_checkpointing.number_checkpoints", _again, lambda value: {"again": int(value or 0)}),
        Field("zero_allow_untested_optimizer", lambda _: True, lambda _: {}),
        Field(
            "zero_force_ds_cpu_optimizer",
            lambda chosen: False if chosen.strategy.offloads_states else None,
            lambda _: {},
        ),
    ),
    parse=parse_yaml,
    dump=dump_json,
    settings=_settings,
    refused={
        "zero_optimization.offload_param.device": "give none.",
        "zero_optimization.zero_hpz_partition_size": "give 1.",
        "zero_optimization.mics_shard_size": "leave it out.",
        "zero_optimization.zero_quantized_weights": "give false.",
        "zero_optimization.zero_quantized_gradients": "give false.",
        "activation_checkpointing.cpu_checkpointing": "give false.",
        "sequence_parallel_size": "give 1.",
        "pipeline.stages": "leave it out.",
    },
    hints={"pipeline": "write the model as deepspeed.pipe.PipelineModule", "data": "all devices share the shards"},
    by_hand=_by_hand,
    comments=False,
)
"""The file for ``deepspeed.initialize(config=...)``."""
