"""Jobs that change the plan between steps, and what must not change with it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import Plan, Schedule
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.pieces import held_parameters, held_states
from galvatron_lite.runtime.reshard.transfer import nbytes
from tests.equivalence.families import make_batches
from tests.equivalence.test_experts import plan as mixed
from tests.equivalence.training import CLIP, make_case
from tests.equivalence.training import SAMPLES as MIXED_SAMPLES
from tests.runtime.assembly import assemble, show
from tests.runtime.examined import examined_once
from tests.runtime.pictures import SAMPLES, Pictures, make_net, make_parallel_net, make_pictures
from tests.runtime.plans import losses_alone, make_plan
from tests.runtime.test_draws import Tower
from tests.runtime.training import ADAMW, Case, make_batch, make_parallel, plan_of

ADAM = partial(torch.optim.AdamW, **ADAMW)
DATA, ZERO3, HYBRID = Strategy(data=4), Strategy(zero=4, zero_stage=3), Strategy(data=2, zero=2, zero_stage=2)
TENSOR, MIXED = Strategy(tensor=4, sequence_parallel=True), Strategy(zero=2, zero_stage=3, tensor=2)
PAIR, ZERO, HALF, ONE = Strategy(data=2), Strategy(zero=2, zero_stage=3), Strategy(tensor=2), Strategy()
FIRST = Strategy(data=2, zero=2, zero_stage=1)
STATES = Strategy(zero=2, zero_stage=1, tensor=2, offload=Offload.STATES)
SHARED, RING = Strategy(context=2), Strategy(zero=2, zero_stage=3, context=2)
HEADS = Strategy(zero=2, zero_stage=1, context=2, ulysses=True, offload=Offload.ALL)
CHAIN = [
    Case([DATA] * 5),
    Case([HYBRID, TENSOR, MIXED, DATA, HYBRID]),
    Case([PAIR, ZERO, HALF, PAIR, PAIR], cuts=[2], microbatches=2),
    Case([ONE] * 5, cuts=[1, 2, 4], microbatches=4),
    Case([FIRST, RING, HEADS, STATES, FIRST]),
    Case(
        [PAIR, SHARED, HALF, SHARED, PAIR], microbatches=4, cuts=[1, 2, 4], schedule=Schedule.ZERO_BUBBLE_V, virtual=2
    ),
    Case([DATA] * 5),
]
"""Plans with all strategies, with fewer and more stages, and the first plan again."""
LLAMA = [
    Case([DATA] * 5, "llama-tiny"),
    Case([ZERO3, MIXED, HYBRID, MIXED, ZERO3], "llama-tiny"),
    Case([PAIR, ZERO, HALF, PAIR, HALF], "llama-tiny", cuts=[3], microbatches=2),
]
TIGHT = [None, 60_000, 160_000]
"""Free bytes of each change; too few for the tensors of both plans."""
FAULTY = [Case([PAIR, ZERO, HALF, ZERO, PAIR]), Case([ONE] * 5, cuts=[2], microbatches=2)]
"""Plans for two ranks; the change from the first to the second fails."""
FAULTS = ["validate", "prepare", "groups", "build", "carry", "carry: allocate", "carry: verify", "commit"]

ROWS, FILTERS, CHANNELS = Strategy(height=2), Strategy(filters=2), Strategy(channels=2)
PICTURES = [
    Pictures([ROWS] * 5, norm="batch", chain=True),
    Pictures([FILTERS] * 5, norm="batch", chain=True),
    Pictures([ROWS, CHANNELS, ROWS, CHANNELS, ROWS], norm="batch", chain=True),
    Pictures([ONE] * 5, norm="batch", chain=True, cuts=[3]),
    Pictures([ROWS] * 5, norm="batch", chain=True),
]


def training_state(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Full parameters and optimizer states; copies must be equal."""
    return assemble(show([*held_parameters(parallel), *held_states(parallel, optimizer.state)]))[0]


def assert_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Check that tensors are equal bit for bit."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@examined_once()
def switched_run(cases: Sequence[Case], memory: Sequence[int | None] | None = None) -> list[float]:
    """The losses of a step under each plan; the training state must not change with the plan.

    With ``memory`` that does not suffice for both plans, old tensors are released as new ones arrive.
    """
    parallel = make_parallel(cases[0])
    optimizer, free = parallel.optimizer(ADAM), memory or [None] * len(cases)
    losses, batch = [], make_batch()
    for place, case in enumerate(cases):
        if place:
            before = training_state(parallel, optimizer)
            done = parallel.switch(plan_of(case), optimizer, memory=free[place])
            assert done.by_turns == (free[place] is not None)
            assert_bits(training_state(parallel, optimizer), before)
        losses.append(float(parallel.train_step(batch, optimizer)))
    return losses


