"""Settings of DeepSpeed and of Hugging Face accelerate.

DeepSpeed: its JSON configuration, for its own scripts and for the engine of ``backend="deepspeed"``. Names and meanings
are those of https://www.deepspeed.ai/docs/config-json/; other settings keep DeepSpeed's defaults.

accelerate: the YAML file of ``accelerate launch --config_file``. ZeRO-2 and ZeRO-3 become FSDP2, with which
``auto_parallelize`` trains too. ZeRO-1 and optimizer states in host memory become the DeepSpeed plugin, and plans
without ZeRO DistributedDataParallel. Samples and gradient accumulation are set in the training script; the file has
them as comments ``# in the script: NAME=VALUE``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.export.fields import Field, Tool, dump_json, dump_yaml, fixed, parse_yaml, same, write
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
    """DeepSpeed's configuration for one strategy of all layers, by dotted keys. It sets no recomputation.

    Args:
        plan: for its batch, micro-batches and precision.
        strategy: of all layers.
        precision: of compute; by default the plan's.
        max_grad_norm: norm to which gradients are clipped; None or 0: no clipping.
        pinned: lock host memory, for faster copies to a GPU.

    Raises:
        InputError: a precision that DeepSpeed does not train in.
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
    """DeepSpeed's ZeRO stage of a strategy: at least 1 with states in host memory, which ZeRO keeps there."""
    stage = strategy.zero_stage if strategy.zero > 1 else 0
    return max(stage, 1) if strategy.offloads_states else stage


def host_device(settings: Settings) -> str | None:
    """Where DeepSpeed keeps optimizer states; None: on the GPU."""
    return "cpu" if settings.strategy.offloads_states else None


def read_host_device(value: Any) -> dict[str, Any]:
    """Read the device of optimizer states."""
    if value not in ("cpu", "none", None):
        raise ValueError("Give cpu or none: NVMe is not priced.")
    return {"offload": Offload.STATES if value == "cpu" else Offload.NONE}


def _checkpoints(settings: Settings) -> int | None:
    return (settings.recomputed or settings.blocks) if settings.strategy.recompute is Recompute.FULL else None


def _enabled(name: str) -> Field:
    return Field(
        f"{name}.enabled",
        lambda chosen: chosen.precision == name,
        lambda value: {"precision": name} if value in (True, "true") else {},
    )


def _settings(stated: dict[str, Any], world: World) -> Settings:
    checkpoints = stated.get("checkpoints", 0)
    if checkpoints >= world.blocks:
        stated["recompute"] = Recompute.FULL
    elif checkpoints:
        stated |= {"recompute": Recompute.FULL, "recomputed": checkpoints}
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
        # The only setting of recomputation: the number of checkpoints that the model makes.
        Field(
            "activation_checkpointing.number_checkpoints", _checkpoints, lambda value: {"checkpoints": int(value or 0)}
        ),
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


_SCRIPT = "in the script: "
_FSDP1 = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0}


def _kind(settings: Settings) -> str:
    """accelerate's distributed type."""
    main = settings.strategy
    if settings.devices == 1 and not main.offloads_states:
        return "NO"
    shared = main.tensor * main.context > 1
    if (settings.deepspeed or main.zero_stage == 1 or main.offloads_states) and not shared:
        return "DEEPSPEED"
    return "FSDP" if main.zero_stage or shared else "MULTI_GPU"


def _field_of(kind: str, key: str, value: Any, read: Any = lambda _: {}) -> Field:
    """A field of one distributed type; ``value``: fixed, or a function of the settings."""

    def write(settings: Settings) -> Any:
        if _kind(settings) != kind:
            return None
        return value(settings) if callable(value) else value

    return Field(key, write, read)


def _fsdp(key: str, value: Any, read: Any = lambda _: {}) -> Field:
    return _field_of("FSDP", f"fsdp_config.fsdp_{key}", value, read)


def _engine(key: str, value: Any, read: Any = lambda _: {}) -> Field:
    return _field_of("DEEPSPEED", f"deepspeed_config.{key}", value, read)


def _degree(name: str, choice: str) -> Field:
    """A degree of FSDP's device mesh; not written if all devices shard the states."""

    def value(settings: Settings) -> int | None:
        main = settings.strategy
        meshed = main.data * main.tensor * main.context > 1
        return getattr(main, choice) if meshed else None

    return _field_of("FSDP", f"parallelism_config.parallelism_config_{name}_size", value, same("", choice).read)


def _kind_of(value: Any) -> dict[str, Any]:
    if value not in ("FSDP", "DEEPSPEED", "MULTI_GPU", "NO"):
        raise ValueError("FSDP, DEEPSPEED, MULTI_GPU and NO are priced; --for megatron reads Megatron-LM's flags.")
    return {"kind": value}


def _recomputes_all(settings: Settings) -> bool:
    return settings.strategy.recompute is Recompute.FULL


