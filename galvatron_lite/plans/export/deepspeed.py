"""DeepSpeed's JSON configuration, as typed values: its parser takes a misspelt key at the top level in silence.

Names and meanings are those of https://www.deepspeed.ai/docs/config-json/; what is not named keeps DeepSpeed's default.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from galvatron_lite.errors import InputError
from galvatron_lite.files import to_data
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.export.common import PICTURES, Exported, kinds, lacking, main_strategy, unlike
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


TOOL = "deepspeed"
_LACKING = {
    **PICTURES,
    "context": "context parallelism",
    "expert": "expert parallelism (its MoE layers do it)",
}


def exported(plan: Plan) -> Exported:
    """The file for ``deepspeed.initialize(config=...)``."""
    main = main_strategy(plan)
    config = config_of(plan, main)
    text = json.dumps(to_data(config), indent=2) + "\n"
    return Exported(TOOL, text, tuple(_left_out(plan, main)))


def _left_out(plan: Plan, main: Strategy) -> Iterator[str]:
    yield from kinds(plan)
    if plan.pipeline > 1:
        yield f"pipeline of {plan.pipeline} stages: write the model as deepspeed.pipe.PipelineModule"
    yield from lacking(main, _LACKING)
    if main.recompute is not Recompute.NONE or any(_recomputing(plan)):
        yield "recomputation: it has no switch, the model does it (gradient_checkpointing_enable())"
    if main.offloads_activations:
        yield "activations in host memory: the model asks for it (deepspeed.checkpointing, cpu_checkpointing)"
    if main.sequence_parallel:
        yield "sequence parallelism beside tensor parallelism"
    if main.data > 1 and main.zero > 1:
        yield f"{main.data} replicas of the shards: all {main.batch_degree} devices share"
    if main.tensor > 1 and zero_stage(main) == 3:
        yield "ZeRO-3 beside tensor parallelism: AutoTP takes stages 0 to 2"
    yield from unlike(plan, main, ("recompute",))


def _recomputing(plan: Plan) -> Iterator[bool]:
    return (run.strategy.recompute is not Recompute.NONE for stage in plan.stages for run in stage.runs)
