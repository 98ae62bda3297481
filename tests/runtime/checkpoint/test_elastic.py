"""The same script, launched again with another number of processes, plans anew and goes on as one process would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite import auto_parallelize
from galvatron_lite.model.zoo import build
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.store import write_profile
from tests.factories import make_cluster
from tests.pool import WorkerPool
from tests.runtime.plans import losses_alone

SAMPLES, TOKENS, VOCAB = 8, 8, 32
ADAMW = {"lr": 1e-2, "eps": 1e-4}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return build("gpt-tiny", vocab=VOCAB, layers=2, hidden=32, sequence=TOKENS)


def batch_of(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def estimate(folder: str) -> None:
    """A profile of each number of processes, as measuring would leave them."""
    from galvatron_lite.capture.trace import trace

    graph = trace(make_model(), batch_of(0))
    for world in (1, 2, 4):
        profile = estimate_profile(graph, make_cluster(world), precision="fp32", name="tiny")
        write_profile(profile, Path(folder, f"{world}.yaml"))


def script(folder: str, steps: int) -> tuple[int, list[float], dict[str, Tensor], str]:
    """What a user launches: the first step, the losses, the weights, the plan."""
    parallel: Any = auto_parallelize(make_model(), batch_of(0), profile=Path(folder, f"{dist.get_world_size()}.yaml"))
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    parallel.load_latest(Path(folder, "checkpoints"), optimizer)
    first, losses = parallel.step, []
    while parallel.step < steps:
        losses.append(float(parallel.train_step(batch_of(parallel.step), optimizer)))
        parallel.save(Path(folder, "checkpoints", f"step-{parallel.step}"), optimizer, asynchronous=True, keep=2)
    parallel.finish_saving()
    return first, losses, parallel.full_state_dict(), f"{parallel.plan.devices} devices"


def trained_alone(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)  # type: ignore[arg-type]
    losses = losses_alone(model, optimizer, map(batch_of, range(steps)))
    return losses, dict(model.state_dict())


def test_two_processes_then_one_then_four(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, estimate, folder=str(tmp_path))
    losses: list[float] = []
    for world, steps in ((2, 2), (1, 4), (4, 6)):
        first, found, state, plan = pool.run(world, script, folder=str(tmp_path), steps=steps)[0]
        assert (first, plan) == (steps - 2, f"{world} devices")
        losses += found
    wanted, whole = trained_alone(6)
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)
    for name, value in whole.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
    assert sorted(one.name for one in Path(tmp_path, "checkpoints").iterdir()) == ["step-5", "step-6"]
