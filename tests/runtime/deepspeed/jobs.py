"""Functions that two processes run with DeepSpeed. They run in one job, as importing DeepSpeed takes seconds."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite import auto_parallelize
from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import Plan, TrainedBy
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.runtime.deepspeed.engine import DeepSpeedModel
from galvatron_lite.runtime.engine import ParallelModel
from tests.runtime.fault_jobs import killed
from tests.runtime.plans import make_plan
from tests.runtime.training import ADAMW, LAYERS, SAMPLES, make_batch, make_model

CLIP = 0.5
MODEL = "gpt-tiny"
STRATEGIES = {
    "data": Strategy(data=2),
    "zero1": Strategy(zero=2, zero_stage=1),
    "zero2": Strategy(zero=2, zero_stage=2),
    "zero3": Strategy(zero=2, zero_stage=3, recompute=Recompute.FULL),
    "offload": Strategy(zero=2, zero_stage=2, offload=Offload.STATES),
}


@dataclass
class Run:
    """The result of training on one process."""

    losses: list[float]
    state: dict[str, Tensor]
    stage: int  # of ZeRO, as reported by DeepSpeed


def plan_of(strategy: Strategy, microbatches: int = 2, precision: str = "fp32") -> Plan:
    names = [layer.name for layer in discover_layers(make_model(MODEL))]
    assert len(names) == LAYERS + 2
    plan = make_plan([names], [[strategy] * len(names)], SAMPLES, microbatches, precision)
    return replace(plan, backend=TrainedBy.DEEPSPEED)


def make(plan: Plan, *, meta: bool = False, **options: Any) -> DeepSpeedModel:
    model = make_model(MODEL)
    layers = discover_layers(model)
    if meta:
        model = model.to("meta")
    return DeepSpeedModel(model, plan, layers, make_batch(), device="cpu", **options)


def train(strategy: Strategy, steps: int = 2, precision: str = "fp32") -> Run:
    parallel = make(plan_of(strategy, precision=precision), max_grad_norm=CLIP)
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    losses = [float(parallel.train_step(make_batch(), optimizer)) for _ in range(steps)]
    return Run(losses, parallel.full_state_dict(), int(parallel.engine.zero_optimization_stage()))


def trained() -> dict[str, Run]:
    return {name: train(strategy) for name, strategy in STRATEGIES.items()}


def in_bf16() -> list[float]:
    return train(STRATEGIES["zero3"], precision="bf16").losses


def plainly() -> dict[str, Run]:
    return {name: _plainly(STRATEGIES[name]) for name in ("data", "zero1", "zero3")}


def _plainly(strategy: Strategy, steps: int = 3) -> Run:
    """Train by a loop that calls ``backward`` and ``step`` itself, with a scheduler of the learning rate; the gradients
    of one more batch are dropped.
    """
    parallel = make(plan_of(strategy), max_grad_norm=CLIP)
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    losses = []
    (3 * parallel(make_batch())).backward()
    optimizer.zero_grad()
    for _ in range(steps):
        loss = parallel(make_batch())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    return Run(losses, parallel.full_state_dict(), 1)


def accumulated() -> list[dict[str, Tensor]]:
    """The states after one step on two batches: gradients that add up, or a list."""
    return [*(_accumulated(STRATEGIES[name]) for name in ("data", "zero3")), _of_a_list()]


def _of_a_list() -> dict[str, Tensor]:
    parallel = make(plan_of(STRATEGIES["zero2"]))
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    parallel.train_step([make_batch(), make_batch()], optimizer)
    return parallel.full_state_dict()


def _unlike() -> None:
    parallel = make(plan_of(STRATEGIES["data"]))
    batch = {name: tensor.roll(dist.get_rank(), 0) for name, tensor in make_batch().items()}
    parallel.train_step(batch, parallel.optimizer(torch.optim.AdamW, **ADAMW))


def _accumulated(strategy: Strategy, precision: str = "fp32") -> dict[str, Tensor]:
    parallel = make(plan_of(strategy, precision=precision))
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    for part in (0.25, 0.75):
        (part * parallel(make_batch())).backward()
    optimizer.step()
    return parallel.full_state_dict()


def _dropped() -> None:
    parallel = make(plan_of(STRATEGIES["offload"]))
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    parallel(make_batch()).backward()
    optimizer.zero_grad()


def _balanced() -> None:
    DeepSpeedModel(make_model(MODEL), plan_of(STRATEGIES["data"]), (), {"output_router_logits": True}, device="cpu")


def _grouped() -> None:
    parallel = make(plan_of(STRATEGIES["zero3"]))
    matrices = [one for one in parallel.parameters() if one.dim() > 1]
    torch_groups = [{"params": list(parallel.parameters())}, {"params": matrices}]
    parallel.train_step(make_batch(), torch.optim.AdamW(torch_groups))


def _double() -> None:
    model = make_model(MODEL).double()
    DeepSpeedModel(model, plan_of(STRATEGIES["zero1"]), discover_layers(model), make_batch(), device="cpu")


def reloaded() -> tuple[bool, float, float, Tensor]:
    """Load the state of a trained model under ZeRO-3: whether it is equal, the next two losses, and the outputs."""
    state = train(STRATEGIES["zero2"], 1).state
    parallel = make(plan_of(STRATEGIES["zero3"]), max_grad_norm=CLIP)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    parallel.load_full_state_dict(state)
    again = parallel.full_state_dict()
    same = all(torch.equal(tensor, again[name]) for name, tensor in state.items())
    tokens = make_batch()["tokens"]
    outputs: Tensor = parallel.outputs(tokens=tokens)
    first, second = (float(parallel.train_step(make_batch(), optimizer)) for _ in range(2))
    return same, first, second, outputs


def refused() -> list[str]:
    """The errors of training without an optimizer, of a second one, of a loss that is not finite, and others."""
    parallel = make(plan_of(STRATEGIES["zero2"]), loss_fn=partial(_unsound, [True, True]))
    calls: list[Callable[[], Any]] = [
        lambda: parallel(make_batch()), lambda: _two(parallel), lambda: _overflow(parallel),
        lambda: copy.deepcopy(make(plan_of(STRATEGIES["zero3"])).module),
        lambda: _accumulated(STRATEGIES["zero2"]), lambda: _accumulated(STRATEGIES["data"], "bf16"),
        _dropped, _balanced, _grouped, _double, _unlike,
    ]  # fmt: skip
    said = []
    for call in calls:
        try:
            call()
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def _two(parallel: DeepSpeedModel) -> None:
    first = parallel.optimizer(torch.optim.SGD, lr=0.1)
    assert first.param_groups[0]["lr"] == 0.1
    parallel.optimizer(torch.optim.SGD, lr=0.1)


def _overflow(parallel: DeepSpeedModel) -> None:
    before = parallel.full_state_dict()
    try:
        parallel.train_step(make_batch(), parallel.engine.basic_optimizer)
    finally:
        after = parallel.full_state_dict()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def _unsound(pending: list[bool], output: Tensor, _batch: Any) -> Tensor:
    return output * (float("nan") if pending and pending.pop() else 1.0)


def from_meta() -> tuple[int, float]:
    """A model on the meta device is initialized in shards: the size of the shards, and the first loss."""
    parallel = make(plan_of(STRATEGIES["zero3"]), meta=True, seed=3)
    shards = sum(parameter.ds_tensor.numel() for parameter in parallel.parameters())
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    loss = float(parallel.train_step(make_batch(), optimizer))
    return shards, loss


def resumed(folder: str) -> dict[str, tuple[bool, bool, int]]:
    """By ZeRO stage, whether a resumed run has the same losses and the same state bit for bit, and its first step.

    The checkpoint of ZeRO-3 is also loaded under ZeRO-2.
    """
    found = {}
    for source, others in (("zero3", ("zero3", "zero2")), ("data", ("data",))):
        one = make(plan_of(STRATEGIES[source]), max_grad_norm=CLIP)
        optimizer = one.optimizer(torch.optim.AdamW, **ADAMW)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _falling)
        for _ in range(2):
            one.train_step(make_batch(), optimizer)
            schedule.step()
        one.save(f"{folder}/{source}", optimizer, scheduler=schedule)
        losses = [float(one.train_step(make_batch(), optimizer))]
        state = one.full_state_dict()
        found |= {name: _again(name, f"{folder}/{source}", losses, state) for name in others}
    return found


def _again(name: str, written: str, losses: list[float], state: dict[str, Tensor]) -> tuple[bool, bool, int]:
    other = make(plan_of(STRATEGIES[name]), max_grad_norm=CLIP)
    optimizer = other.optimizer(torch.optim.AdamW, **{**ADAMW, "lr": 1.0})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _falling)
    step = other.load(written, optimizer, scheduler=schedule).step
    again = [float(other.train_step(make_batch(), optimizer))]
    mine = other.full_state_dict()
    return again == losses, all(torch.equal(tensor, mine[name]) for name, tensor in state.items()), step


def from_galvatron(folder: str) -> bool:
    """Whether DeepSpeed continues from a checkpoint of ``ParallelModel`` with the same losses."""
    model = make_model(MODEL)
    plan = replace(plan_of(STRATEGIES["zero3"]), backend=TrainedBy.GALVATRON)
    ours = ParallelModel(model, plan, discover_layers(model), make_batch(), device="cpu", max_grad_norm=CLIP)
    optimizer = ours.optimizer(torch.optim.AdamW, **ADAMW)
    ours.train_step(make_batch(), optimizer)
    ours.save(f"{folder}/ours", optimizer)
    theirs = make(plan_of(STRATEGIES["zero2"]), max_grad_norm=CLIP)
    engine = theirs.optimizer(torch.optim.AdamW, **ADAMW)
    assert theirs.load(f"{folder}/ours", engine).step == 1
    losses = [float(one.train_step(make_batch(), own)) for one, own in ((ours, optimizer), (theirs, engine))]
    after = [float(one.train_step(make_batch(), own)) for one, own in ((ours, optimizer), (theirs, engine))]
    return all(abs(own - other) <= 1e-5 * own for own, other in (losses, after))


def page(code: str) -> list[float]:
    """The losses of the script in the documentation, which plans from an estimated profile."""
    model, batch = make_model(MODEL), make_batch()
    known = estimate_profile(
        trace(make_model(MODEL), batch), load_cluster("a100-80gb", 2), precision="fp32", name=MODEL
    )
    losses: list[float] = []

    def batches() -> Iterator[dict[str, Tensor]]:
        for _ in range(3):
            yield make_batch()
            losses.append(float(names["loss"]))

    names: dict[str, Any] = {"torch": torch, "model": model, "batch": batch, "batches": batches()}
    names["auto_parallelize"] = partial(auto_parallelize, profile=known, device="cpu")
    exec(code, names)
    assert names["parallel"].plan.backend is TrainedBy.DEEPSPEED
    return losses


def _falling(step: int) -> float:
    return 1.0 / (1 + step)


def everything(folder: str, code: str) -> dict[str, Any]:
    """The results of all functions by name; ``code`` is the script in the documentation."""
    jobs = (trained, in_bf16, plainly, accumulated, reloaded, refused, from_meta, resumed, from_galvatron, page)
    given = {"resumed": folder, "from_galvatron": folder, "page": code}
    return {job.__name__: job(*([given[job.__name__]] if job.__name__ in given else [])) for job in jobs}


def lost() -> None:
    """Train a step; rank 1 is killed in the next."""
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    parallel = make(plan_of(STRATEGIES["zero2"]))
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    parallel.train_step(make_batch(), optimizer)
    if dist.get_rank() == 1:
        with patch.object(DeepSpeedModel, "_local_loss", lambda *_: killed(parallel.watch)):
            parallel.train_step(make_batch(), optimizer)
    parallel.train_step(make_batch(), optimizer)
