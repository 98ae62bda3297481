"""Blocks that share modules, or parameters alone, train under ordinary plans as on one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.full_state import full_state_dict
from tests.pool import WorkerPool
from tests.runtime.plans import make_plan

SAMPLES, WIDTH, STEPS = 4, 8, 2
CASES = [("modules", 2, Strategy()), ("modules", 1, Strategy(zero=2, zero_stage=3)), ("parameters", 2, Strategy()),
         ("parameters", 1, Strategy(tensor=2))]  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        residual: Tensor = self.down(torch.relu(self.up(self.norm(hidden))))
        return hidden + residual


class Model(nn.Module):
    """Four blocks; the last two have norms of their own and linears, or weights of linears, of the first two."""

    def __init__(self, what: str) -> None:
        super().__init__()
        blocks = [Block() for _ in range(4)]
        for first, second in zip(blocks[:2], blocks[2:], strict=True):
            if what == "modules":
                second.up, second.down = first.up, first.down
            else:
                second.up.weight, second.down.weight = first.up.weight, first.down.weight
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, 3)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden), labels)


def made(what: str) -> tuple[Model, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Model(what), (torch.randn(SAMPLES, WIDTH), torch.randint(3, (SAMPLES,)))


def trained_alone(what: str) -> dict[str, Tensor]:
    model, batch = made(what)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
    return dict(model.state_dict())


def trained(what: str, stages: int, strategy: Strategy) -> dict[str, Tensor]:
    model, batch = made(what)
    layers = discover_layers(model, batch)
    names = [layer.name for layer in layers]
    cut = len(names) // stages
    parts = [names[:cut], names[cut:]] if stages > 1 else [names]
    plan = make_plan(parts, [[strategy] * len(part) for part in parts], SAMPLES)
    parallel = ParallelModel(model, plan, layers, batch, device="cpu")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.5)
    for _ in range(STEPS):
        parallel.train_step(batch, optimizer)
    return full_state_dict(parallel)


def each_trained() -> list[dict[str, Tensor]]:
    return [trained(*case) for case in CASES]


def test_weights_are_those_of_one_process(pool: WorkerPool) -> None:
    for (what, *how), state in zip(CASES, pool.run(2, each_trained)[0], strict=True):
        for path, tensor in trained_alone(what).items():
            torch.testing.assert_close(state[path], tensor, rtol=1e-5, atol=1e-6, msg=f"{what}, {how}: {path}")


@pytest.mark.parametrize(("what", "reason"), [("modules", "Another layer holds its down"), ("parameters", "")])
def test_modules_of_several_blocks_are_not_split(what: str, reason: str) -> None:
    graph = trace(*made(what))
    (kind,) = {layer.kind for layer in graph.layers if layer.kind.startswith("block")}
    assert (graph.kinds[kind].tensor_degrees == 1) is bool(reason)
    assert reason in graph.kinds[kind].tensor_reason