@examined_once()
def mixture_run() -> list[float]:
    """The losses of a step under each plan of a mixture of experts, for comparison with ``curve_alone``."""
    case = make_case("mixtral")
    piped = mixed(case, Strategy(data=2, expert=2), cut=3, microbatches=2)
    plans = [
        mixed(case, Strategy(zero=4, zero_stage=3, expert=2)),
        mixed(case, Strategy(zero=2, zero_stage=1, context=2, expert=4, offload=Offload.ALL)),
        replace(piped, schedule=Schedule.ZERO_BUBBLE_1P),
        mixed(case, Strategy(data=2, tensor=2, expert=2)),
    ]
    parallel = case.parallel(plans[0], max_grad_norm=CLIP)
    optimizer, losses = parallel.optimizer(torch.optim.AdamW, lr=3e-3), []
    for plan, batch in zip(plans, make_batches("mixtral", MIXED_SAMPLES, len(plans)), strict=True):
        before = training_state(parallel, optimizer)
        parallel.switch(plan, optimizer)
        assert_bits(training_state(parallel, optimizer), before)
        losses.append(float(parallel.train_step(batch, optimizer)))
    return losses


def _failing(phase: str, times: int) -> Any:
    """An observer that raises an error on rank 1 when a phase begins for the n-th time (``times``)."""
    seen: list[str] = []

    def observe(now: str) -> None:
        seen.append(now)
        if dist.get_rank() == 1 and seen.count(phase) == times and now == phase:
            raise RuntimeError("injected")

    return observe


@examined_once()
def faulty_run() -> tuple[list[tuple[str, str, str]], list[float], list[float]]:
    """The errors of changes that fail, the losses after each, and the losses of a run without changes."""
    batch, told, losses = make_batch(), [], []
    untouched = _untouched(len(FAULTS) + 3)
    parallel = make_parallel(FAULTY[0])
    optimizer = parallel.optimizer(ADAM)
    losses.append(float(parallel.train_step(batch, optimizer)))
    tries = [(phase, 1, None) for phase in FAULTS] + [("carry: allocate", 3, 150_000), ("carry: verify", 3, 150_000)]
    for phase, times, memory in tries:
        before = training_state(parallel, optimizer)
        groups = parallel.origin.options.groups.count
        try:
            parallel.switch(plan_of(FAULTY[1]), optimizer, memory=memory, observe=_failing(phase, times))
        except Exception as error:
            told.append((phase, type(error).__name__, str(error)))
        assert parallel.origin.options.groups.count == groups
        assert_bits(training_state(parallel, optimizer), before)
        losses.append(float(parallel.train_step(batch, optimizer)))
    return told, losses, untouched


def _untouched(steps: int) -> list[float]:
    parallel = make_parallel(FAULTY[0])
    optimizer = parallel.optimizer(ADAM)
    return [float(parallel.train_step(make_batch(), optimizer)) for _ in range(steps)]


def _tower(strategies: Sequence[Strategy]) -> tuple[Tower, ParallelModel, Any]:
    torch.manual_seed(0)
    model, batch = Tower(rate=0.3), (torch.randn(8, 6),)
    layers = discover_layers(model, batch, blocks=[f"blocks.{number}" for number in range(3)])
    assert len(layers) == 5

    def plan(chosen: Sequence[Strategy]) -> Plan:
        return make_plan([[layer.name for layer in layers]], [list(chosen)], 8)

    return model, ParallelModel(model, plan(strategies), layers, batch, device="cpu"), plan


@examined_once()
def user_run() -> None:
    """Objects, learning rates, dropout, hooks, frozen parameters and process groups."""
    _same_bits_with_dropout()
    _objects_stay()
    _schedulers_follow()
    _nothing_piles_up()


def _same_bits_with_dropout() -> None:
    """Changing between plans with equal arithmetic has the same losses as one plan."""
    batch = (torch.randn(8, 6, generator=torch.Generator().manual_seed(2)),)

    def run(chain: Sequence[Strategy]) -> tuple[list[float], dict[str, Tensor]]:
        _, parallel, plan = _tower([chain[0]] * 5)
        optimizer, losses = parallel.optimizer(ADAM), []
        for strategy in chain:
            parallel.switch(plan([strategy] * 5), optimizer)
            losses += [float(parallel.train_step(batch, optimizer)) for _ in range(2)]
        return losses, parallel.full_state_dict()

    (losses, state), (wanted, wanted_state) = run([PAIR, ZERO, PAIR]), run([PAIR] * 3)
    assert losses == wanted
    assert_bits(state, wanted_state)


