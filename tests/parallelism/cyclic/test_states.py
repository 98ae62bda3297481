"""A stage's parameters, gradients and optimizer, and how they are packed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from galvatron_lite.parallelism.cyclic.packing import ALIGNMENT, pack, packed_bytes, unpack
from galvatron_lite.parallelism.cyclic.states import StageStates

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.bool]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)), max_size=5),
    st.integers(0, 2**20),
)
@settings(max_examples=40, deadline=None)
def test_tensors_come_out_as_they_went_in(shapes: list[tuple[list[int], torch.dtype]], seed: int) -> None:
    torch.manual_seed(seed)
    tensors = [torch.randint(0, 2, shape).to(dtype) for shape, dtype in shapes]
    buffer = pack(tensors, CPU)
    assert buffer.nbytes == packed_bytes(tensors) <= sum(one.nbytes + ALIGNMENT - 1 for one in tensors)
    for found, tensor in zip(unpack(buffer, tensors), tensors, strict=True):
        assert found.dtype is tensor.dtype
        assert torch.equal(found, tensor)


def states_of(*values: float) -> StageStates:
    states = StageStates({f"p{place}": nn.Parameter(torch.tensor([value])) for place, value in enumerate(values)})
    states.make_optimizer(partial(torch.optim.SGD, lr=1.0), None)
    return states


def loss_of(parameters: dict[str, nn.Parameter]) -> Tensor:
    return (parameters["p0"] ** 2).sum()


@pytest.mark.parametrize("keep", [True, False])
def test_an_update_makes_the_next_version(keep: bool) -> None:
    states = states_of(3.0)
    with states.adding(0, states.at(0)):
        loss_of(states.at(0)).backward()
    states.finish(0)
    states.apply(0, keep)
    assert states.newest == 1
    assert states.versions == ((0, 1) if keep else (1,))
    assert states.at(1)["p0"].item() == states.masters["p0"].item() == -3.0
    if keep:
        assert states.at(0)["p0"].item() == 3.0
    states.forget_before(1)
    assert states.versions == (1,)


def test_an_update_leaves_a_graph_of_the_version_before_alone() -> None:
    """Its gradient is that of the values that the forward pass had."""
    states = states_of(3.0)
    old = states.at(0)
    loss = loss_of(old)
    states.updates[0] = [torch.tensor([1.0])]
    states.apply(0, keep=True)
    states.forget_before(1)
    with states.adding(1, old):
        loss.backward()
    assert torch.equal(states.sums[1][0], torch.tensor([6.0]))
    assert old["p0"].grad is None


def test_gradients_of_micro_batches_of_any_version_are_summed() -> None:
    states = states_of(3.0, 5.0)
    states.updates[0] = [torch.tensor([1.0]), None]
    old = states.at(0)
    states.apply(0, keep=True)
    for version in (old, states.at(1)):
        with states.adding(1, version):
            loss_of(dict(version)).backward()
    assert torch.equal(states.sums[1][0], torch.tensor([6.0 + 4.0]))
    assert states.sums[1][1] is None
    arrived = StageStates.arrived([one.clone() for one in states.sent(states.sums[1])])
    assert torch.equal(arrived[0], torch.tensor([10.0]))
    assert arrived[1] is None


def test_updates_are_applied_in_order() -> None:
    states = states_of(1.0)
    states.updates[1] = [torch.tensor([1.0])]
    with pytest.raises(AssertionError, match="version 0 cannot take the update of step 1"):
        states.apply(1, keep=False)


def broken(_: object) -> None:
    raise ValueError("broken")


def test_a_failed_backward_pass_leaves_no_gradients() -> None:
    states = states_of(1.0)
    loss = loss_of(dict(states.at(0)))
    loss.register_hook(broken)
    with pytest.raises(ValueError, match="broken"), states.adding(0, states.at(0)):
        loss.backward()
    assert states.at(0)["p0"].grad is None


def test_options_go_from_one_process_to_another() -> None:
    one, other = states_of(1.0), states_of(1.0)
    halved = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    for states in (one, other):
        states.make_optimizer(partial(torch.optim.SGD, lr=1.0), halved)
    one.updates[0] = [torch.tensor([1.0])]
    one.apply(0, keep=False)
    other.options = one.options
    assert other.optimizer.param_groups[0]["lr"] == 0.5
    assert other.scheduler.state_dict() == one.scheduler.state_dict()
