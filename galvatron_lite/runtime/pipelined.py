"""Steps and forward passes of a model whose stages are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.parallelism.pipeline.runner import PipelineRunner
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass
from galvatron_lite.parallelism.zero.apply import set_all_reduce
from galvatron_lite.plans.execution import pipeline_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.monitor.notes import StepPhase
from galvatron_lite.runtime.monitor.watch import Watch
from galvatron_lite.runtime.parallelize import StageRuntime
from galvatron_lite.runtime.stage_calls import Calls

_PLAIN = (bool, int, float, str, NoneType)


def pipelined_step(
    runtimes: Sequence[StageRuntime],
    calls: Calls,
    parts: Sequence[Sequence[Any]],
    rows: int,
    lifted: float,
    watch: Watch,
) -> Tensor:
    """All passes of a step.

    Returns:
        This rank's part of the lifted loss: the sum over the ranks of the world is the batch's mean loss.
    """
    runner, traffic = _runner_of(runtimes), runtimes[-1].traffic
    scale = lifted / (traffic.glue.batch * len(parts[0]))

    def call(chunk: int, part: Any) -> Tensor:
        loss = calls.loss(runtimes[chunk], part, rows)
        return (loss.float() if loss.dtype is torch.float16 else loss) * scale

    weights = iter(range(len(parts) * len(parts[0])))

    def before(action: Action, last: bool) -> None:
        watch.at(StepPhase(action.what.value), action.microbatch)
        if action.what is not Pass.WEIGHT:
            watch.waits()
        if action.what is Pass.BACKWARD:
            runtime = runtimes[action.chunk]
            set_all_reduce(runtime.sharded.replicated, last)
            _begin([runtime], synchronise=last and not runner.pipeline.splits_backward)
        elif action.what is Pass.WEIGHT:
            # stages of a rank may share parameters, and their gradients of weights come in any order
            _begin(runtimes, synchronise=next(weights) == len(parts) * len(parts[0]) - 1)

    # a gradient of a parameter that stages share may come from another stage than the one whose reducer has it
    _begin(runtimes, synchronise=False)
    total = runner.step(parts, call, before, watch.goes_on)
    return total / (runtimes[-1].meshes.stage_devices // traffic.glue.batch)


def _begin(runtimes: Sequence[StageRuntime], *, synchronise: bool) -> None:
    for runtime in runtimes:
        runtime.reducer.synchronise = synchronise
        runtime.reducer.begin()


def pipelined_loss(runtimes: Sequence[StageRuntime], calls: Calls, parts: Sequence[Sequence[Any]], rows: int) -> Tensor:
    """This rank's part of the loss of a batch, forward passes alone; arguments and result as of ``pipelined_step``."""
    traffic = runtimes[-1].traffic
    ranks = runtimes[-1].meshes.stage_devices // traffic.glue.batch  # that have the same samples
    losses = _runner_of(runtimes).outputs(parts, lambda chunk, part: calls.loss(runtimes[chunk], part, rows))
    total = torch.zeros((), device=calls.device) if not losses else torch.stack([loss.float() for loss in losses]).sum()
    return total / (traffic.glue.batch * len(parts[0]) * ranks)


def pipelined_outputs(
    runtimes: Sequence[StageRuntime], calls: Calls, parts: Sequence[Sequence[Any]], rows: int, plan: Plan
) -> Any:
    """The model's outputs for a batch, whole on every rank; arguments as for ``pipelined_step``.

    What is neither a tensor in a nest of mappings, tuples and lists nor a plain value (a cache) is None.
    """
    sampled: list[tuple[bool, ...]] = []

    def call(chunk: int, part: Any) -> Any:
        found, told = calls.outputs(runtimes[chunk], part, rows)
        sampled.append(told)
        return found

    made = _runner_of(runtimes).outputs(parts, call)
    value = _joined(made, sampled[-1]) if made else None
    meshes, pipeline = runtimes[0].meshes, pipeline_of(plan)
    source = pipeline.group_of(len(plan.stages) - 1)
    assert meshes.pipeline is not None
    return _broadcast(value, dist.get_global_rank(meshes.pipeline, source), meshes.pipeline, calls.device)


def output_count(samples: int, plan: Plan) -> int:
    """Micro-batches in which the outputs for so many samples are made."""
    unit = plan.microbatches * math.lcm(*(run.strategy.batch_degree for stage in plan.stages for run in stage.runs))
    return 1 if samples % unit else plan.microbatches


def _runner_of(runtimes: Sequence[StageRuntime]) -> PipelineRunner:
    runner = runtimes[0].pipeline
    assert runner is not None
    return runner


def _joined(outputs: Sequence[Any], sampled: Sequence[bool]) -> Any:
    """The outputs of micro-batches as that of one batch: samples behind one another, means of all else."""
    rest = [tensors_of(value) for value in outputs[1:]]
    flags = iter(sampled)

    def join(first: Tensor) -> Tensor:
        every, holds = [first, *(next(own) for own in rest)], next(flags)
        if holds:
            return torch.cat(every)
        return torch.stack(every).mean(0) if first.is_floating_point() else first

    return map_tensors(outputs[0], join)


def _broadcast(value: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    box = [map_tensors(_plain(value), lambda tensor: torch.empty_like(tensor, device="meta"))]
    dist.broadcast_object_list(box, src=source, group=group, device=device)
    own = tensors_of(value)

    def receive(like: Tensor) -> Tensor:
        mine = dist.get_rank() == source
        tensor = next(own).detach().contiguous() if mine else torch.empty_like(like, device=device)
        dist.broadcast(tensor, src=source, group=group)
        return tensor

    return map_tensors(box[0], receive)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = {key: _plain(item) for key, item in value.items()}
        return type(value)(**items) if hasattr(type(value), "__dataclass_fields__") else items
    if isinstance(value, (tuple, list)):
        kept = [_plain(item) for item in value]
        return type(value)(*kept) if hasattr(value, "_fields") else type(value)(kept)
    return value if isinstance(value, (Tensor, *_PLAIN)) else None
