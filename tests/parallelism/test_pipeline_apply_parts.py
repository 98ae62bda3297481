"""The parts of a pipeline: order of work, cutting a stage out of a model, shared parameters, changing shapes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import call_model, loss_of
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.pipeline.deferral import Deferral, defer_weights
from galvatron_lite.parallelism.pipeline.flow import flow_of
from galvatron_lite.parallelism.pipeline.runner import Chunk, PipelineRunner
from galvatron_lite.parallelism.pipeline.schedule import SIMPLE, Action, Pass, stage_actions
from galvatron_lite.parallelism.pipeline.stage import StageModel
from galvatron_lite.parallelism.pipeline.table import Pipeline
from galvatron_lite.parallelism.pipeline.tied import SharedCopies, find_shared
from galvatron_lite.parallelism.pipeline.transfer import pipeline_groups
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Schedule
from tests.equivalence.families import FAMILIES, build_family
from tests.pool import WorkerPool

shapes = st.tuples(st.sampled_from(SIMPLE), st.integers(1, 6), st.integers(1, 12))


def passes(schedule: Schedule, stages: int, microbatches: int) -> list[tuple[Action, ...]]:
    return [stage_actions(schedule, stages, stage, microbatches) for stage in range(stages)]


@given(shapes)
def test_1f1b_bounds_the_micro_batches_in_flight(shape: tuple[Schedule, int, int]) -> None:
    schedule, stages, microbatches = shape
    for stage, actions in enumerate(passes(*shape)):
        alive = most = 0
        for action in actions:
            alive += 1 if action.what is Pass.FORWARD else -1
            most = max(most, alive)
        assert most == (microbatches if schedule is Schedule.GPIPE else min(microbatches, stages - stage))


@pytest.mark.parametrize("family", FAMILIES)
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
