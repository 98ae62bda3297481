"""What ranks run while something goes wrong in their steps."""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.auto import auto_parallelize
from galvatron_lite.errors import ExhaustedError, GalvatronError, NonFiniteLossError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import write_plan
from galvatron_lite.runtime.checkpoint import checkpointer
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.monitor.notes import operation_of
from galvatron_lite.runtime.monitor.watch import Watch
from galvatron_lite.runtime.parameters.full_state import full_state_dict
from tests.runtime.plans import losses_alone, make_plan, split_model

WIDTH, SAMPLES = 6, 8
DATA, ZERO = Strategy(data=2), Strategy(zero=2, zero_stage=3)
Action = Callable[[], None]


class Block(nn.Module):
    """A place for a fault: ``act`` runs in its forward pass, ``act_back`` in its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act: Action | None = None
        self.act_back: Callable[[Tensor], Tensor | None] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.act is not None and not hidden.is_meta:
            self.act()
        made = torch.tanh(self.linear(hidden))
        if self.act_back is not None and made.requires_grad:
            made.register_hook(self.act_back)
        return hidden + made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.mse_loss(hidden, targets)


def make_batch(step: int) -> dict[str, Tensor]:
    inputs, targets = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
    return {"inputs": inputs, "targets": targets}


def make_run(
    strategies: Sequence[Sequence[Strategy]], timeout: float | None = None, microbatches: int = 1
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    cuts, blocks = list(accumulate(map(len, strategies)))[:-1], ["blocks.0", "blocks.1"]
    options = {"microbatches": microbatches, "timeout": timeout, "blocks": blocks}
    parallel = split_model(Net(), make_batch(0), [one for stage in strategies for one in stage], cuts, **options)
    return parallel, parallel.optimizer(torch.optim.AdamW, lr=0.01)


def block_of(parallel: ParallelModel) -> Block:
    """One that this rank runs."""
    blocks = [one for one in parallel.module.modules() if isinstance(one, Block)]
    return next(one for one in blocks if any(p.numel() and not p.is_meta for p in one.parameters()))


def at_fault(parallel: ParallelModel, optimizer: torch.optim.Optimizer, where: str, act: Action) -> None:
    """Have something happen on this rank in one of the places of the next step."""
    if where == "forward":
        block_of(parallel).act = act
    elif where == "backward":
        block_of(parallel).act_back = lambda _: act()
    else:
        optimizer.register_step_pre_hook(lambda *_: act())


def killed(watch: Watch) -> None:
    """Once the others can read what this rank does."""
    while (noted := watch.notes()[dist.get_rank()]) is None or operation_of(noted) != watch.operation:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def lost(where: str, folder: str = "", pipeline: bool = False) -> None:
    """Two steps, and a checkpoint of them; rank 1 is killed in the third."""
    stages = [[Strategy()] * 2, [Strategy()] * 2] if pipeline else [[DATA] * 4]
    parallel, optimizer = make_run(stages, microbatches=2)
    for step in range(2):
        parallel.train_step(make_batch(step), optimizer)
    if folder:
        parallel.save(Path(folder, "step-2"), optimizer)
    if dist.get_rank() == 1:
        at_fault(parallel, optimizer, where, lambda: killed(parallel.watch))
    for step in range(2, 4):
        parallel.train_step(make_batch(step), optimizer)


def lost_while(doing: str, folder: str, patience: float | None = None) -> None:
    """A step and a checkpoint; then rank 1 is killed in one of the phases of a save, a load or a switch."""
    parallel, optimizer = make_run([[DATA] * 4], timeout=patience)
    parallel.train_step(make_batch(0), optimizer)
    parallel.save(Path(folder, "step-1"), optimizer)
    what, _, phase = doing.partition(": ")

    def end(*_: object) -> None:
        if dist.get_rank() == 1:
            killed(parallel.watch)

    if what == "switch":
        names = [layer.name for layer in discover_layers(Net(), make_batch(0), blocks=["blocks.0", "blocks.1"])]
        plan = make_plan([names], [[ZERO] * 4], SAMPLES)
        parallel.switch(plan, optimizer, observe=lambda now: end() if now == phase else None)
        return
    with patch.object(checkpointer, "read_plain" if what == "load" else "write_files", end):
        if what == "load":
            parallel.load(Path(folder, "step-1"), optimizer)
        else:
            parallel.save(Path(folder, "step-2"), optimizer, asynchronous=what == "asynchronous save")
            parallel.finish_saving()


def data_end_early(folder: str, patience: float) -> None:
    """Rank 1's data end a step before the others', and it saves."""
    parallel, optimizer = make_run([[DATA] * 4], timeout=patience)
    try:
        for step in range(3 - dist.get_rank()):
            parallel.train_step(make_batch(step), optimizer)
        parallel.save(Path(folder, "last"), optimizer)
    except GalvatronError:
        # rank 0 keeps the notes that rank 1 reads
        time.sleep(2.0 if dist.get_rank() == 0 else 0.0)
        raise


def resumed(folder: str) -> tuple[str, list[float]]:
    """The last checkpoint's name, and the loss of the step after it, in a smaller world."""
    parallel, optimizer = make_run([[Strategy()] * 4])
    found = parallel.load_latest(folder, optimizer)
    return found.folder.name, [float(parallel.train_step(make_batch(parallel.step), optimizer))]


