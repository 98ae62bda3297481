"""Forward and backward passes of a batch in micro-batches, with and without a pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.parallelism.pipeline.runner import PipelineRunner
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass
from galvatron_lite.parallelism.sharded.tensor import locals_only
from galvatron_lite.parallelism.zero.apply import set_all_reduce
from galvatron_lite.plans.io import pipeline_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.monitor.notes import StepPhase
from galvatron_lite.runtime.stages import StageRuntime

if TYPE_CHECKING:
    from galvatron_lite.runtime.engine import ParallelModel

_PLAIN = (bool, int, float, str, NoneType)


def accumulated_step(parallel: ParallelModel, parts: Sequence[Sequence[Any]], loss_scale: float) -> Tensor:
    """Run forward and backward of all micro-batches without a pipeline; arguments and result as of
    ``pipelined_step``."""
    (microbatches,), glue = parts, parallel.runtime.traffic.glue
    total = torch.zeros((), device=parallel.device)
    for number, part in enumerate(microbatches):
        parallel.watch.at(StepPhase.FORWARD, number)
        loss = parallel.local_loss(part)
        loss = (loss.float() if parallel.scaler is not None else loss) * (loss_scale / (glue.batch * len(microbatches)))
        parallel.watch.at(StepPhase.BACKWARD, number)
        is_last = number == len(microbatches) - 1
        for runtime in parallel.runtimes:
            set_all_reduce(runtime.sharded.replicated, is_last)
        _begin_backward(parallel.runtimes, synchronise=is_last)
        with locals_only():  # recomputation compares what is computed again with the shards that were saved
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total / (parallel.runtime.meshes.stage_devices // glue.batch)


def pipelined_step(parallel: ParallelModel, parts: Sequence[Sequence[Any]], loss_scale: float) -> Tensor:
    """Run all passes of a step.

    Args:
        parallel: the model.
        parts: this rank's samples, by stage of this rank and micro-batch.
        loss_scale: multiplies the loss.

    Returns:
        This rank's part of the scaled loss: the sum over all ranks is the batch's mean loss.
    """
    runtimes, watch, runner = parallel.runtimes, parallel.watch, _runner_of(parallel)
    glue, last_weight_pass = runtimes[-1].traffic.glue, len(parts) * len(parts[0]) - 1
    scale = loss_scale / (glue.batch * len(parts[0]))
    weight_passes = iter(range(last_weight_pass + 1))

    def call(chunk: int, part: Any) -> Tensor:
        loss = parallel.calls.loss(runtimes[chunk], part)
        return (loss.float() if loss.dtype is torch.float16 else loss) * scale

    def before(action: Action, last: bool) -> None:
        watch.at(StepPhase(action.what.value), action.microbatch)
        if action.what is not Pass.WEIGHT:
            watch.waits()
        if action.what is Pass.BACKWARD:
            runtime = runtimes[action.chunk]
            set_all_reduce(runtime.sharded.replicated, last)
            _begin_backward([runtime], synchronise=last and not runner.pipeline.splits_backward)
        elif action.what is Pass.WEIGHT:
            # stages of a rank may share parameters, and their gradients of weights come in any order
            _begin_backward(runtimes, synchronise=next(weight_passes) == last_weight_pass)

    # the gradient of a parameter that stages share may come from another stage than the one whose reducer has it
    _begin_backward(runtimes, synchronise=False)
    total = runner.step(parts, call, before, watch.goes_on)
    return total / (runtimes[-1].meshes.stage_devices // glue.batch)


def _begin_backward(runtimes: Sequence[StageRuntime], *, synchronise: bool) -> None:
    for runtime in runtimes:
        runtime.reducer.synchronise = synchronise
        runtime.reducer.begin()


def pipelined_loss(parallel: ParallelModel, parts: Sequence[Sequence[Any]]) -> Tensor:
    """Run forward passes only; arguments and result as of ``pipelined_step``."""
    calls, runtimes, last = parallel.calls, parallel.runtimes, parallel.runtimes[-1]
    ranks = last.meshes.stage_devices // last.traffic.glue.batch  # that have the same samples
    losses = _runner_of(parallel).outputs(parts, lambda chunk, part: calls.loss(runtimes[chunk], part))
    total = torch.zeros((), device=calls.device) if not losses else torch.stack([loss.float() for loss in losses]).sum()
    return total / (last.traffic.glue.batch * len(parts[0]) * ranks)


def pipelined_outputs(parallel: ParallelModel, parts: Sequence[Sequence[Any]]) -> Any:
    """The model's outputs for a batch, complete on every rank; arguments as of ``pipelined_step``.

    What is neither a tensor in a nest of mappings, tuples and lists nor a plain value (a cache) is None.
    """
    holds_samples: list[tuple[bool, ...]] = []

    def call(chunk: int, part: Any) -> Any:
        output, flags = parallel.calls.outputs(parallel.runtimes[chunk], part)
        holds_samples.append(flags)
        return output

    outputs = _runner_of(parallel).outputs(parts, call)
    value = _joined(outputs, holds_samples[-1]) if outputs else None
    group, last = parallel.runtime.meshes.pipeline, len(parallel.plan.stages) - 1
    assert group is not None
    source = dist.get_global_rank(group, pipeline_of(parallel.plan).group_of(last))
    return _broadcast(value, source, group, parallel.device)


def output_count(samples: int, plan: Plan) -> int:
    """The number of micro-batches in which the outputs of ``samples`` samples are computed."""
    unit = plan.microbatches * math.lcm(*(run.strategy.batch_degree for stage in plan.stages for run in stage.runs))
    return 1 if samples % unit else plan.microbatches


def _runner_of(parallel: ParallelModel) -> PipelineRunner:
    runner = parallel.runtime.pipeline
    assert runner is not None
    return runner


def _joined(outputs: Sequence[Any], holds_samples: Sequence[bool]) -> Any:
    """Join the outputs of micro-batches to that of the batch: concatenate tensors with samples, average others."""
    others = [tensors_of(output) for output in outputs[1:]]
    flags = iter(holds_samples)

    def join(first: Tensor) -> Tensor:
        tensors = [first, *(next(other) for other in others)]
        if next(flags):
            return torch.cat(tensors)
        return torch.stack(tensors).mean(0) if first.is_floating_point() else first

    return map_tensors(outputs[0], join)


def _broadcast(value: Any, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    shapes = [map_tensors(_plain(value), lambda tensor: torch.empty_like(tensor, device="meta"))]
    dist.broadcast_object_list(shapes, src=source, group=group, device=device)
    tensors = tensors_of(value)

    def receive(like: Tensor) -> Tensor:
        is_source = dist.get_rank() == source
        tensor = next(tensors).detach().contiguous() if is_source else torch.empty_like(like, device=device)
        dist.broadcast(tensor, src=source, group=group)
        return tensor

    return map_tensors(shapes[0], receive)


def _plain(value: Any) -> Any:
    """The value with None in place of all that is neither a tensor nor a plain value."""
    if isinstance(value, Mapping):
        items = {key: _plain(item) for key, item in value.items()}
        return type(value)(**items) if hasattr(type(value), "__dataclass_fields__") else items
    if isinstance(value, (tuple, list)):
        elements = [_plain(item) for item in value]
        return type(value)(*elements) if hasattr(value, "_fields") else type(value)(elements)
    return value if isinstance(value, (Tensor, *_PLAIN)) else None
