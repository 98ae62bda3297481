"""Settings of Megatron-LM, as flags of ``pretrain_gpt.py`` (``megatron/training/arguments.py``), and of NeMo, as YAML.

Both set dataclasses of Megatron Core (ModelParallelConfig, TransformerConfig, DistributedDataParallelConfig,
OptimizerConfig). Pass the flags by ``grep -v '^#' FILE | xargs torchrun pretrain_gpt.py ...``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from shlex import quote
from typing import Any

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Offload
from galvatron_lite.plans.export.fields import (
    RECOMPUTE_WORDS,
    Field,
    Tool,
    Values,
    dump_yaml,
    fixed,
    parse_flags,
    parse_yaml,
    same,
)
from galvatron_lite.plans.export.settings import Settings, StageBlocks, World, filled

_SHARDING = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}


def layout(stages: Sequence[StageBlocks]) -> str:
    """The pipeline layout in Megatron Core's letters: ``Ettt|ttt|tttL`` (E embedding, t block, L loss)."""
    return "|".join("E" * stage.before + "t" * stage.blocks + "L" * stage.after for stage in stages)


def _stages(value: Any) -> dict[str, Any]:
    text = re.sub(r"[,\s'\"]", "", str(value))
    repeated = re.compile(r"(?:\(([^()]*)\)|([Et|Lm]))\*(\d+)")
    while (longer := repeated.sub(lambda match: (match[1] or match[2]) * int(match[3]), text)) != text:
        text = longer
    if not re.fullmatch(r"E?[t|]*L?", text):
        raise ValueError("Give the embedding as E, blocks as t, the loss as L and | between stages.")
    return {"stages": [StageBlocks(part.count("t"), "E" in part, "L" in part) for part in text.split("|")]}


def _method(settings: Settings) -> tuple[str, int] | tuple[None, None]:
    if settings.strategy.recompute is not Recompute.FULL:
        return None, None
    return ("block", settings.recomputed) if settings.recomputed else ("uniform", 1)


def _expert_tensor(settings: Settings) -> int | None:
    main = settings.strategy
    return None if main.expert == 1 else main.expert_tensor or main.tensor


def _modules(value: Any) -> dict[str, Any]:
    if str(value) not in ("core_attn", "['core_attn']"):
        raise ValueError("Its costs are not known but of core_attn: leave it out, or recompute all (granularity full).")
    return {}


def _sharding(settings: Settings) -> int:
    return settings.strategy.zero_stage if settings.strategy.state_shards > 1 else 0


def _switch(name: str, value: Any) -> Any:
    """Read a switch: the setting of ``name`` if it is on, nothing if it is off."""
    return lambda on: {name: value} if on not in (False, "false", "none", None) else {}


_CORE = (
    same("model.tensor_model_parallel_size", "tensor"),
    same("model.pipeline_model_parallel_size", "pipeline"),
    Field(
        "model.sequence_parallel",
        lambda chosen: chosen.strategy.sequence_parallel if chosen.strategy.tensor > 1 else None,
        lambda value: {"sequence_parallel": value in (True, "true")},
    ),
    Field(
        "model.pipeline_model_parallel_layout",
        lambda chosen: layout(chosen.stages) if chosen.pipeline > 1 else None,
        _stages,
    ),
    Field("model.num_virtual_stages_per_pipeline_rank", lambda _: None, lambda value: {"virtual": int(value)}),
    Field("model.virtual_pipeline_model_parallel_size", lambda _: None, lambda value: {"virtual": int(value or 1)}),
    Field("model.num_layers_per_virtual_pipeline_stage", lambda _: None, lambda value: {"per_stage": int(value)}),
    same("model.context_parallel_size", "context", plain=1),
    Field(
        "model.cp_comm_type",
        lambda chosen: None if chosen.strategy.context == 1 else "a2a" if chosen.strategy.ulysses else "p2p",
        same("", "ulysses", {False: "p2p", True: "a2a"}).read,
    ),
    same("model.expert_model_parallel_size", "expert", plain=1),
    Field("model.expert_tensor_parallel_size", _expert_tensor, lambda value: {"sliced": int(value)}),
    same("model.recompute_granularity", "recompute", RECOMPUTE_WORDS),
    Field("model.recompute_activations", lambda _: None, _switch("recompute", Recompute.SELECTIVE)),
    Field("model.recompute_modules", lambda _: None, _modules),
    Field("model.recompute_method", lambda chosen: _method(chosen)[0], lambda value: {"method": value}),
    Field("model.recompute_num_layers", lambda chosen: _method(chosen)[1], lambda value: {"recomputed": int(value)}),
    same("train.micro_batch_size", "samples"),
    same("train.global_batch_size", "batch"),
    Field("ddp.use_distributed_optimizer", lambda chosen: _sharding(chosen) > 0 or None, _switch("zero_stage", 1)),
    Field("ddp.use_megatron_fsdp", lambda chosen: _sharding(chosen) > 1 or None, _switch("zero_stage", 3)),
    Field(
        "ddp.data_parallel_sharding_strategy",
        lambda chosen: _SHARDING[_sharding(chosen)] if _sharding(chosen) > 1 else None,
        same("", "zero_stage", {0: "no_shard", **_SHARDING}).read,
    ),
    Field(
        "ddp.num_distributed_optimizer_instances",
        lambda chosen: chosen.strategy.data if _sharding(chosen) and chosen.strategy.data > 1 else None,
        lambda value: {"data": int(value)},
    ),
    Field(
        "optimizer.optimizer_cpu_offload",
        lambda chosen: chosen.strategy.offloads_states or None,
        _switch("offload", Offload.STATES),
    ),
    fixed("optimizer.optimizer_offload_fraction", lambda chosen: 1.0 if chosen.strategy.offloads_states else None),
)
_REFUSED = {
    "model.fp8": "plan in bf16.", "model.fp8_format": "plan in bf16.", "model.fp4_format": "plan in bf16.",
    "model.cpu_offloading": "leave it out.", "ddp.use_torch_fsdp2": "leave it out, or use --for torchtitan.",
    "model.decoder_first_pipeline_num_layers": "write the stages as pipeline_model_parallel_layout.",
    "model.decoder_last_pipeline_num_layers": "write the stages as pipeline_model_parallel_layout.",
    "model.num_layers_in_first_pipeline_stage": "write the stages as pipeline_model_parallel_layout.",
    "model.num_layers_in_last_pipeline_stage": "write the stages as pipeline_model_parallel_layout.",
    "model.account_for_embedding_in_pipeline_split": "write the stages as pipeline_model_parallel_layout.",
    "model.account_for_loss_in_pipeline_split": "write the stages as pipeline_model_parallel_layout.",
    "model.hierarchical_context_parallel_sizes": "leave it out.", "train.rampup_batch_size": "leave it out.",
    "model.microbatch_group_size_per_vp_stage": "leave it out: groups are as large as the pipeline.",
}  # fmt: skip
_CHECKED = {"model.num_layers": "blocks", "model.seq_length": "sequence", "dataset.sequence_length": "sequence"}
_HINTS = {"schedule": "Megatron runs 1f1b, interleaved where groups have several stages"}


