"""A pipeline of stages computes the loss and the gradients of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import call_model, loss_of, slice_batch
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.context.rules import RING_RULES
from galvatron_lite.parallelism.pipeline.deferral import Deferral, defer_weights
from galvatron_lite.parallelism.pipeline.flow import flow_of
from galvatron_lite.parallelism.pipeline.runner import Chunk, PipelineRunner, pipeline_groups
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass, schedule_named
from galvatron_lite.parallelism.pipeline.stage import StageModel
from galvatron_lite.parallelism.pipeline.table import Pipeline
from galvatron_lite.parallelism.pipeline.tied import SharedCopies, find_shared
from galvatron_lite.parallelism.precision import compute_context, holding_copies, narrow_experts
from galvatron_lite.parallelism.sharded.collectives import distribute
from galvatron_lite.parallelism.sharded.groups import ShapeOnlyAxisGroup
from galvatron_lite.parallelism.sharded.tensor import ShardSpec, to_local
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Schedule
from tests.equivalence.compare import assert_equal_tensors
from tests.equivalence.families import build_family
from tests.pool import WorkerPool

SAMPLES, CPU = 8, torch.device("cpu")


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
    pipeline = Pipeline(schedule_named(schedule), len(sizes))
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
def test_a_model_whose_layers_pass_tuples(pool: WorkerPool, sizes: list[int], microbatches: int, schedule: str) -> None:
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


@pytest.mark.parametrize("own", [[], ["nowhere"], ["before", "after"], ["after", "before"]])
def test_stage_of_unknown_or_scattered_layers_is_refused(own: list[str]) -> None:
    model, _, layers = build_family("plain", 2)
    with pytest.raises(InputError, match="consecutive"):
        StageModel(model, layers, own)


def test_shared_parameters_are_found_under_all_names() -> None:
    model, _, layers = build_family("bert", 2)
    (shared,) = find_shared(model, layers)
    assert shared.names == ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight")
    assert shared.layers == ("before", "after")


def unlike_shared(stages: int) -> str:
    model, _, layers = build_family("zoo-gpt", 2)
    names = [layer.name for layer in layers]
    strategies = {name: Strategy() for name in names} | {"after": Strategy(tensor=2)}
    with pytest.raises(InputError) as caught:
        SharedCopies({dist.get_rank(): model}, find_shared(model, layers), [names[:3], names[3:]], strategies)
    return str(caught.value)


def test_shared_parameters_need_equal_strategies(pool: WorkerPool) -> None:
    message = pool.run(2, unlike_shared, stages=2)[0]
    assert "strategy of after" in message
    assert "embed.weight" in message


class LateReader(nn.Module):
    """Reads a parameter that no layer holds before the blocks, and again behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, value: Tensor) -> Tensor:
        hidden = value * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return (hidden * self.scale).mean()


def test_parameter_read_behind_the_blocks_makes_the_loss_nan_not_wrong() -> None:
    model = LateReader()
    blocks = [Layer(f"blocks.{i}", "block", Role.BLOCK, (f"blocks.{i}",)) for i in range(2)]
    layers = (Layer("before", "before", Role.BEFORE), *blocks, Layer("after", "after", Role.AFTER))
    stage = StageModel(model, layers, ["blocks.1", "after"])
    stage.attach()
    loss = stage.run(lambda: model(torch.ones(2, 4)), torch.ones(2, 4))
    assert bool(loss.isnan())


def lengths_change(lengths: Sequence[int]) -> list[float]:
    torch.manual_seed(0)
    model, _, layers = build_family("llama", 4)
    names = [layer.name for layer in layers]
    here = dist.get_rank()
    stage = StageModel(model, layers, [names[:3], names[3:]][here])
    pipeline = Pipeline(Schedule.ONE_F_ONE_B, 2)
    runner = PipelineRunner([Chunk(stage)], pipeline_groups(2), pipeline, here, torch.device("cpu"))

    def call(_chunk: int, part: Any) -> Any:
        output = call_model(model, part)
        return loss_of(output, part) / 2 if stage.last else output

    losses = []
    for length in lengths:
        ids = token_ids(length)
        halves = [{"input_ids": half, "labels": half} for half in ids.chunk(2)]
        losses.append(float(runner.step([halves], call)))
    return losses


def token_ids(length: int) -> Tensor:
    return torch.randint(0, 64, (4, length), generator=torch.Generator().manual_seed(length))


