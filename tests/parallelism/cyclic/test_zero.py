"""Under ``zero`` a process holds parameters and optimizer states only while a pass uses them."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cyclic.messages import CyclicPass
from galvatron_lite.parallelism.cyclic.optimizer_states import give_states, layout_of, states_likes, take_states
from galvatron_lite.parallelism.cyclic.travelling import TravellingStates
from galvatron_lite.parallelism.cyclic.zero import ZeroExecutor
from galvatron_lite.runtime.cyclic.setup import CyclicOptions, CyclicRuntime, set_up
from tests.parallelism.cyclic.fleet import CPU, MemoryMailbox, Post
from tests.parallelism.cyclic.models import blocks_case, make_batches, make_plan, split

OPTIMIZERS = [
    partial(torch.optim.SGD, lr=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    partial(torch.optim.NAdam, lr=0.1),
    partial(torch.optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
]


def parameters_held(runtime: CyclicRuntime) -> int:
    """Bytes of parameters on a process, wherever something refers to them."""
    executor = runtime.executor
    assert isinstance(executor, ZeroExecutor)
    found: dict[int, int] = {}
    for states in executor.states.values():
        tracks = [*states.forward.values(), *states.backward.values()]
        held = [*states.masters.values(), *(one for version in tracks for one in version.values())]
        found |= {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held}
    for flight in executor.desk.flights.values():
        for one in flight.parameters.values():
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(size for place, size in found.items() if place)


@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("count", [2, 4])
def test_nothing_is_kept_between_passes(count: int, rule: str) -> None:
    """Passes of all processes in the order of their times; only what skips no process stays where it is."""
    torch.manual_seed(0)
    (model, layers, stages), batches, post = blocks_case(count), make_batches(3, count), Post()
    plan = make_plan(stages, rule, "zero")
    fleet = [
        set_up(copy.deepcopy(model), plan, layers, None, process, MemoryMailbox(post), CyclicOptions(CPU))
        for process in range(count)
    ]
    stage_bytes = sum(one.nbytes for one in model.parameters()) // count
    for runtime in fleet:
        assert parameters_held(runtime) == stage_bytes
        for states in runtime.executor.states.values():
            states.make_optimizer(partial(torch.optim.Adam, lr=0.01), None)
    for runtime in fleet:
        runtime.executor.begin()
    for step, batch in enumerate(batches):
        passes: list[tuple[CyclicPass, int]] = []
        for process, runtime in enumerate(fleet):
            runtime.executor.feed(step, split(batch, count))
            passes += [(one, process) for one in runtime.executor.programme.passes(process, step)]
        for one, process in sorted(passes, key=lambda pair: pair[0].moment.time):
            fleet[process].executor.run([one])
            started = step > 0 or one.moment.backward  # home 0 is the first worker: its states begin where they are
            assert parameters_held(fleet[process]) <= (stage_bytes if started else 2 * stage_bytes)
            states = fleet[process].executor.states.values()
            assert sum(bool(one.optimizer.state) for one in states if one.optimizer) <= 1


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizer_states_travel(make: partial[torch.optim.Optimizer]) -> None:
    """An optimizer that is given another's states goes on as that one, and as one that was left alone."""
    torch.manual_seed(0)
    values, gradients = [torch.randn(3), torch.randn(2, 2)], [[torch.randn(3), torch.randn(2, 2)] for _ in range(3)]
    layout = layout_of(make, values)

    def stepped(travels: bool) -> list[torch.Tensor]:
        parameters = [nn.Parameter(value.clone()) for value in values]
        optimizer = make(parameters)
        for pair in gradients:
            if travels:
                tensors = give_states(optimizer, layout, parameters)
                assert [one.shape for one in tensors] == [one.shape for one in states_likes(layout)]
                optimizer = make(parameters)
                take_states(optimizer, layout, parameters, tensors)
            for parameter, gradient in zip(parameters, pair, strict=True):
                parameter.grad = gradient
            optimizer.step()
        return [one.detach() for one in parameters]

    assert all(torch.equal(one, other) for one, other in zip(stepped(True), stepped(False), strict=True))


class Remembers(torch.optim.SGD):
    """An optimizer with a state that is no tensor."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = ["a step"]


def test_states_that_are_no_tensors_are_refused() -> None:
    states = TravellingStates({"weight": nn.Parameter(torch.ones(2))}, is_home=True)
    with pytest.raises(InputError, match=r"state history.*list.*setting data"):
        states.make_optimizer(Remembers, None, lr=0.1)


def test_what_is_released_is_seen_again_once_it_is_filled() -> None:
    """Autograd's references, too: the gradient is that of the values the forward pass had."""
    states = TravellingStates({"weight": nn.Parameter(torch.tensor([2.0, 3.0]))}, is_home=True)
    states.depart([0])
    lent = states.at(0)
    loss = (lent["weight"] ** 2).sum()
    states.release(lent)
    assert lent["weight"].untyped_storage().nbytes() == 0
    states.refill(0, lent)
    loss.backward()
    assert torch.equal(lent["weight"].grad, torch.tensor([4.0, 6.0]))