def _settings(stated: dict[str, Any], world: World) -> Settings:
    stages, pipeline = stated.get("stages", ()), stated.get("pipeline", 1)
    if "per_stage" in stated:
        stated["virtual"] = max(world.blocks // (pipeline * stated["per_stage"]), 1)
    if stages:
        stated["virtual"] = max(len(stages) // pipeline, 1)
    if stated.get("method") != "block":
        stated.pop("recomputed", None)
    sliced, tensor, expert = stated.get("sliced"), stated.get("tensor", 1), stated.get("expert", 1)
    if sliced not in (None, 1, tensor) or (sliced == 1 < tensor and expert == 1 and "sliced" in stated):
        remedy = f"Give the tensor degree, {tensor}, or 1 beside expert_model_parallel_size above 1."
        raise InputError(f"{world.file}, expert_tensor_parallel_size", sliced, remedy)
    stated["expert_tensor"] = int(sliced == 1)
    return filled(stated, world, stages)


def _flags(values: Values) -> str:
    """One flag a line; a switch has no value."""
    flags = {"--" + name.replace("_", "-"): value for name, value in values.items() if value is not False}
    return "".join(f"{flag}\n" if value is True else f"{flag} {quote(str(value))}\n" for flag, value in flags.items())


def _bare(key: str) -> str:
    return key.rpartition(".")[2]


def _precision(name: str) -> Field:
    return Field(name, lambda chosen: chosen.precision == name or None, _switch("precision", name))


MEGATRON = Tool(
    name="megatron",
    software="Megatron-LM (megatron-core 0.16)",
    fields=(
        *(replace(field, key=_bare(field.key)) for field in _CORE),
        fixed("use_precision_aware_optimizer", lambda chosen: chosen.strategy.offloads_states or None),
        _precision("bf16"),
        _precision("fp16"),
    ),
    parse=parse_flags,
    dump=_flags,
    settings=_settings,
    assumed={"grad_reduce_in_bf16": True, "overlap_grad_reduce": True},
    refused={_bare(key): remedy for key, remedy in _REFUSED.items()},
    checked={_bare(key): name for key, name in _CHECKED.items()},
    hints=_HINTS,
)


def _parse_nemo(text: str, file: str) -> dict[str, Any]:
    """Older files of NeMo have batch sizes and switches of the optimizer in other sections."""
    sections = {_bare(field.key): field.key for field in _CORE} | {_bare(key): key for key in _REFUSED}
    return {sections.get(_bare(key), key): value for key, value in parse_yaml(text, file).items()}


NEMO = Tool(
    name="nemo",
    software="NeMo (Megatron-Bridge 0.3)",
    fields=(
        *_CORE,
        fixed("optimizer.use_distributed_optimizer", lambda chosen: _sharding(chosen) > 0 or None),
        same("mixed_precision", "precision", {"bf16": "bf16_mixed", "fp16": "fp16_mixed"}),
    ),
    parse=_parse_nemo,
    dump=dump_yaml,
    settings=_settings,
    assumed={"ddp.grad_reduce_in_fp32": False, "ddp.overlap_grad_reduce": True},
    refused=_REFUSED,
    checked=_CHECKED,
    hints=_HINTS,
)
"""NeMo Framework: the YAML file for ``--config-file`` of Megatron-Bridge, which trains its language models. Sections
and keys are those of its ``ConfigContainer``; they override the settings of a recipe."""
