"""A stage's parameters, gradients and optimizer, and how they are packed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from galvatron_lite.parallelism.cyclic.mailbox import ALIGNMENT, pack, packed_bytes, unpack
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
