"""ZeRO-1 and optimizer states on the host: what an optimizer sees and holds, in a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.runtime.engine import ParallelModel
from tests.equivalence.plans import write_plan
from tests.pool import WorkerPool

SIZE, SAMPLES = 6, 8
STRATEGIES = {
    "rows": Strategy(zero=2, zero_stage=1),
    "host": Strategy(data=2, offload=Offload.STATES),
    "rows on the host": Strategy(zero=2, zero_stage=1, offload=Offload.STATES),
    "shards on the host": Strategy(zero=2, zero_stage=3, offload=Offload.STATES),
}
Loop = Callable[..., None]


class Chain(nn.Module):
    """Layers of 6, 5 and one row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(SIZE, 5), nn.Linear(5, SIZE)])
        self.head = nn.Linear(SIZE, 1)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = rows
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        loss: Tensor = self.head(hidden).square().mean()
        return loss


def make_model(transposed: bool = False) -> nn.Module:
    torch.manual_seed(1)
    model = Chain()
    if transposed:
        block = model.blocks[1]
        block.weight = nn.Parameter(block.weight.detach().t().contiguous().t())
    return model


def batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [{"rows": torch.randn(SAMPLES, SIZE, generator=draw)} for _ in range(4)]


def parallel_of(strategy: Strategy) -> ParallelModel:
    # FSDP takes no such weights
    model, (batch, *_) = make_model(transposed=strategy.zero_stage < 3), batches()
    layers = discover_layers(model, batch)
    plan = write_plan([[one.name for one in layers]], {one.name: strategy for one in layers}, devices=2, batch=SAMPLES)
    return ParallelModel(model, plan, layers, batch, device="cpu")


def accumulates(model: Any, optimizer: torch.optim.Optimizer, publish: bool) -> None:
    """Two backward passes a step; then gradients zeroed in place, changed by hand, clipped."""
    first, second, third, fourth = batches()
    for batch in (first, second):
        model(**batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model(**third).backward()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
    model(**fourth).backward()
    clip = model.clip_grad_norm if publish else lambda size: nn.utils.clip_grad_norm_(model.parameters(), size)
    clip(0.1)
    optimizer.step()
    optimizer.zero_grad()
    if publish:
        model.publish()


def synchronises_once(model: Any, optimizer: torch.optim.Optimizer, publish: bool) -> None:
    first, *others, last = batches()
    if publish:
        with model.no_sync():
            for batch in (first, *others):
                model(**batch).backward()
    else:
        for batch in (first, *others):
            model(**batch).backward()
    model(**last).backward()
    optimizer.step()
    optimizer.zero_grad()


def alone(loop: Loop) -> dict[str, Tensor]:
    model = make_model()
    loop(model, torch.optim.AdamW(model.parameters(), lr=0.05), publish=False)
    return {name: one.detach() for name, one in model.named_parameters()}


def run_loops(loops: Mapping[str, Loop]) -> dict[tuple[str, str, bool], dict[str, Tensor]]:
    found = {}
    for strategy in STRATEGIES:
        for name, loop in loops.items():
            for own in (False, True):
                parallel = parallel_of(STRATEGIES[strategy])
                make = torch.optim.AdamW
                optimizer = make(parallel.param_groups(), lr=0.05) if own else parallel.optimizer(make, lr=0.05)
                loop(parallel, optimizer, publish=True)
                found[strategy, name, own] = parallel.full_state_dict()
                _check_held(parallel, optimizer, STRATEGIES[strategy])
    return found


def _check_held(parallel: ParallelModel, optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    items, storages = 0, {id(one.parameter): one for one in parallel.runtime.owned}
    for one in storages.values():
        assert isinstance(one.reduced, DTensor) == (strategy.zero_stage > 0)
        assert (one.host is not None) == strategy.offloads_states
        local = one.reduced.to_local() if isinstance(one.reduced, DTensor) else one.reduced
        for value in optimizer.state[one.updated].values():
            held = value.to_local() if isinstance(value, DTensor) else value
            assert held.shape in ((), local.shape)
            items += held.numel() if held.dim() else 0
        if one.host is not None:
            assert one.updated is one.host.copy
            assert one.updated.untyped_storage().data_ptr() != local.untyped_storage().data_ptr()
            assert torch.equal(one.updated, local)
        elif one.share is not None:
            assert local.untyped_storage().data_ptr() == one.parameter.untyped_storage().data_ptr()
    total = torch.tensor(items)
    dist.all_reduce(total)
    copies = 2 // strategy.zero
    assert int(total) == 2 * copies * sum(one.numel() for one in make_model().parameters())


def test_loops_of_one_s_own_train_like_one_process(pool: WorkerPool) -> None:
    loops = {"accumulates": accumulates, "synchronises once": synchronises_once}
    expected = {name: alone(loop) for name, loop in loops.items()}
    for rank in pool.run(2, run_loops, loops=loops):
        for (strategy, loop, own), state in rank.items():
            for name, value in expected[loop].items():
                assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-6), f"{strategy}, {loop}, {own}: {name}"


def loads() -> None:
    parallel, (batch, *_) = parallel_of(STRATEGIES["rows on the host"]), batches()
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    start = parallel.full_state_dict()
    before = float(parallel.train_step(batch, optimizer))
    assert float(parallel(**batch)) < before
    parallel.load_full_state_dict(start)
    assert float(parallel.train_step(batch, optimizer)) == before
    assert parallel.state_dict() is not None


def test_loaded_values_reach_the_host(pool: WorkerPool) -> None:
    pool.run(2, loads)
