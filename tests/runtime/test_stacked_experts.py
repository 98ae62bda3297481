"""Experts stacked in one parameter compute in the precision of autocast, their weights cast once a step."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.zoo import build
from galvatron_lite.model.zoo.moe import Experts
from galvatron_lite.parallelism.expert.find import find_mixtures
from galvatron_lite.parallelism.precision import hold_frozen, holding_copies, narrow_experts
from galvatron_lite.parallelism.recompute.apply import apply_recompute

CPU = torch.device("cpu")


def mixture() -> tuple[Experts, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(0)
    experts = next(module for module in build("moe-tiny").modules() if isinstance(module, Experts))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    hidden = torch.randn(24, experts.up_proj.shape[-1], requires_grad=True)
    weights, index = torch.randn(24, len(experts.up_proj)).softmax(-1).topk(2)
    return experts, (hidden, index, weights)


def by_hand(experts: Experts, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Each token's experts one after the other, all in bfloat16."""
    gate, up, down = (one.bfloat16() for one in (experts.gate_proj, experts.up_proj, experts.down_proj))
    rows = []
    for token, chosen, share in zip(hidden.bfloat16(), index, weights, strict=True):
        made = [down[one] @ (functional.silu(gate[one] @ token) * (up[one] @ token)) for one in chosen.tolist()]
        rows.append((torch.stack(made) * share.unsqueeze(-1)).sum(0))
    return torch.stack(rows)


def test_experts_compute_in_bf16_and_gradients_reach_their_fp32_parameters() -> None:
    experts, given = mixture()
    expected = by_hand(experts, *given)
    expected.float().square().sum().backward()
    grads = {name: one.grad for name, one in experts.named_parameters()}
    experts.zero_grad()
    narrow_experts(experts)
    kept: list[torch.dtype] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.dtype) if tensor.dim() > 1 and tensor.shape[-1] == given[0].shape[-1] else None
        return tensor

    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        made = experts(*given)
    assert set(kept) == {torch.bfloat16}
    torch.testing.assert_close(made.float(), expected.float(), rtol=0.05, atol=0.02)
    made.float().square().sum().backward()
    for name, parameter in experts.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.dtype is torch.float32
        known = grads[name]
        assert functional.cosine_similarity(parameter.grad.flatten(), known.flatten(), dim=0) > 0.999


def test_weights_are_cast_once_a_step_and_anew_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, given = mixture()
    seen: list[Tensor] = []
    original = functional.grouped_mm

    def grouped(rows: Tensor, weight: Tensor, **options: Any) -> Tensor:
        seen.append(weight._base if weight._base is not None else weight)
        return original(rows, weight, **options)

    monkeypatch.setattr(functional, "grouped_mm", grouped)
    narrow_experts(experts)
    for _ in range(2):
        with holding_copies(torch.bfloat16, CPU):
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    experts(*given).float().sum().backward()
        with torch.no_grad():
            experts.up_proj.mul_(2)
    first, second, third = seen[:3], seen[3:6], seen[6:9]
    assert [one is two for one, two in zip(first, second, strict=True)] == [True] * 3
    assert not any(one is two for one in first for two in third)
    assert any(torch.equal(2 * one, two) for one in first for two in third)
    seen.clear()
    with holding_copies(torch.bfloat16, CPU), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        experts(*given), experts(*given)
    assert not any(one is two for one in seen[:3] for two in seen[3:])


def test_outside_of_autocast_nothing_changes_and_the_experts_are_found_as_before() -> None:
    experts, given = mixture()
    before, signature = experts(*given), inspect.signature(experts.forward)
    narrow_experts(experts)
    assert torch.equal(experts(*given), before)
    assert inspect.signature(experts.forward) == signature
    assert [one.reason for one in find_mixtures(experts)] == [""]


def test_parameters_are_back_after_a_failure() -> None:
    experts, (hidden, index, weights) = mixture()
    narrow_experts(experts)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError):
        experts(hidden[:, :3], index, weights)
    assert all(isinstance(one, nn.Parameter) for one in experts._parameters.values())


class Counting(TorchDispatchMode):
    """Counts grouped matmuls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._grouped_mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("recompute", "more"), [(Recompute.NONE, 0), (Recompute.SELECTIVE, 0), (Recompute.FULL, 3)])
def test_selective_recomputation_keeps_what_grouped_matmuls_return(recompute: Recompute, more: int) -> None:
    experts, given = mixture()
    apply_recompute(experts, recompute)
    with Counting() as counted:
        experts(*given).sum().backward()
    assert counted.count == 3 + 2 * 3 + more


def test_frozen_weights_are_cast_once_a_step_and_give_what_autocast_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, trained = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
    model, value = nn.Sequential(trained, frozen), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(value)
    expected.float().sum().backward()
    gradient, trained.weight.grad = trained.weight.grad, None
    hold_frozen(model)
    seen: list[int] = []
    linear = functional.linear
    monkeypatch.setattr(functional, "linear", lambda *given: (seen.append(given[1].data_ptr()), linear(*given))[1])
    with holding_copies(torch.bfloat16, CPU):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                found = model(value)
    found.float().sum().backward()
    assert torch.equal(found, expected)
    assert gradient is not None
    assert torch.equal(trained.weight.grad, gradient)  # type: ignore[arg-type]
    assert seen[1] == seen[3] != frozen.weight.data_ptr()
    assert seen[0] == seen[2] == trained.weight.data_ptr()
    assert isinstance(frozen.weight, nn.Parameter)
