"""Our plans beside hand-written DDP, FSDP2 and tensor parallelism of the same shape; run by ``scripts/baselines``."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from galvatron_lite import auto_parallelize
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from galvatron_lite.world import join, leave, rank
from measured import spread_of, step_seconds
from quickstart_model import BATCH, CONFIG, batches, make

ROUNDS = 10
STEPS_A_ROUND = 3
LEARNING_RATE = 1e-3

Step = Callable[[], object]


def plain_step(module: nn.Module, rows: slice) -> Step:
    """A training step as one would write it by hand, on this rank's rows."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    batch = {name: tensor[rows] for name, tensor in next(batches(1)).items()}

    def step() -> None:
        loss: Tensor = module(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def own_rows() -> slice:
    """This rank's share of the batch."""
    share = BATCH // dist.get_world_size()
    return slice(rank() * share, (rank() + 1) * share)


def by_ddp() -> Step:
    """torch's DistributedDataParallel."""
    return plain_step(DistributedDataParallel(make()[0], gradient_as_bucket_view=True), own_rows())


def by_fsdp2() -> Step:
    """torch's fully_shard on every block and the root, parameters freed after forward."""
    model = make()[0]
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return plain_step(model, own_rows())


def by_parallelize_module() -> Step:
    """torch's tensor parallelism on attention, MLP, embedding and head."""
    model = make()[0]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    column, row = ColwiseParallel(), RowwiseParallel()
    plan = {f"attention.{name}_proj": column for name in "qkv"} | {"attention.o_proj": row}
    for block in model.blocks:
        parallelize_module(block, mesh, plan | {"mlp.up_proj": column, "mlp.down_proj": row})
    edges = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh, edges)
    return plain_step(model, slice(None))


def by_plan(strategy: Strategy) -> Step:
    """The same shape as one of our plans."""
    model, batch = make()
    last = CONFIG.layers - 1
    runs = (
        LayerRun("before", "before", 1, strategy),
        LayerRun("blocks.0", f"blocks.{last}", CONFIG.layers, strategy),
        LayerRun("after", "after", 1, strategy),
    )
    plan = Plan(PLAN_VERSION, "gpt", strategy.devices, BATCH, 1, Schedule.ONE_F_ONE_B, "fp32", (Stage(runs),))
    parallel = auto_parallelize(model, batch, plan=plan)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=LEARNING_RATE)
    return lambda: parallel.train_step(batch, optimizer)


def alternate(first: Step, second: Step) -> tuple[list[float], list[float]]:
    """Times of both, taken in turns so that drift of the machine meets both alike."""
    for step in (first, second):
        step_seconds(step, 3)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(ROUNDS):
        ours += step_seconds(first, STEPS_A_ROUND)
        theirs += step_seconds(second, STEPS_A_ROUND)
    return ours, theirs


def main() -> None:
    """Print throughput ratios, ours over the baseline's."""
    join(torch.device("cpu"))
    devices = dist.get_world_size()
    pairs = [
        ("DDP", by_ddp, Strategy(data=devices)),
        ("FSDP2", by_fsdp2, Strategy(zero=devices, zero_stage=3)),
        ("parallelize_module", by_parallelize_module, Strategy(tensor=devices)),
    ]
    table = Table("baseline", "its step", "our plan", "our step", "throughput ratio", "spread of a round's ratio")
    for name, baseline, strategy in pairs:
        ours, theirs = alternate(by_plan(strategy), baseline())
        rounds = [_ratio(theirs, ours, start) for start, _ in pairwise(range(0, len(ours) + 1, STEPS_A_ROUND))]
        ratio = statistics.median(theirs) / statistics.median(ours)
        table.add_row(
            name, f"{statistics.median(theirs):.3f} s", str(strategy), f"{statistics.median(ours):.3f} s",
            f"{ratio:.3f}", f"{spread_of(rounds):.1%}",
        )  # fmt: skip
    if rank() == 0:
        Console(highlight=False).print(table)
    leave()


def _ratio(theirs: list[float], ours: list[float], start: int) -> float:
    stop = start + STEPS_A_ROUND
    return statistics.median(theirs[start:stop]) / statistics.median(ours[start:stop])


if __name__ == "__main__":
    main()