def hangs(where: str, patience: float, pipeline: bool = False) -> None:
    """Rank 1 stops to work in the second step, for longer than the others wait."""
    stages = [[Strategy()] * 2, [Strategy()] * 2] if pipeline else [[DATA] * 4]
    parallel, optimizer = make_run(stages, timeout=patience, microbatches=2)
    parallel.train_step(make_batch(0), optimizer)
    if dist.get_rank() == 1:
        at_fault(parallel, optimizer, where, lambda: time.sleep(600))
    parallel.train_step(make_batch(1), optimizer)


@dataclass(frozen=True)
class Unsound:
    """What came of a NaN: the error, the ranks it names, whether parameters are what they were."""

    said: str
    ranks: tuple[int, ...]
    same: bool


def not_finite(strategies: Sequence[Sequence[Strategy]]) -> tuple[list[Unsound], list[float]]:
    """Rank 1 makes a NaN in its loss, then in its gradient, before the second of three steps is done well."""
    parallel, optimizer = make_run(strategies)
    losses = [float(parallel.train_step(make_batch(0), optimizer))]
    block = block_of(parallel)
    second = dist.get_rank() == 1
    handle = block.linear.register_forward_hook(lambda _module, _args, made: made * (math.nan if second else 1.0))
    first = _tried(parallel, optimizer)
    handle.remove()
    block.act_back = lambda gradient: gradient * (math.nan if second else 1.0)
    found = [first, _tried(parallel, optimizer)]
    block.act_back = None
    losses += [float(parallel.train_step(make_batch(step), optimizer)) for step in (1, 2)]
    return found, losses


def _tried(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> Unsound:
    before = full_state_dict(parallel)
    try:
        parallel.train_step(make_batch(1), optimizer)
    except NonFiniteLossError as error:
        after = full_state_dict(parallel)
        return Unsound(str(error), error.ranks, all(torch.equal(value, after[name]) for name, value in before.items()))
    raise AssertionError("no error")


def interrupted(strategies: Sequence[Sequence[Strategy]]) -> list[float]:
    """Two tries of the second of three steps end by the user's interrupt, in the second micro-batch."""
    parallel, optimizer = make_run(strategies, microbatches=2)
    losses = [float(parallel.train_step(make_batch(0), optimizer))]
    block = block_of(parallel)
    for where in ("forward", "backward"):
        passes = count(1)

        def act(passes: Iterator[int] = passes) -> None:
            if next(passes) == 2:
                raise KeyboardInterrupt

        at_fault(parallel, optimizer, where, act)
        with pytest.raises(KeyboardInterrupt):
            parallel.train_step(make_batch(1), optimizer)
        block.act = block.act_back = None
    return losses + [float(parallel.train_step(make_batch(step), optimizer)) for step in (1, 2)]


def trained(steps: int = 3) -> list[float]:
    """The same steps in one process, without this package."""
    torch.manual_seed(0)
    model = Net()
    return losses_alone(model, torch.optim.AdamW(model.parameters(), lr=0.01), map(make_batch, range(steps)))


def out_of_memory(patience: float) -> str:
    """Rank 1 may not have more memory than it has, and asks for more in its second step; what is said."""
    parallel, optimizer = make_run([[DATA] * 4], timeout=patience)
    parallel.train_step(make_batch(0), optimizer)
    if dist.get_rank() == 1:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        before = resource.getrlimit(resource.RLIMIT_AS)

        def ask() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (held + 2**24, before[1]))
            torch.ones(2**28)

        block_of(parallel).act = ask
    try:
        parallel.train_step(make_batch(1), optimizer)
    except (ExhaustedError, GalvatronError) as error:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_AS, before)
        # both are here before either ends its connections
        time.sleep(0.0 if dist.get_rank() == 0 else 2 * patience)
        return f"{type(error).__name__}: {error}"
    return "nothing"


def edited(path: str, edits: Sequence[tuple[str, str]]) -> list[str]:
    """What every edit of a plan file leads to."""
    whole = Path(path).read_text()
    told = []
    for number, (old, new) in enumerate(edits):
        assert old in whole, old
        place = Path(f"{path}-{dist.get_rank()}-{number}.yaml")
        place.write_text(whole.replace(old, new, 1))
        torch.manual_seed(0)
        try:
            auto_parallelize(Net(), make_batch(0), plan=place, blocks=["blocks.0", "blocks.1"], device="cpu")
        except GalvatronError as error:
            told.append(f"{type(error).__name__}: {error}")
        else:
            told.append("nothing")
    return told


def write(path: Path) -> None:
    """A plan's file."""
    names = [layer.name for layer in discover_layers(Net(), make_batch(0), blocks=["blocks.0", "blocks.1"])]
    write_plan(make_plan([names], [[DATA] * 4], SAMPLES), path)
