"""ZeRO-1 in low precision: weights are held in it, and float32 masters of each rank's rows alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from galvatron_lite.errors import InputError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.engine import ParallelModel
from tests.equivalence.plans import write_plan
from tests.pool import WorkerPool

SIZE, SAMPLES = 6, 8
ZERO1, DATA, ZERO3 = Strategy(zero=2, zero_stage=1), Strategy(data=2), Strategy(zero=2, zero_stage=3)
HOST = replace(ZERO1, offload=Offload.STATES)
OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "fused": lambda groups, **options: torch.optim.AdamW(groups, fused=True, **options),
    "foreach": lambda groups, **options: torch.optim.Adam(groups, foreach=True, **options),
    "sgd": lambda groups, **options: torch.optim.SGD(groups, momentum=0.9, **options),
    "rmsprop": torch.optim.RMSprop,
}


class Chain(nn.Module):
    """Layers of 6, 5 and one row, one of them frozen and two used twice; a scale that no rank has a share of, and a
    batch norm, which wants its weight in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(SIZE, 5), nn.Linear(5, SIZE), nn.Linear(SIZE, SIZE)])
        self.blocks[2].weight.requires_grad_(False)
        self.scale, self.norm = nn.Parameter(torch.tensor(0.7)), nn.BatchNorm1d(SIZE)
        self.head = nn.Linear(SIZE, 1)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = rows
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        for block in self.blocks[:2]:
            hidden = nn.functional.linear(self.norm(hidden) if block is self.blocks[0] else hidden, block.weight)
        return (self.head(hidden * self.scale).float() - rows[:, :1].float()).square().mean()


def batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [{"rows": torch.randn(SAMPLES, SIZE, generator=draw)} for _ in range(2)]


def plan_of(strategy: Strategy, microbatches: int = 1) -> Plan:
    layers = discover_layers(Chain(), batches()[0])
    names = [layer.name for layer in layers]
    return write_plan([names], dict.fromkeys(names, strategy), devices=2, batch=SAMPLES, microbatches=microbatches)


def parallel_of(strategy: Strategy, precision: str = "bf16", microbatches: int = 1, *, normed: bool = True) -> Any:
    torch.manual_seed(1)
    model, (batch, *_) = Chain(), batches()
    if not normed:
        model.norm = nn.Identity()
    plan = replace(plan_of(strategy, microbatches), precision=precision)
    return ParallelModel(model, plan, discover_layers(model, batch), batch, device="cpu")


def trained(parallel: Any, optimizer: torch.optim.Optimizer, clip: float | None = None) -> list[float]:
    return [float(parallel.train_step(batch, optimizer, max_grad_norm=clip)) for batch in batches()]


def results() -> Iterator[tuple[str, list[float], dict[str, Tensor]]]:
    kinds = [(name, "bf16", 1 + number % 2, None) for number, name in enumerate(OPTIMIZERS)]
    for name, precision, microbatches, clip in [*kinds, ("adamw", "fp16", 2, None), ("sgd", "bf16", 2, 0.1)]:
        for strategy in (DATA, ZERO1):
            parallel = parallel_of(strategy, precision, microbatches)
            losses = trained(parallel, parallel.optimizer(OPTIMIZERS[name], lr=0.05), clip)
            yield f"{precision} {name}{' clipped' * (clip is not None)}", losses, parallel.full_state_dict()


def run_all() -> list[tuple[str, list[float], dict[str, Tensor]]]:
    return list(results())


def test_training_is_that_of_replicas_with_float32_parameters_to_the_last_bit(pool: WorkerPool) -> None:
    """Sums over two ranks are the same in any order, and every weight is cast from the same float32 values."""
    for rank in pool.run(2, run_all):
        for (name, losses, state), (_, found, masters) in zip(rank[::2], rank[1::2], strict=True):
            if name.endswith("clipped"):  # norms are summed in another order
                assert found == pytest.approx(losses, rel=1e-3)
                continue
            assert found == losses, name
            assert all(torch.equal(masters[key], value) for key, value in state.items()), name
            assert all(value.dtype is torch.float32 for key, value in masters.items() if "batches" not in key)


