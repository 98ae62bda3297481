"""Settings of torchtitan: options of its command line, one a line. TOML files of earlier releases can be read, too.

Pass them after the options that name the model: ``--module llama3 --config llama3_8b $(grep -v '^#' FILE)``.
"""

from __future__ import annotations

from typing import Any

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.pipeline.schedule import Schedule
from galvatron_lite.plans.export.fields import Field, Tool, Values, fixed, parse_flags, parse_toml, same
from galvatron_lite.plans.export.settings import Settings, World, even_stages, filled

_SCHEDULES = {
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.GPIPE: "GPipe",
    Schedule.INTERLEAVED: "Interleaved1F1B",
    Schedule.ZERO_BUBBLE_V: "ZBVZeroBubble",
}
_PARALLEL, _PIPE = "parallelism", "parallelism.pipeline_parallel"


def _local(settings: Settings) -> int:
    """The local batch: with a pipeline it is divided into micro-batches, else gradients accumulate over several."""
    return settings.batch // settings.strategy.batch_degree if settings.pipeline > 1 else settings.samples


def _ends(settings: Settings) -> tuple[int, int] | None:
    """Numbers of blocks that the first and the last stage have less than others, so that torchtitan's stages are ours.

    It distributes the sum of blocks and these numbers evenly, the remainder to the first stages
    (``_generate_llm_fqn_per_model_part`` of its ``distributed/pipeline_parallel.py``). None if no numbers fit.
    """
    sizes = [stage.blocks for stage in settings.stages]
    if settings.pipeline == 1:
        return None
    most, world = max(sizes), World("", 1, sum(sizes))
    for first in range(most + 1):
        for last in range(most + 1):
            size = (sum(sizes) + first + last) // len(sizes)
            if size >= max(first, last, 1) and even_stages(world, len(sizes), first, last) == settings.stages:
                return first, last
    return None