def test_sequence_lengths_may_change_between_steps(pool: WorkerPool) -> None:
    lengths = [8, 16, 8, 5]
    model, _, _ = build_family("llama", 4)
    expected = [
        float(loss_of(call_model(model, {"input_ids": ids, "labels": ids}), None).detach())
        for ids in map(token_ids, lengths)
    ]
    assert pool.run(2, lengths_change, lengths=lengths)[1] == pytest.approx(expected, rel=1e-5)


class Pair(nn.Linear):
    """Returns a tuple, as layers of transformers do."""

    def forward(self, value: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (value + super().forward(value),)


class Alternating(nn.Module):
    """Layers that return tensors, and tuples, which the code between them takes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((nn.Linear(6, 4), Pair(4, 4), nn.Linear(4, 2), Pair(2, 2)))

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            made = block(value)
            value = made[0] if isinstance(block, Pair) else made.view(made.shape)
        return value.square().mean()


def test_modules_of_earlier_stages_return_what_is_taken_apart_as_theirs() -> None:
    torch.manual_seed(0)
    whole, batch = Alternating(), torch.randn(6, 6)
    layers = tuple(Layer(f"blocks.{i}", f"kind{i}", Role.BLOCK, (f"blocks.{i}",)) for i in range(4))
    flow = flow_of(whole, layers, (batch,))
    assert flow.is_chain
    received: Any = None
    for layer in layers:
        model = copy.deepcopy(whole)
        stage = StageModel(model, layers, [layer.name], flow=flow)
        stage.attach()
        received = stage.run(lambda model=model: model(batch), received)
    assert received == whole(batch)


class InPlace(nn.Module):
    """Writes to what a linear layer gave, which is a view where there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        hidden *= self.scale
        hidden += 1
        return hidden.square().sum()


def test_results_may_be_written_to() -> None:
    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(2, 3, 4)
    alone = copy.deepcopy(model)
    alone(x).backward()
    deferral = Deferral()
    defer_weights(model, deferral)
    model(x).backward()
    assert model.linear.weight.grad is None
    for task in deferral.take():
        task()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Reading(nn.Module):
    """Multiplies by a memory that is no linear layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.memory.T)


def test_gradients_of_products_of_split_tokens_are_left_too() -> None:
    model, x, deferral = Reading(), torch.randn(2, 4, 4), Deferral()
    alone = copy.deepcopy(model)
    defer_weights(model, deferral)
    output = to_local(model(distribute(x, (ShardSpec(1, 4, ShapeOnlyAxisGroup(2)),), RING_RULES)))
    expected = alone(x[:, :2])
    torch.testing.assert_close(output, expected)
    (output.sum() + expected.sum()).backward()
    assert model.memory.grad is None
    (task,) = deferral.take()
    task()
    torch.testing.assert_close(model.memory.grad, alone.memory.grad)


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_gradients_of_stacked_experts_are_left_too(compute: torch.dtype | None) -> None:
    """Over two micro-batches, which share the experts' copies in bf16."""
    model, batch, layers = build_family("mixtral", 4)
    alone = copy.deepcopy(model)
    for one in (model, alone):
        narrow_experts(one)
    deferral = Deferral()
    blocks = [model.get_submodule(path) for layer in layers if layer.role is Role.BLOCK for path in layer.modules]
    for block in blocks:
        defer_weights(block, deferral)
    experts = [name for name, one in model.named_parameters() if one.dim() == 3]
    assert experts
    for one in (model, alone):
        with holding_copies(compute, CPU):
            for start in (0, 2):
                with compute_context(compute, CPU):
                    loss = loss_of(call_model(one, slice_batch(batch, start, start + 2)), None, None)
                loss.backward()
            assert one is alone or all(model.get_parameter(name).grad is None for name in experts)
            for task in deferral.take():
                task()
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.grad, alone.get_parameter(name).grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["zoo-gpt", "bert", "mixtral"])
def test_stages_hold_every_parameter_once(family: str) -> None:
    whole, _, layers = build_family(family, 2)
    expected = {name for name, _ in whole.named_parameters(remove_duplicate=False)}
    names = [layer.name for layer in layers]
    held: list[str] = []
    for own in (names[:2], names[2:3], names[3:]):
        model, _, _ = build_family(family, 2)
        StageModel(model, layers, own)
        held += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert sorted(held) == sorted(expected)
