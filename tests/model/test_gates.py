"""Gated MLPs that keep their gates alone: they train as before, and keep one tensor less."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from galvatron_lite.model.gates import keep_gates, keeping_gates
from tests.model.models import saved_storages

ROWS, WIDTH = 6, 16


class Gated(nn.Module):
    def __init__(self, act: nn.Module, *, swapped: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.act, self.swapped = act, swapped

    def forward(self, rows: Tensor) -> Tensor:
        first, second = self.act(self.gate(rows)), self.up(rows)
        return self.down(second * first if self.swapped else first * second)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(self.act(self.up(rows)))


def kept(module: nn.Module, rows: Tensor) -> int:
    """Tensors of the size of ``rows`` that a pass leaves behind for backward, the input apart."""
    saved = saved_storages(lambda: module(rows), module).values()
    return sum(one.numel() == rows.numel() and one.data_ptr() != rows.data_ptr() for one in saved)


def gradients(module: nn.Module, rows: Tensor, run: Any = None) -> list[Tensor]:
    leaf = rows.clone().requires_grad_()
    (run or module)(leaf).square().sum().backward()
    made = [leaf.grad, *(one.grad for one in module.parameters())]
    module.zero_grad()
    return [one for one in made if one is not None]


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh")], ids=str)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_gated_mlp_trains_alike_and_keeps_one_tensor_less(act: nn.Module, swapped: bool) -> None:
    torch.manual_seed(0)
    module, rows = Gated(act, swapped=swapped), torch.randn(2, ROWS, WIDTH)
    expected, before = gradients(module, rows), kept(module, rows)
    keep_gates(module)
    assert all(map(torch.equal, gradients(module, rows), expected))
    assert kept(module, rows) == before - 1
    again = gradients(module, rows, lambda leaf: checkpoint(module, leaf, use_reentrant=False))
    assert all(map(torch.equal, again, expected))


def test_what_does_not_gate_runs_as_it_is() -> None:
    module, rows = Plain(), torch.randn(ROWS, WIDTH)
    expected, before = gradients(module, rows), kept(module, rows)
    keep_gates(module)
    assert all(map(torch.equal, gradients(module, rows), expected))
    assert kept(module, rows) == before
    assert not module.forward.args[0].gates  # type: ignore[attr-defined]
    relu = Gated(nn.ReLU())
    keep_gates(relu)
    assert "forward" not in vars(relu)


class Counting(nn.Module):
    """An activation function of a model's own, which draws and counts."""

    calls = 0

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(1)
        return nn.functional.silu(rows)


def test_a_function_of_the_model_itself_is_tried_without_side_effects() -> None:
    module, state = Gated(Counting()), torch.random.get_rng_state()
    keep_gates(module)
    assert "forward" in vars(module)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert module.act.calls == 0


def test_transforms_of_functions_run_as_without() -> None:
    module, rows = Gated(nn.SiLU()), torch.randn(ROWS, WIDTH)
    expected = torch.func.grad(lambda value: module(value).sum())(rows)
    keep_gates(module)
    assert torch.equal(torch.func.grad(lambda value: module(value).sum())(rows), expected)


def test_a_copy_runs_on_its_own_weights_and_leaving_restores() -> None:
    module, rows = Gated(nn.SiLU()), torch.randn(ROWS, WIDTH)
    with keeping_gates(module):
        twin = copy.deepcopy(module)
    assert "forward" not in vars(module)
    with torch.no_grad():
        twin.down.weight.zero_()
    assert not twin(rows).any()
    assert module(rows).any()


def test_a_factor_that_is_written_to_is_reported() -> None:
    class Writing(Gated):
        def forward(self, rows: Tensor) -> Tensor:
            first, second = self.act(self.gate(rows)), self.up(rows)
            made = first * second
            second.add_(1)
            return made

    module = Writing(nn.SiLU())
    keep_gates(module)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        module(torch.randn(ROWS, WIDTH)).sum().backward()


def test_results_are_released() -> None:
    """The result of the activation function is gone once the product is there."""
    module, seen = Gated(nn.SiLU()), list[Any]()
    module.act.register_forward_hook(lambda _module, _args, output: seen.append(weakref.ref(output)))
    keep_gates(module)
    gc.disable()
    try:
        output = module(torch.randn(ROWS, WIDTH))
        assert seen[0]() is None
    finally:
        gc.enable()
    output.sum().backward()


def test_second_derivatives() -> None:
    module = Gated(nn.SiLU()).double()
    keep_gates(module)
    assert torch.autograd.gradgradcheck(module, (torch.randn(2, WIDTH, dtype=torch.double, requires_grad=True),))


class Remembering(nn.Module):
    """A module without parameters that remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.tensor(-1.0))

    def forward(self, rows: Tensor) -> Tensor:
        self.most.copy_(torch.maximum(self.most, rows.detach().max()))
        return rows


def test_modules_are_not_run_on_made_up_values() -> None:
    model = nn.ModuleDict({"observer": Remembering(), "layer": nn.Linear(2, 2)})
    keep_gates(model)
    assert float(model["observer"].most) == -1.0
