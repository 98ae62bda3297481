"""Labels that are shared out, models on meta, and the comparison itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite import auto_parallelize
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.zoo.gpt import initialise
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.parameters.full_state import full_state_dict
from galvatron_lite.verify.trial.check import try_model
from tests.equivalence.compare import assert_equal_tensors
from tests.equivalence.families import build_model, make_batches
from tests.equivalence.features import features
from tests.equivalence.plans import describe, uniform_plan
from tests.equivalence.test_plans import case_of, graph_of, sampled
from tests.equivalence.training import SAMPLES, Case
from tests.pool import WorkerPool
from tests.runtime.plans import make_plan

STEPS = 3
BEFORE, BLOCKS, AFTER = ["before"], [f"blocks.{index}" for index in range(4)], ["after"]
PLANS = {
    "data": ("mapping", Strategy(data=2)),
    "zero": ("tuple", Strategy(zero=2, zero_stage=3)),
    "tensor": ("mapping", Strategy(tensor=2)),
    "pipeline": ("tuple", Strategy()),
}
ENTRIES = {"mapping": ("tokens", "classes"), "tuple": (0, 1)}


class Classifier(nn.Module):
    """Knows nothing of labels; its own forward scales what blocks give, by parameters in a list that never runs."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(4 * scaled))
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            hidden = hidden * self.scales[number] if self.scales else hidden
        logits: Tensor = self.head(hidden.mean(1))
        return logits


def made(form: str, scaled: bool) -> tuple[Classifier, Any, Any]:
    torch.manual_seed(0)
    inputs, labels = ENTRIES[form]
    tensors = {inputs: torch.randint(16, (4, 6)), labels: torch.randint(3, (4,))}
    batch = tensors if form == "mapping" else tuple(tensors.values())
    return Classifier(scaled), batch, lambda output, batch: functional.cross_entropy(output, batch[labels])


def trained_alone(scaled: bool) -> dict[str, Tensor]:
    model, batch, loss_fn = made("mapping", scaled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_fn(model(batch["tokens"]), batch).backward()
        optimizer.step()
    return dict(model.state_dict())


def plan_of(name: str, strategy: Strategy) -> Plan:
    layers = [*BEFORE, *BLOCKS, *AFTER]
    stages = [layers[:3], layers[3:]] if name == "pipeline" else [layers]
    return make_plan(stages, [[strategy] * len(stage) for stage in stages], 4, microbatches=2)


def trained() -> dict[str, dict[str, Tensor]]:
    states = {}
    for name, (form, strategy) in PLANS.items():
        model, batch, loss_fn = made(form, scaled=name != "pipeline")
        parallel: Any = auto_parallelize(model, batch, plan=plan_of(name, strategy), loss_fn=loss_fn)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.5)
        for _ in range(STEPS):
            parallel.train_step(batch, optimizer)
        states[name] = full_state_dict(parallel)
    return states


def test_labels_reach_the_loss_under_every_plan(pool: WorkerPool) -> None:
    for name, state in pool.run(2, trained)[0].items():
        for path, tensor in trained_alone(scaled=name != "pipeline").items():
            torch.testing.assert_close(state[path], tensor, rtol=1e-4, atol=1e-5, msg=f"{name}: {path}")


def test_an_entry_that_nothing_reads_is_named() -> None:
    model, batch, loss_fn = made("mapping", scaled=False)
    layers = discover_layers(model, batch)
    assert try_model(model, batch, layers, loss_fn=loss_fn).warnings() == []
    (line,) = try_model(model, {**batch, "masks": torch.ones(4, 6)}, layers, loss_fn=loss_fn).warnings()
    assert "takes masks of the batch" in line


def train_from_meta(work: list[tuple[Case, list[Plan]]]) -> list[list[list[float]]]:
    """Losses of two steps under each plan of each family."""
    return [[_losses(case, plan) for plan in plans] for case, plans in work]


def _losses(case: Case, plan: Plan) -> list[float]:
    with torch.device("meta"):
        model: nn.Module = build_model(case.family)
    own_rule = hasattr(model, "_init_weights")
    parallel = case.parallel(plan, model, seed=3, init_fn=None if own_rule else initialise)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    return [float(parallel.train_step(batch, optimizer)) for batch in make_batches(case.family, SAMPLES, 2)]


