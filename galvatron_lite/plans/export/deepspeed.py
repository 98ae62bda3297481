"""For DeepSpeed: its JSON configuration, for its own scripts and for the engine of ``backend="deepspeed"``.

Names and meanings are those of https://www.deepspeed.ai/docs/config-json/; what is not named keeps DeepSpeed's default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.export.fields import Field, Tool, dump_json, fixed, parse_yaml, same, write
from galvatron_lite.plans.export.settings import Settings, World, filled, settings_of
from galvatron_lite.plans.schema import Plan


def config_of(
    plan: Plan,
    strategy: Strategy,
    *,
    precision: str | None = None,
    max_grad_norm: float | None = None,
    pinned: bool = True,
) -> dict[str, Any]:
    """The configuration that does to all layers what a strategy says, by dotted keys; the model recomputes by itself.

    Args:
        plan: its batch, micro-batches and precision.
        strategy: of all layers.
        precision: in place of the plan's.
        max_grad_norm: of clipping; DeepSpeed clips to norm 1 where nothing is said.
        pinned: whether host memory is locked, for faster copies; of no use without a GPU.
    """
    compute = plan.precision if precision is None else precision
    if compute not in ("fp32", "bf16", "fp16"):
        raise InputError("precision", compute, "DeepSpeed trains in fp32, bf16 or fp16.")
    samples = plan.microbatch // strategy.batch_degree
    once = replace(strategy, recompute=Recompute.NONE)
    values = write(
        DEEPSPEED, replace(settings_of(plan), precision=compute, samples=samples, strategy=once), priced=False
    )
    values["gradient_clipping"] = max_grad_norm or 0.0
    if strategy.offloads_states:
        values["zero_optimization.offload_optimizer.pin_memory"] = pinned
    return values


def zero_stage(strategy: Strategy) -> int:
    """DeepSpeed's stage of a strategy. States in host memory belong to ZeRO there, so one device has stage 1 with them;
    a stage over no ranks is none."""
    stage = strategy.zero_stage if strategy.zero > 1 else 0
    return max(stage, 1) if strategy.offloads_states else stage


def host_device(settings: Settings) -> str | None:
    """Where optimizer states are kept, if not on the device."""
    return "cpu" if settings.strategy.offloads_states else None


def read_host_device(value: Any) -> dict[str, Any]:
    """The opposite of ``host_device``."""
    if value not in ("cpu", "none", None):
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
        Field("zero_optimization.stage", lambda chosen: zero_stage(chosen.strategy), same("", "zero_stage").read),
        Field("zero_optimization.offload_optimizer.device", host_device, read_host_device),
        fixed("zero_optimization.offload_optimizer.pin_memory", lambda chosen: chosen.strategy.offloads_states or None),
        _enabled("bf16"),
        _enabled("fp16"),
        fixed("gradient_clipping", 0.0),
        same("tensor_parallel.autotp_size", "tensor", plain=1),
        # The file's one word on recomputation: how many checkpoints the model makes.
        Field("activation_checkpointing.number_checkpoints", _again, lambda value: {"again": int(value or 0)}),
        fixed("zero_allow_untested_optimizer", True),
        fixed("zero_force_ds_cpu_optimizer", lambda chosen: False if chosen.strategy.offloads_states else None),
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
