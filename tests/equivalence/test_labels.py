"""Labels that only ``loss_fn`` reads: the model takes the inputs, the batch holds both, as training loops have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite import auto_parallelize
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.parameters.full_state import full_state_dict
from galvatron_lite.verify.trial.check import try_model
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
    assert try_model(model, batch, discover_layers(model, batch)).whole
