"""What DeepSpeed is told, and whether it understood."""

from __future__ import annotations

from typing import Any

from galvatron_lite.errors import LaunchError
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.export.deepspeed import DeepSpeedConfig
from galvatron_lite.plans.schema import Plan


def common_strategy(plan: Plan) -> Strategy:
    """What DeepSpeed does to all layers; that of the first one with states to share, where there is one."""
    strategies = [run.strategy for stage in plan.stages for run in stage.runs]
    shared = (one for one in strategies if one.zero_stage or one.offloads_states)
    return next(shared, strategies[0])


def check_engine(engine: Any, config: DeepSpeedConfig) -> None:
    """Whether DeepSpeed understood what it was told.

    Raises:
        LaunchError: it did not; names the setting.
    """
    offload = config.zero_optimization.offload_optimizer
    settings = {
        "zero_optimization.stage": (int(engine.zero_optimization_stage()), config.zero_optimization.stage),
        "gradient_accumulation_steps": (engine.gradient_accumulation_steps(), config.gradient_accumulation_steps),
        "train_micro_batch_size_per_gpu": (
            engine.train_micro_batch_size_per_gpu(), config.train_micro_batch_size_per_gpu,
        ),
        "train_batch_size": (engine.train_batch_size(), config.train_batch_size),
        "gradient_clipping": (engine.gradient_clipping(), config.gradient_clipping),
        "bf16": (engine.bfloat16_enabled(), config.bf16.enabled),
        "fp16": (engine.fp16_enabled(), config.fp16.enabled),
        "offload_optimizer": (bool(engine.zero_use_cpu_optimizer()), offload is not None),
    }  # fmt: skip
    for name, (has, wanted) in settings.items():
        if has != wanted:
            raise LaunchError(
                f"DeepSpeed runs with {name} = {has}, but the plan asks for {wanted}. Use another version."
            )
