"""Compiled blocks: equal to not compiled, beside all that is put around blocks; what is told; what falls back."""

from __future__ import annotations

import re
import warnings
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute, Role
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import LayerRun, Plan, Schedule, Stage
from galvatron_lite.runtime import compiled
from galvatron_lite.runtime.assignment import LayerAssignment
from galvatron_lite.runtime.compiled import check_compile
from tests.pool import WorkerPool
from tests.runtime.plans import split_model

SIZE, SAMPLES = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
        self.drop = nn.Dropout(0.25)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
        return hidden + self.drop(self.down(torch.relu(self.up(hidden))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = rows
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


STRATEGIES = [
    Strategy(zero=2, zero_stage=3, offload=Offload.ACTIVATIONS),
    Strategy(zero=2, zero_stage=1, recompute=Recompute.SELECTIVE),
    Strategy(tensor=2, recompute=Recompute.FULL),
    Strategy(tensor=2, sequence_parallel=True, recompute=Recompute.SELECTIVE),
]


def trained(strategy: Strategy, wanted: bool | str) -> tuple[list[float], dict[str, Tensor], Any]:
    torch.manual_seed(1)
    model, batch = Net(), {"rows": torch.randn(SAMPLES, 4, SIZE)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        parallel = split_model(model, batch, strategy, compile=wanted)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        losses = [float(parallel.train_step(batch, optimizer)) for _ in range(3)]
    said = [str(one.message) for one in told if re.search("compiled|does not compile", str(one.message))]
    return losses, parallel.full_state_dict(), said


def equal_under_strategies() -> None:
    for strategy in STRATEGIES:
        losses, state, _ = trained(strategy, False)
        found, same, said = trained(strategy, "aot_eager")
        assert not said, f"{strategy}: {said}"
        assert found == pytest.approx(losses, rel=1e-5), str(strategy)
        for name, value in state.items():
            assert torch.allclose(same[name], value, atol=1e-6), f"{strategy}: {name}"


def test_compiled_blocks_train_alike(pool: WorkerPool) -> None:
    pool.run(2, equal_under_strategies)


def falls_back() -> None:
    from torch._dynamo import register_backend  # takes seconds to import

    def refuses(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("this graph is too odd")

    register_backend(refuses)
    losses, state, _ = trained(Strategy(), False)
    found, same, said = trained(Strategy(), "refuses")
    assert found == losses
    assert all(torch.equal(same[name], value) for name, value in state.items())
    assert len(said) == 1
    assert said[0].startswith("blocks.0 does not compile, and runs as it is (")
    with patch.object(compiled, "DEFAULT", "aot_eager"):
        found, same, (line,) = trained(Strategy(), "auto")
    assert found == pytest.approx(losses, rel=1e-5)
    assert "ms compiled" in line
    assert float(same["blocks.0.calls"]) == 3


def test_a_block_that_does_not_compile_and_one_that_is_measured(pool: WorkerPool) -> None:
    pool.run(1, falls_back)


def test_backends_are_checked() -> None:
    assert [check_compile(wanted) for wanted in (False, True, "auto", "eager")] == ["", "inductor", "auto", "eager"]
    with pytest.raises(InputError, match="inductor"):
        check_compile("indcutor")


@pytest.mark.parametrize("version", ["2.11.0+cpu", "2.12.0", "2.13.0"])
@pytest.mark.parametrize("strategy", [Strategy(tensor=2), Strategy(data=2)])
@pytest.mark.parametrize("wanted", [True, "auto", "aot_eager", "eager"])
def test_torch_that_compiles_tensor_parallel_blocks_wrong_is_refused(
    version: str, strategy: Strategy, wanted: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage((LayerRun("0", "1", 2, strategy),))
    plan = Plan(1, "net", 2, 4, 1, Schedule.ONE_F_ONE_B, "fp32", (stage,))
    monkeypatch.setattr(torch, "__version__", version)
    assert check_compile(False, plan) == ""
    if version.startswith("2.11") and strategy.tensor > 1 and wanted == "eager":
        with pytest.raises(InputError, match=r"compile: .*2\.11.*2\.12"):
            check_compile(wanted, plan)
    else:
        assert check_compile(wanted, plan)


def test_blocks_that_share_tokens_or_pixels_run_as_they_are() -> None:
    model = Net()
    layers = discover_layers(model, {"rows": torch.randn(SAMPLES, 4, SIZE)})
    shares = [Strategy(context=2), Strategy(height=2)]
    blocks = [one for one in layers if one.role is Role.BLOCK]
    stage = [LayerAssignment(one, share) for one, share in zip(blocks, shares, strict=True)]
    forwards = [block.forward for block in model.blocks]
    compiled.compile_blocks(model, stage, Mock(), "eager")
    assert [block.forward for block in model.blocks] == forwards
