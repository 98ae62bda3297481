"""For Hugging Face accelerate: the YAML file of ``accelerate launch --config_file``.

ZeRO-2 and ZeRO-3 are FSDP2, which is what ``auto_parallelize`` trains with; ZeRO-1, optimizer states in host memory,
and plans for DeepSpeed are its DeepSpeed plugin; no ZeRO at all is DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.export.common import (
    EDGES,
    PICTURES,
    Exported,
    head,
    kinds,
    lacking,
    main_strategy,
    recomputed,
    unlike,
)
from galvatron_lite.plans.export.deepspeed import zero_stage
from galvatron_lite.plans.schema import LayerRun, Plan, TrainedBy

TOOL = "accelerate"
_LACKING = {
    **PICTURES,
    "expert": "expert parallelism",
    "ulysses": "Ulysses: context parallelism is a ring here",
}


def exported(plan: Plan) -> Exported:
    """The file: launcher, precision, and what shares states, matmuls and tokens."""
    main = main_strategy(plan)
    data: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": _kind(plan, main),
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no" if plan.precision == "fp32" else plan.precision,
        "num_machines": 1,
        "num_processes": plan.devices,
        "use_cpu": False,
    }
    if data["distributed_type"] == "DEEPSPEED":
        data["deepspeed_config"] = _deepspeed(plan, main)
    if data["distributed_type"] == "FSDP":
        data["fsdp_config"] = _fsdp(plan, main)
        data |= _degrees(main)
    left_out = tuple(_left_out(plan, main))
    return Exported(TOOL, head(plan, "accelerate", left_out) + yaml.safe_dump(data), left_out)


def _kind(plan: Plan, main: Strategy) -> str:
    if plan.devices == 1 and not main.offloads_states:
        return "NO"
    shared = main.tensor * main.context > 1
    deepspeed = plan.backend is TrainedBy.DEEPSPEED or main.zero_stage == 1 or main.offloads_states
    if deepspeed and not shared:
        return "DEEPSPEED"
    return "FSDP" if main.zero_stage or shared else "MULTI_GPU"


def _deepspeed(plan: Plan, main: Strategy) -> dict[str, object]:
    stage = zero_stage(main)
    return {
        "gradient_accumulation_steps": plan.microbatches,
        "offload_optimizer_device": "cpu" if main.offloads_states else "none",
        "offload_param_device": "none",
        "zero3_init_flag": stage == 3,
        "zero_stage": stage,
    }


def _fsdp(plan: Plan, main: Strategy) -> dict[str, object]:
    return {
        "fsdp_activation_checkpointing": recomputed(plan, Recompute.FULL) > 0,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": main.zero_stage == 3,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_version": 2,
    }


def _degrees(main: Strategy) -> dict[str, object]:
    """Of a mesh; none where all devices share the states."""
    if main.data * main.tensor * main.context == 1:
        return {}
    sharded = main.zero > 1
    return {
        "parallelism_config": {
            "parallelism_config_cp_size": main.context,
            "parallelism_config_dp_replicate_size": main.data,
            "parallelism_config_dp_shard_size": main.zero if sharded else 1,
            "parallelism_config_tp_size": main.tensor,
        }
    }


def _left_out(plan: Plan, main: Strategy) -> Iterator[str]:
    kind = _kind(plan, main)
    yield from kinds(plan)
    if plan.pipeline > 1:
        yield f"pipeline of {plan.pipeline} stages"
    yield from lacking(main, _LACKING)
    samples = plan.microbatch // main.batch_degree
    yield f"samples of a device's micro-batch: give the data loader batch_size={samples}"
    if kind != "DEEPSPEED" and plan.microbatches > 1:
        yield f"micro-batches: Accelerator(gradient_accumulation_steps={plan.microbatches})"
    yield from _of_kind(plan, main, kind)
    yield from unlike(plan, main, ("recompute",))


def _of_kind(plan: Plan, main: Strategy, kind: str) -> Iterator[str]:
    """What the plugin that is used cannot say."""
    if kind == "FSDP" and main.zero_stage == 1:
        yield "ZeRO-1: beside tensor or context parallelism FSDP shares gradients and parameters too"
    if kind == "FSDP" and main.offloads_states:
        yield "optimizer states in host memory: FSDP takes parameters there too"
    if kind == "FSDP" and main.sequence_parallel:
        yield "sequence parallelism: the model's own tensor-parallel plan decides it"
    if main.offloads_activations:
        yield "activations in host memory"
    if kind == "DEEPSPEED" and main.data > 1 and main.zero > 1:
        yield f"{main.data} replicas of the shards: all {main.batch_degree} devices share"
    full, selective = (recomputed(plan, which) for which in (Recompute.FULL, Recompute.SELECTIVE))
    if selective:
        yield f"selective recomputation of {selective} blocks"
    if kind == "FSDP" and any(run.strategy.recompute is Recompute.NONE and full for run in _blocks(plan)):
        yield f"full recomputation of {full} blocks alone: here all do"
    if kind != "FSDP" and full:
        yield "recomputation: the model does it (gradient_checkpointing_enable())"


def _blocks(plan: Plan) -> Iterator[LayerRun]:
    return (run for stage in plan.stages for run in stage.runs if run.first not in EDGES)
