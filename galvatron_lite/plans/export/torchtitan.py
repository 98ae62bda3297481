"""For torchtitan: options of its command line, one a line.

They come behind those that name the model: ``--module llama3 --config llama3_8b $(grep -v '^#' FILE)``.
"""

from __future__ import annotations

from collections.abc import Iterator

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.export.common import (
    PICTURES,
    Exported,
    cuts,
    head,
    kinds,
    lacking,
    main_strategy,
    recomputed,
    unlike,
)
from galvatron_lite.plans.schema import Plan, Schedule

TOOL = "torchtitan"
_SCHEDULES = {
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.GPIPE: "GPipe",
    Schedule.INTERLEAVED: "Interleaved1F1B",
    Schedule.ZERO_BUBBLE_V: "ZBVZeroBubble",
}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_RECOMPUTE = {Recompute.FULL: "full", Recompute.SELECTIVE: "selective", Recompute.NONE: "none"}


def exported(plan: Plan) -> Exported:
    """The options that say how the model is split."""
    main = main_strategy(plan)
    left_out = tuple(_left_out(plan, main))
    lines = [*_training(plan, main), *_degrees(plan, main), *_pipeline(plan, main)]
    lines.append(f"activation_checkpoint:{_RECOMPUTE[_again(plan)]}")
    return Exported(TOOL, head(plan, TOOL, left_out) + "".join(f"{line}\n" for line in lines), left_out)


def _training(plan: Plan, main: Strategy) -> Iterator[str]:
    """Under a pipeline its micro-batches are made of the local batch; else gradients accumulate over local batches."""
    whole = plan.global_batch if plan.pipeline > 1 else plan.microbatch
    yield f"--training.local_batch_size {whole // main.batch_degree}"
    yield f"--training.global_batch_size {plan.global_batch}"
    yield f"--training.mixed_precision_param {_DTYPES.get(plan.precision, 'bfloat16')}"


def _degrees(plan: Plan, main: Strategy) -> Iterator[str]:
    values = {
        "data_parallel_replicate_degree": main.data,
        "data_parallel_shard_degree": main.zero,
        "tensor_parallel_degree": main.tensor,
        "context_parallel_degree": main.context,
        "pipeline_parallel_degree": plan.pipeline,
        "expert_parallel_degree": main.expert,
    }
    yield from (f"--parallelism.{name} {degree}" for name, degree in values.items())
    if main.zero_stage:
        yield f"--parallelism.fsdp_reshard_after_forward {'always' if main.zero_stage == 3 else 'never'}"
    if main.tensor > 1:
        yield f"--parallelism.{'' if main.sequence_parallel else 'no-'}enable_sequence_parallel"


def _pipeline(plan: Plan, main: Strategy) -> Iterator[str]:
    if plan.pipeline == 1 or plan.cyclic is not None:
        return
    # torchtitan refuses its default, CUDA graphs, together with a pipeline.
    yield "--training.disable_cuda_graphs"
    yield f"--parallelism.pipeline_parallel_schedule {_SCHEDULES.get(plan.schedule, '1F1B')}"
    yield f"--parallelism.pipeline_parallel_microbatch_size {plan.microbatch // main.batch_degree}"
    sizes = [one.blocks for one in cuts(plan)]
    weights = _weights(sizes)
    if weights is not None:
        first, last = weights
        yield f"--parallelism.pipeline_parallel_first_stage_less_layers {first}"
        yield f"--parallelism.pipeline_parallel_last_stage_less_layers {last}"
    if plan.virtual_stages > 1 and weights is not None:
        yield f"--parallelism.pipeline_parallel_layers_per_stage {-(-(sum(sizes) + sum(weights)) // len(sizes))}"


def _weights(sizes: list[int]) -> tuple[int, int] | None:
    """By how many blocks the first and the last stage are to be smaller for torchtitan to cut where the plan does.

    It shares out blocks and these evenly, the first stages taking the remainder (``_generate_llm_fqn_per_model_part``
    of its ``distributed/pipeline_parallel.py``). None where no such numbers give the plan's stages.
    """
    most = max(sizes)
    for first in range(most + 1):
        for last in range(most + 1):
            each, more = divmod(sum(sizes) + first + last, len(sizes))
            shared = [each + (place < more) for place in range(len(sizes))]
            shared[0] -= first
            shared[-1] -= last
            if shared == sizes and each >= max(first, last, 1):
                return first, last
    return None


def _again(plan: Plan) -> Recompute:
    """What all blocks compute again: the most that any does."""
    return next((which for which in (Recompute.FULL, Recompute.SELECTIVE) if recomputed(plan, which)), Recompute.NONE)


def _left_out(plan: Plan, main: Strategy) -> Iterator[str]:
    yield from kinds(plan)
    if plan.precision not in _DTYPES:
        yield f"precision {plan.precision}: here bfloat16"
    yield from lacking(main, {**PICTURES, "ulysses": "Ulysses", "expert_tensor": "slices of experts"})
    if main.zero_stage == 1:
        yield "ZeRO-1: FSDP shares gradients and parameters too"
    if main.offloads_states:
        yield "optimizer states in host memory: training.enable_cpu_offload takes parameters there too"
    if main.offloads_activations:
        yield "activations in host memory"
    if plan.pipeline > 1 and plan.cyclic is None:
        yield from _pipeline_left_out(plan)
    blocks, which = sum(one.blocks for one in cuts(plan)), _again(plan)
    if which is not Recompute.NONE and recomputed(plan, which) < blocks:
        yield f"{which.value} recomputation of {recomputed(plan, which)} of {blocks} blocks: here all do"
    if which is Recompute.SELECTIVE:
        yield "what selective recomputation keeps: torchtitan has a list of its own"
    yield from unlike(plan, main, ("recompute",))


def _pipeline_left_out(plan: Plan) -> Iterator[str]:
    if plan.schedule not in _SCHEDULES:
        yield f"schedule {plan.schedule.value}: here 1F1B"
    stages = cuts(plan)
    sizes = [one.blocks for one in stages]
    if _weights(sizes) is None:
        modules = "parallelism.module_fqns_per_model_part in its configuration in Python can"
        yield f"stages of {', '.join(map(str, sizes))} blocks: its options cannot cut so; {modules}"
    if not stages[0].before or not stages[-1].after:
        yield "where the layers around the blocks are: here in the first and the last stage"