def _recompute(value: Any) -> dict[str, Any]:
    return {"recompute": Recompute.FULL if value in (True, "true") else Recompute.NONE}


def _sharding(value: Any) -> dict[str, Any]:
    if str(value) not in _FSDP1:
        raise ValueError(
            "Give FULL_SHARD, SHARD_GRAD_OP or NO_SHARD; replicas of shards as parallelism_config of FSDP2."
        )
    return {"zero_stage": _FSDP1[str(value)]}


def _script_lines(settings: Settings) -> Iterator[str]:
    """Settings of the training script, in its words."""
    yield f"batch_size={settings.samples} (DataLoader)"
    if settings.microbatches > 1 and _kind(settings) != "DEEPSPEED":
        yield f"gradient_accumulation_steps={settings.microbatches} (Accelerator)"
    if _recomputes_all(settings) and _kind(settings) != "FSDP":
        yield "gradient_checkpointing=True (model.gradient_checkpointing_enable())"


def _accelerate_settings(stated: dict[str, Any], world: World) -> Settings:
    kind = stated.get("kind", "NO")
    if kind == "NO" and world.devices > 1 and stated.get("devices", 1) > 1:
        raise InputError(
            f"{world.file}, distributed_type", kind, "Several processes need MULTI_GPU, FSDP or DEEPSPEED."
        )
    usual = {"FSDP": 3, "DEEPSPEED": 2}.get(kind, 0)
    stated = {"zero_stage": usual, "microbatches": 1, "deepspeed": kind == "DEEPSPEED", **stated}
    stated["zero_stage"] = stated["zero_stage"] if kind in ("FSDP", "DEEPSPEED") else 0
    if kind == "FSDP" and stated.get("zero") == 1 == stated.get("context", 1):
        stated.pop("data", None)
        stated["zero_stage"] = 0
    if stated.get("zero") == 1 and stated["zero_stage"] == 0:
        stated.pop("zero")
    return filled(stated, world)


def _parse(text: str, file: str) -> dict[str, Any]:
    values = parse_yaml(text, file)
    for name, value in re.findall(rf"^# {_SCRIPT}(\w+) ?= ?(\w+)", text, re.MULTILINE):
        values[f"script.{name}"] = value
    return values


_ACCELERATE = (
    fixed("compute_environment", "LOCAL_MACHINE"),
    fixed("debug", False),
    Field("distributed_type", _kind, _kind_of),
    fixed("machine_rank", 0),
    fixed("main_training_function", "main"),
    same("mixed_precision", "precision", {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}),
    fixed("num_machines", 1),
    same("num_processes", "devices"),
    fixed("use_cpu", False),
    _engine("gradient_accumulation_steps", lambda chosen: chosen.microbatches, same("", "microbatches").read),
    _engine("offload_optimizer_device", lambda chosen: host_device(chosen) or "none", read_host_device),
    _engine("offload_param_device", "none"),
    _engine("zero3_init_flag", lambda chosen: zero_stage(chosen.strategy) == 3),
    _engine("zero_stage", lambda chosen: zero_stage(chosen.strategy), same("", "zero_stage").read),
    _fsdp("activation_checkpointing", _recomputes_all, _recompute),
    _fsdp("auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    _fsdp("offload_params", False),
    _fsdp("sharding_strategy", None, _sharding),
    _fsdp(
        "reshard_after_forward",
        lambda chosen: chosen.strategy.zero_stage == 3,
        lambda value: (
            {"zero_stage": 3 if value in (True, "true") else 2} if value in (True, False) else _sharding(value)
        ),
    ),
    _fsdp("state_dict_type", "SHARDED_STATE_DICT"),
    _fsdp("version", 2),
    _degree("cp", "context"),
    _degree("dp_replicate", "data"),
    _degree("dp_shard", "zero"),
    _degree("tp", "tensor"),
    Field("script.batch_size", lambda _: None, same("", "samples").read),
    Field("script.gradient_accumulation_steps", lambda _: None, same("", "microbatches").read),
    Field("script.gradient_checkpointing", lambda _: None, lambda value: _recompute(str(value).lower())),
)
ACCELERATE = Tool(
    name="accelerate",
    software="accelerate 1.15",
    fields=_ACCELERATE,
    parse=_parse,
    dump=lambda values: dump_yaml(dict(sorted(values.items()))),
    settings=_accelerate_settings,
    refused={
        "fsdp_config.fsdp_offload_params": "give false.",
        "deepspeed_config.deepspeed_config_file": "give that file, --for deepspeed.",
        "deepspeed_config.offload_param_device": "give none.",
        "fp8_config": "plan in bf16.",
    },
    hints={
        "zero_stage": "beside tensor or context parallelism FSDP shares gradients and parameters too",
        "offload": "FSDP takes parameters there too",
        "sequence_parallel": "the model's own tensor-parallel plan decides it",
        "ulysses": "context parallelism is a ring here",
    },
    by_hand=lambda chosen: (f"{_SCRIPT}{line}" for line in _script_lines(chosen)),
)
