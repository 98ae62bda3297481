"""Training a model as a pipeline of stages. The engine uses it in this order:

1. ``find_shared`` on the whole model: parameters that layers share (embedding and head).
2. ``StageModel``: drops what belongs to other stages; then the engine shards the stage's layers. Where a rank runs
   several stages, each is made of a copy of the model's structure.
3. ``pipeline_groups`` (every rank), ``SharedCopies`` for parameters shared between stages, ``PipelineRunner``.
4. For every training step: ``PipelineRunner.step``, then ``SharedCopies.reduce``, before clipping and the optimizer.

Why not the schedules of ``torch.distributed.pipelining`` (read in torch 2.13): they keep a receive buffer for every
micro-batch of the step instead of those in flight, so 1F1B loses its memory bound; they learn shapes by running the
first micro-batch forward and backward once more, through the hooks that count micro-batches and reduce gradients; they
refuse 1F1B with fewer micro-batches than stages; and they split a batch only where it is made of tensors of equal rows.
The order of work is theirs.
"""

from __future__ import annotations

from galvatron_lite.parallelism.pipeline.runner import Chunk, PipelineRunner
from galvatron_lite.parallelism.pipeline.stage import StageModel
from galvatron_lite.parallelism.pipeline.table import Pipeline
from galvatron_lite.parallelism.pipeline.tied import SharedCopies, SharedParameter, find_shared
from galvatron_lite.parallelism.pipeline.transfer import PipelineGroups, pipeline_groups

__all__ = [
    "Chunk",
    "Pipeline",
    "PipelineGroups",
    "PipelineRunner",
    "SharedCopies",
    "SharedParameter",
    "StageModel",
    "find_shared",
    "pipeline_groups",
]
