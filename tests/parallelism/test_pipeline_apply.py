"""A pipeline of stages computes the loss and the gradients of the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.model.batch import call_model, loss_of, slice_batch
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.pipeline.runner import Chunk, PipelineRunner
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass
from galvatron_lite.parallelism.pipeline.stage import StageModel
from galvatron_lite.parallelism.pipeline.table import Pipeline
from galvatron_lite.parallelism.pipeline.tied import SharedCopies, find_shared
from galvatron_lite.parallelism.pipeline.transfer import pipeline_groups
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Schedule
from tests.equivalence.compare import assert_equal_tensors
from tests.pool import WorkerPool

SAMPLES = 8


class TupleBlock(nn.Module):
    """Returns a tuple with a tensor that carries no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, None]:
        return hidden + torch.tanh(self.linear(hidden)), steps + 1, None


class TupleModel(nn.Module):
    """Blocks that return tuples, a parameter that no layer holds, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.position = nn.Parameter(torch.randn(4, 8))
        self.blocks = nn.ModuleList(TupleBlock() for _ in range(4))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, steps = self.embed(tokens) + self.position, torch.zeros((), dtype=torch.long)
        for block in self.blocks:
            hidden, steps, _ = block(hidden, steps)
        logits = self.head(hidden) * steps
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tuple_layers() -> tuple[Layer, ...]:
    blocks = [Layer(f"blocks.{i}", "block", Role.BLOCK, (f"blocks.{i}",)) for i in range(4)]
    return (Layer("before", "before", Role.BEFORE, ("embed",)), *blocks, Layer("after", "after", Role.AFTER, ("head",)))


def tuple_case() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 16, (SAMPLES, 4))
    return TupleModel(), {"tokens": tokens, "labels": tokens.roll(1, 0)}


def cut(names: Sequence[str], sizes: Sequence[int]) -> list[list[str]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    assert ends[-1] == len(names)
    return [list(names[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def run_pipeline(sizes: Sequence[int], microbatches: int, schedule: str) -> Mapping[str, Any]:
    """One rank a stage: two steps without an optimizer, so the gradients of the second are twice the first's."""
    (model, batch), layers = tuple_case(), tuple_layers()
    stages = cut([layer.name for layer in layers], sizes)
    shared = find_shared(model, layers)
    here = dist.get_rank()
    stage = StageModel(model, layers, stages[here])
    copies = SharedCopies({here: model}, shared, stages, {layer.name: Strategy() for layer in layers})
    copies.start_equal()
    pipeline = Pipeline(Schedule(schedule), len(sizes))
    runner = PipelineRunner([Chunk(stage)], pipeline_groups(len(sizes)), pipeline, here, torch.device("cpu"))
    rows = SAMPLES // microbatches
    parts = [slice_batch(batch, start, start + rows) for start in range(0, SAMPLES, rows)]
    order: list[int] = []

    def call(_chunk: int, part: Any) -> Any:
        output = call_model(model, part)
        return loss_of(output, part) / microbatches if stage.last else output

    def note(action: Action, _last: bool) -> None:
        order.extend([action.microbatch] * (action.what is Pass.BACKWARD))

    losses = [float(runner.step([parts], call, note)) for _ in range(2)]
    copies.reduce()
    return {
        "losses": losses,
        "order": order,
        "gradients": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        "skip": copies.counted_elsewhere,
    }


@pytest.mark.parametrize(
    ("sizes", "microbatches", "schedule"), [([1, 5], 2, "gpipe"), ([2, 1, 1, 2], 8, "1f1b"), ([1, 2, 2, 1], 2, "1f1b")]
)
def test_tuple_model(pool: WorkerPool, sizes: list[int], microbatches: int, schedule: str) -> None:
    results = pool.run(len(sizes), run_pipeline, sizes=sizes, microbatches=microbatches, schedule=schedule)
    model, batch = tuple_case()
    loss = loss_of(call_model(model, batch), batch)
    loss.backward()
    assert results[-1]["losses"] == pytest.approx([float(loss.detach())] * 2, rel=1e-5)
    assert all(result["losses"] == [0.0, 0.0] for result in results[:-1])
    assert all(result["order"] == [*range(microbatches)] * 2 for result in results)
    found: dict[str, Tensor] = {}
    for result in results:
        # SharedCopies sums the copies once, after two steps: every gradient is twice the whole model's
        halves = {name.replace("head", "embed"): gradient / 2 for name, gradient in result["gradients"].items()}
        both = found.keys() & halves.keys()
        assert_equal_tensors({name: halves[name] for name in both}, {name: found[name] for name in both})
        found |= halves
    assert_equal_tensors(found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert [bool(result["skip"]) for result in results] == [False] * (len(sizes) - 1) + [True]