def test_training_from_meta(pool: WorkerPool) -> None:
    families = ("zoo-gpt", "qwen2")
    alone = [(case_of(family), sampled(family, 1, 1)) for family in families]
    expected = [losses for (losses,) in pool.run(1, train_from_meta, work=alone)[0]]
    for world, count in ((2, 1), (4, 1)):
        work = [(case_of(family), sampled(family, world, count, first=200)) for family in families]
        for results in pool.run(world, train_from_meta, work=work):
            for (_, plans), found, wanted in zip(work, results, expected, strict=True):
                for plan, losses in zip(plans, found, strict=True):
                    assert losses == pytest.approx(wanted, rel=1e-5), describe(plan)


def test_a_plan_is_known_by_what_it_uses() -> None:
    """Every name is told of a plan that uses it, and not of one that splits nothing."""
    graph = graph_of("plain")
    ring = Strategy(zero=2, zero_stage=1, context=2, offload=Offload.STATES)
    assert features(uniform_plan(graph, Strategy(), batch=4)) == set()
    found = features(uniform_plan(graph, ring, ring, batch=4, microbatches=2))
    assert found == {"zero 1", "context", "offload states", "micro-batches"}
    heads = Strategy(context=2, ulysses=True, expert=2, offload=Offload.ALL)
    assert features(uniform_plan(graph, heads, heads, batch=4)) == {
        "ulysses", "expert", "offload states", "offload activations",
    }  # fmt: skip


def test_small_differences_are_found() -> None:
    reference = {"a": torch.tensor([1.0, 100.0]), "b": torch.tensor([0.01, 0.002])}
    assert_equal_tensors({name: tensor.clone() for name, tensor in reference.items()}, reference)
    assert_equal_tensors(reference | {"a": reference["a"] + 9e-4}, reference)
    with pytest.raises(AssertionError, match="a: off by"):
        assert_equal_tensors(reference | {"a": reference["a"] + 2e-3}, reference)
    with pytest.raises(AssertionError, match="b: off by"):
        assert_equal_tensors(reference | {"b": reference["b"] * 1.01}, reference)
    with pytest.raises(AssertionError, match="b: off by"):
        assert_equal_tensors(reference | {"b": reference["b"] * float("nan")}, reference)
    with pytest.raises(AssertionError, match="names"):
        assert_equal_tensors({"a": reference["a"]}, reference)


def test_a_parameter_of_the_loss_function_is_named() -> None:
    model, batch, loss_fn = made("mapping", scaled=False)
    scale = nn.Parameter(torch.ones(3))
    layers = discover_layers(model, batch)
    (line,) = try_model(model, batch, layers, loss_fn=lambda out, batch: loss_fn(out * scale, batch)).warnings()
    assert "that the model does not hold (of shape [3])" in line


class Graph(nn.Module):
    """Nodes of all graphs in one tensor, and edges that number them."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(4, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return nodes.index_add(0, edges[0], self.message(nodes[edges[1]])).square().mean()


def test_rows_that_number_others_keep_the_batch_whole() -> None:
    model, batch = Graph(), {"nodes": torch.randn(8, 4), "edges": torch.tensor([[0, 7, 6], [7, 1, 5]])}
    assert try_model(model, batch, discover_layers(model, batch)).undivided


class Codebook(nn.Module):
    """Keeps the mean of the samples of each class, and counts samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("codes", torch.zeros(8, 4))
        self.register_buffer("hits", torch.zeros(8))

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:
        with torch.no_grad():
            members = functional.one_hot(classes, 8).float()
            self.codes += members.T @ inputs / members.sum(0).clamp(min=1)[:, None]
            self.hits += members.sum(0)
        return (self.linear(inputs) - inputs).square().mean()


def test_what_only_one_share_updates_is_no_sum() -> None:
    model, batch = Codebook(), {"inputs": torch.randn(8, 4), "classes": torch.arange(8)}
    assert try_model(model, batch, discover_layers(model, batch)).synced == {"hits": "sum"}