def _objects_stay() -> None:
    model, parallel, plan = _tower([PAIR] * 5)
    averaged = torch.optim.swa_utils.AveragedModel(parallel)
    calls: list[int] = []
    model.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    optimizer = parallel.optimizer(ADAM)
    batch, block, group = (torch.randn(8, 6),), model.blocks[1], optimizer.param_groups[0]
    parallel.train_step(batch, optimizer)
    averaged.update_parameters(parallel)
    late = model.blocks[0].register_forward_hook(lambda *_: calls.append(2))
    model.blocks[2].drop.p = 0.0
    model.first.weight.requires_grad_(False)
    parallel.eval()
    averages = averaged.module.full_state_dict()
    parallel.switch(plan([PAIR, ZERO, HALF, ZERO, PAIR]), optimizer)
    assert_bits(averaged.module.full_state_dict(), averages)
    averaged.update_parameters(parallel)
    assert parallel.module is model
    assert model.blocks[1] is block
    assert optimizer.param_groups[0] is group
    assert not model.blocks[0].training
    assert not parallel.training
    assert model.blocks[2].drop.p == 0.0
    assert not model.first.weight.requires_grad
    assert model.last.weight.requires_grad
    assert {p for g in optimizer.param_groups for p in g["params"]} <= set(parallel.parameters())
    with pytest.raises(InputError, match="call of the model itself"):
        model(*batch)
    with pytest.warns(UserWarning, match="shares alone"):
        model.state_dict()
    calls.clear()
    parallel.train_step(batch, optimizer)
    assert sorted(calls) == [1, 2]
    late.remove()
    frozen = parallel.full_state_dict()["first.weight"]
    parallel.switch(plan([PAIR] * 5), optimizer)
    parallel.train_step(batch, optimizer)
    assert calls.count(2) == 1
    assert calls.count(1) == 2
    assert torch.equal(parallel.full_state_dict()["first.weight"], frozen)
    parallel.backward_step(batch)
    with pytest.raises(InputError, match=r"gradients.*zero_grad"):
        parallel.switch(plan([ZERO] * 5), optimizer)


def _schedulers_follow() -> None:
    """A scheduler that is passed gets more groups; otherwise groups are kept and contain tensors of several meshes."""
    for given, flags in ((True, {"foreach": True}), (False, {})):
        _, parallel, plan = _tower([PAIR] * 5)
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.1, **flags)
        inner = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step) for _ in range(2)]
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, milestones=[9])
        batch, mixed = (torch.randn(8, 6),), plan([PAIR, ZERO, HALF, ZERO, PAIR])
        rates = []
        for chosen in (mixed, plan([PAIR] * 5), plan([ZERO] * 5)):
            parallel.switch(chosen, optimizer, scheduler if given else None)
            parallel.train_step(batch, optimizer)
            scheduler.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
        groups = 2 if given else 1
        assert rates == [[0.05] * groups, [0.025] * groups, [0.0125] * groups]


def _nothing_piles_up() -> None:
    _, parallel, plan = _tower([PAIR] * 5)
    optimizer, batch = parallel.optimizer(ADAM), (torch.randn(8, 6),)
    sizes = []
    for _ in range(3):
        for strategies in ([PAIR, ZERO, HALF, ZERO, PAIR], [PAIR] * 5):
            parallel.switch(plan(strategies), optimizer)
            parallel.train_step(batch, optimizer)
        sizes.append((parallel.origin.options.groups.count, _held()))
    assert len({groups for groups, _ in sizes[1:]}) == 1
    # the step counts of the optimizer take a few bytes for each parameter
    assert sizes[-1][1] - sizes[1][1] < 0.05 * sizes[0][1], sizes


def _held() -> int:
    """The bytes of all tensors of this process that are in use."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    return nbytes(tensors)


@examined_once()
def pictures_run() -> tuple[list[float], list[float]]:
    """The losses under plans with spatial, filter and channel parallelism and with two stages, and in one process."""
    batch = make_pictures(PICTURES[0])
    parallel = make_parallel_net(PICTURES[0])
    optimizer, losses = parallel.optimizer(partial(torch.optim.SGD, lr=0.1, momentum=0.9)), []
    for case in PICTURES:
        before = parallel.full_state_dict()
        parallel.switch(plan_of_pictures(case, parallel), optimizer)
        assert_bits(parallel.full_state_dict(), before)
        losses += [float(parallel.train_step(batch, optimizer)) for _ in range(2)]
    model = make_net(PICTURES[0])
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wanted = losses_alone(model, plain, [batch] * len(losses))
    for name, value in parallel.full_state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])
    return losses, wanted


def plan_of_pictures(case: Pictures, parallel: ParallelModel) -> Plan:
    names = [layer.name for layer in parallel.origin.layers]
    bounds = [0, *case.cuts, len(names)]
    strategies = [list(case.strategies[a:b]) for a, b in pairwise(bounds)]
    return make_plan([names[a:b] for a, b in pairwise(bounds)], strategies, SAMPLES, case.microbatches)