def holds() -> None:
    parallel = parallel_of(ZERO1)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.05)
    trained(parallel, optimizer)
    wide = set[str]()
    for one in parallel.runtime.owned:
        (name, *_), narrow = one.names, one.parameter.dtype is torch.bfloat16
        assert one.updated.dtype is torch.float32
        if not narrow:
            wide.add(name)
            continue
        assert isinstance(one.held, DTensor)
        assert one.held is one.updated
        rows = one.held.to_local()
        assert rows.untyped_storage().nbytes() == rows.numel() * 4  # of its own, no more than the rows
        assert torch.equal(one.share.of(one.parameter), rows.bfloat16())
        assert all(value.to_local().shape == rows.shape for value in optimizer.state[one.held].values() if value.dim())
    norms = {"norm.weight", "norm.bias"}
    biases = {name for name, _ in parallel.module.named_parameters() if name.endswith("bias")}
    assert wide == norms | biases | {"scale", "blocks.2.weight"}
    buckets = {buffer.dtype for buffer in parallel.runtime.reducer.buffers}
    assert buckets == {torch.float32}


def test_ranks_hold_masters_of_their_rows_alone(pool: WorkerPool) -> None:
    pool.run(2, holds)


def moved(folder: Path) -> None:
    """A checkpoint, and a switch, from and to every way to hold states."""
    for number, (one, other) in enumerate(
        [(ZERO1, DATA), (DATA, ZERO1), (ZERO1, ZERO3), (HOST, ZERO1), (ZERO1, ZERO1)]
    ):
        parallel = parallel_of(one, normed=False)  # FSDP would gather the norm's weight in bf16
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.05)
        trained(parallel, optimizer)
        place, state = folder / str(number), parallel.full_state_dict()
        parallel.save(place, optimizer)
        again = parallel_of(other, normed=False)
        loaded = again.optimizer(torch.optim.AdamW, lr=0.3)
        again.load(place, loaded)
        parallel.switch(replace(plan_of(other), precision="bf16"), optimizer)
        for held in (again, parallel):
            found = held.full_state_dict()
            assert all(torch.equal(found[name], value) for name, value in state.items()), (one, other)
        follow = trained(again, loaded, 0.1), trained(parallel, optimizer, 0.1)
        assert follow[0] == follow[1], (one, other)
        ends = again.full_state_dict(), parallel.full_state_dict()
        assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items()), (one, other)


def test_checkpoints_and_switches_carry_masters_to_the_last_bit(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, moved, folder=tmp_path)


def changed() -> None:
    parallel, (batch, *_) = parallel_of(ZERO1), batches()
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.05)
    before = parallel.full_state_dict()
    averaged = AveragedModel(parallel)
    averaged.update_parameters(parallel)
    trained(parallel, optimizer)
    averaged.update_parameters(parallel)
    after, means = parallel.full_state_dict(), averaged.module.full_state_dict()
    for name, _ in parallel.module.named_parameters():
        torch.testing.assert_close(means[name], (before[name] + after[name]) / 2, rtol=1e-6, atol=1e-7)
    assert all(torch.equal(parallel.full_state_dict()[name], value) for name, value in after.items())

    parallel.load_full_state_dict(before)
    assert all(torch.equal(parallel.full_state_dict()[name], value) for name, value in before.items())
    assert torch.equal(parallel.module.head.weight, before["head.weight"].bfloat16())
    with torch.no_grad():
        for one in parallel.parameters():
            one.clamp_(-0.1, 0.1)
    parallel.outputs(batch)
    assert torch.equal(parallel.module.head.weight, before["head.weight"].clamp(-0.1, 0.1).bfloat16())

    with torch.no_grad(), pytest.raises(InputError, match=r"parallel\.outputs"):
        parallel.module(**batch)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert parallel.module(**batch).isfinite()
    with pytest.warns(UserWarning, match="precision of compute"):
        state = parallel.state_dict()
    parallel.load_state_dict(state)
    with pytest.raises(InputError, match="load_full_state_dict"):
        parallel(**batch)


def test_what_is_changed_between_steps_is_followed_or_refused(pool: WorkerPool) -> None:
    pool.run(2, changed)
