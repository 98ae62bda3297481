"""For DeepSpeed: its JSON configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator

from galvatron_lite.files import to_data
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.export.common import PICTURES, PLACES, Exported, kinds, lacking, main_strategy, unlike
from galvatron_lite.plans.export.deepspeed_config import config_of, zero_stage
from galvatron_lite.plans.schema import Plan

TOOL = "deepspeed"
_LACKING = {
    **PICTURES,
    **PLACES,
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
