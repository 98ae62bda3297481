"""For Hugging Face accelerate: the YAML file of ``accelerate launch --config_file``.

ZeRO-2 and ZeRO-3 are FSDP2, which is what ``auto_parallelize`` trains with; ZeRO-1 and optimizer states in host memory
are its DeepSpeed plugin; no ZeRO at all is DistributedDataParallel. Samples and accumulation are the training script's:
lines ``# in the script: NAME=VALUE`` of the file say them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.plans.export.deepspeed import host_device, read_host_device, zero_stage
from galvatron_lite.plans.export.fields import Field, Tool, dump_yaml, fixed, parse_yaml, same
from galvatron_lite.plans.export.settings import Settings, World, filled

_SCRIPT = "in the script: "
_FSDP1 = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0}


def _kind(settings: Settings) -> str:
    main = settings.strategy
    if settings.devices == 1 and not main.offloads_states:
        return "NO"
    shared = main.tensor * main.context > 1
    if (settings.deepspeed or main.zero_stage == 1 or main.offloads_states) and not shared:
        return "DEEPSPEED"
    return "FSDP" if main.zero_stage or shared else "MULTI_GPU"


def _of(kind: str, key: str, value: Any, read: Any = lambda _: {}) -> Field:
    """A field of one kind; ``value``: of the settings, or the same for all."""
    return Field(
        key, lambda chosen: (value(chosen) if callable(value) else value) if _kind(chosen) == kind else None, read
    )


def _fsdp(key: str, value: Any, read: Any = lambda _: {}) -> Field:
    return _of("FSDP", f"fsdp_config.fsdp_{key}", value, read)


def _engine(key: str, value: Any, read: Any = lambda _: {}) -> Field:
    return _of("DEEPSPEED", f"deepspeed_config.{key}", value, read)


def _degree(name: str, choice: str) -> Field:
    """Of a mesh; none where all devices share the states."""

    def value(settings: Settings) -> int | None:
        main = settings.strategy
        meshed = main.data * main.tensor * main.context > 1
        return getattr(main, choice) if meshed else None

    return _of("FSDP", f"parallelism_config.parallelism_config_{name}_size", value, same("", choice).read)


def _kind_of(value: Any) -> dict[str, Any]:
    if value not in ("FSDP", "DEEPSPEED", "MULTI_GPU", "NO"):
        raise ValueError("FSDP, DEEPSPEED, MULTI_GPU and NO are priced; --for megatron reads Megatron-LM's flags.")
    return {"kind": value}


def _again(settings: Settings) -> bool:
    return settings.strategy.recompute is Recompute.FULL


def _recompute(value: Any) -> dict[str, Any]:
    return {"recompute": Recompute.FULL if value in (True, "true") else Recompute.NONE}


def _sharding(value: Any) -> dict[str, Any]:
    if str(value) not in _FSDP1:
        raise ValueError(
            "Give FULL_SHARD, SHARD_GRAD_OP or NO_SHARD; replicas of shards as parallelism_config of FSDP2."
        )
    return {"zero_stage": _FSDP1[str(value)]}


def _script(settings: Settings) -> Iterator[str]:
    """What is left to the training script, as it says it."""
    yield f"batch_size={settings.samples} (DataLoader)"
    if settings.microbatches > 1 and _kind(settings) != "DEEPSPEED":
        yield f"gradient_accumulation_steps={settings.microbatches} (Accelerator)"
    if _again(settings) and _kind(settings) != "FSDP":
        yield "gradient_checkpointing=True (model.gradient_checkpointing_enable())"


def _settings(stated: dict[str, Any], world: World) -> Settings:
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


FIELDS = (
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
    _fsdp("activation_checkpointing", _again, _recompute),
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
    fields=FIELDS,
    parse=_parse,
    dump=lambda values: dump_yaml(dict(sorted(values.items()))),
    settings=_settings,
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
    by_hand=lambda chosen: (f"{_SCRIPT}{line}" for line in _script(chosen)),
)