def _layers_per_stage(settings: Settings) -> int | None:
    ends = _ends(settings)
    return -(-(settings.blocks + sum(ends)) // len(settings.stages)) if ends and settings.virtual > 1 else None


def _piped(name: str, words: dict[Any, Any] | None = None) -> Any:
    """Write a choice only for plans with a pipeline."""
    return lambda chosen: same("", name, words).write(chosen) if chosen.pipeline > 1 else None


FIELDS = (
    Field("training.local_batch_size", _local, lambda value: {"local": int(value)}),
    Field("training.global_batch_size", lambda chosen: chosen.batch, lambda value: {"batch": max(int(value), 0)}),
    Field(
        "training.mixed_precision_param",
        lambda chosen: "float32" if chosen.precision == "fp32" else "bfloat16",
        same("", "precision", {"fp32": "float32", "bf16": "bfloat16"}).read,
    ),
    same(f"{_PARALLEL}.data_parallel_replicate_degree", "data"),
    same(f"{_PARALLEL}.data_parallel_shard_degree", "zero"),
    same(f"{_PARALLEL}.tensor_parallel_degree", "tensor"),
    same(f"{_PARALLEL}.context_parallel_degree", "context"),
    same(f"{_PARALLEL}.pipeline_parallel_degree", "pipeline"),
    same(f"{_PARALLEL}.expert_parallel_degree", "expert"),
    Field(
        f"{_PARALLEL}.fsdp_reshard_after_forward",
        lambda chosen: {1: "never", 2: "never", 3: "always"}.get(chosen.strategy.zero_stage),
        same("", "zero_stage", {3: "always", 2: "never", 0: "default"}).read,
    ),
    Field(
        f"{_PARALLEL}.enable_sequence_parallel",
        lambda chosen: chosen.strategy.sequence_parallel if chosen.strategy.tensor > 1 else None,
        lambda value: {"sequence_parallel": value is True},
    ),
    # torchtitan refuses its default, CUDA graphs, together with a pipeline.
    fixed("training.disable_cuda_graphs", lambda chosen: chosen.pipeline > 1 or None),
    Field(f"{_PIPE}_schedule", _piped("schedule", _SCHEDULES), same("", "schedule", _SCHEDULES).read),
    Field(f"{_PIPE}_microbatch_size", _piped("samples"), lambda value: {"samples": int(value)}),
    Field(
        f"{_PIPE}_first_stage_less_layers",
        lambda chosen: (_ends(chosen) or [None])[0],
        lambda value: {"first": int(value)},
    ),
    Field(
        f"{_PIPE}_last_stage_less_layers",
        lambda chosen: (_ends(chosen) or [None])[-1],
        lambda value: {"last": int(value)},
    ),
    Field(f"{_PIPE}_layers_per_stage", _layers_per_stage, lambda value: {"layers_per_stage": int(value)}),
    same("activation_checkpoint", "recompute", {option: option.value for option in Recompute}),
)


def _settings(stated: dict[str, Any], world: World) -> Settings:
    pipeline, first, last = stated.get("pipeline", 1), stated.get("first", 1), stated.get("last", 1)
    stated = {"recompute": Recompute.SELECTIVE, "sequence_parallel": True, "expert_tensor": 1, "zero": -1, **stated}
    virtual = 2 if stated.get("schedule") in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE_V) else 1
    if "layers_per_stage" in stated:
        stages = -(-(world.blocks + first + last) // stated["layers_per_stage"])
        virtual, remainder = divmod(stages, pipeline)
        if remainder or not virtual:
            remedy = f"It makes a number of stages that pipeline_parallel_degree, {pipeline}, does not divide."
            raise InputError(f"{world.file}, {_PIPE}_layers_per_stage", stated["layers_per_stage"], remedy)
    stage = 1 if pipeline > 1 else stated.get("zero_stage") or 3
    replicas = world.devices // (pipeline * stated.get("tensor", 1) * stated.get("context", 1))
    if stated["zero"] == 1 and stated.get("context", 1) == 1:
        stage = 0
    if pipeline == 1:
        stated["samples"] = stated.get("local", 8)
    stated["batch"] = stated.get("batch") or stated.get("local", 8) * replicas
    if pipeline > 1 and stated["batch"] != stated.get("local", 8) * replicas:
        remedy = f"Under a pipeline it is the batch over {replicas} replicas: {stated['batch'] // max(replicas, 1)}."
        raise InputError(f"{world.file}, training.local_batch_size", stated.get("local", 8), remedy)
    stated |= {"samples": stated.get("samples", 1), "zero_stage": stage, "virtual": virtual}
    if stage == 0:
        stated.pop("data", None)
    return filled(stated, world, even_stages(world, pipeline * virtual, first, last) if pipeline > 1 else ())


def _parse(text: str, file: str) -> dict[str, Any]:
    is_toml = any(line.startswith("[") for line in text.splitlines())
    values = {}
    for key, value in (parse_toml if is_toml else parse_flags)(text, file).items():
        if ".no_" in key:
            values[key.replace(".no_", ".")] = False
        else:
            values["activation_checkpoint" if key == "activation_checkpoint.mode" else key] = value
    return values


def _dump(values: Values) -> str:
    lines = []
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if value is True or value is False:
            lines.append(f"--{section}.{'' if value else 'no-'}{name}")
        else:
            lines.append(f"{key}:{value}" if key == "activation_checkpoint" else f"--{key} {value}")
    # Activation checkpointing is a sub-command, so it comes last.
    return "".join(f"{line}\n" for line in sorted(lines, key=lambda line: line.startswith("activation_checkpoint:")))


TORCHTITAN = Tool(
    name="torchtitan",
    software="torchtitan 0.3",
    fields=FIELDS,
    parse=_parse,
    dump=_dump,
    settings=_settings,
    assumed={"compile.enable": True},
    refused={
        "training.enable_cpu_offload": "leave it out.",
        f"{_PARALLEL}.module_fqns_per_model_part": "give layers_per_stage instead.",
        f"{_PIPE}_schedule_csv": "name a schedule.",
        "compile.enable_async_tensor_parallel": "leave it out.",
    },
    checked={"training.seq_len": "sequence"},
    hints={
        "zero_stage": "FSDP2 shares all states, and gathers them once a step under a pipeline",
        "blocks of stages": "parallelism.module_fqns_per_model_part in its configuration in Python can cut so",
        "offload": "training.enable_cpu_offload takes parameters there too",
    },
)
