"""Norms and stacked experts under autocast, weights cast once a step, and updates."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.zoo import build
from galvatron_lite.model.zoo.moe import Experts
from galvatron_lite.parallelism.expert.find import find_mixtures
from galvatron_lite.parallelism.precision import (
    compute_context,
    hold_frozen,
    holding_copies,
    narrow_experts,
    narrow_norms,
)
from galvatron_lite.parallelism.recompute.apply import apply_recompute
from galvatron_lite.runtime.optimizer import fused_on_host, split_groups
from galvatron_lite.verify.dry.ledger import Ledger
from galvatron_lite.verify.dry.mode import DryMode
from galvatron_lite.verify.dry.world import RankPlace
from tests.pool import WorkerPool

WIDTH = 16


class Doubled(nn.LayerNorm):
    """One with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's word
        return 2 * super().forward(input)


@pytest.mark.parametrize("norm", [nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, bias=False), nn.RMSNorm(WIDTH)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_made_has_the_dtype_given(norm: nn.Module, dtype: torch.dtype) -> None:
    with torch.no_grad():
        for one in norm.parameters():
            one.uniform_(0.5, 1.5)
    value = torch.randn(4, WIDTH)
    expected, model = norm(value), nn.Sequential(norm)
    narrow_norms(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = model(value.to(dtype))
    assert made.dtype is dtype
    torch.testing.assert_close(made.float(), expected, rtol=2e-2 if dtype is torch.bfloat16 else 1e-6, atol=2e-2)


def test_shapes_alone_can_be_asked_for() -> None:
    norm = nn.RMSNorm(WIDTH, device="meta")
    narrow_norms(norm)
    assert norm(torch.empty(3, WIDTH, device="meta")).shape == (3, WIDTH)


def test_norms_with_a_forward_of_their_own_stay() -> None:
    norm, value = Doubled(WIDTH), torch.randn(2, WIDTH)
    expected = norm(value)
    narrow_norms(norm)
    assert "forward" not in vars(norm)
    assert torch.equal(norm(value), expected)


class RootNorm(nn.Module):
    """RMSNorm in steps, as models of transformers have it; ``offset`` of its weight (Gemma has 1)."""

    def __init__(self, offset: float | None = None) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.offset = nn.Parameter(torch.rand(WIDTH)), 1e-6, offset

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        wide = value.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight if self.offset is None else self.weight + self.offset) * wide.to(value.dtype)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(WIDTH)), 1e-6

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.weight * value


def test_a_module_that_computes_rms_norm_keeps_and_gives_narrow_tensors() -> None:
    norm, value = RootNorm(), torch.randn(4, WIDTH)
    expected, told = norm(value), DryMode(Ledger(RankPlace()))
    with told:  # values are not there; what the module computes is found out all the same
        narrow_norms(norm)
    assert "forward" in vars(norm)
    torch.testing.assert_close(norm(value), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = norm(value.bfloat16())
    assert made.dtype is torch.bfloat16
    torch.testing.assert_close(made.float(), expected, rtol=2e-2, atol=2e-2)
    made.sum().backward()
    assert norm.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("module", [RootNorm(1.0), Scale()], ids=str)
def test_modules_that_compute_something_else_stay(module: nn.Module) -> None:
    narrow_norms(module)
    assert "forward" not in vars(module)


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


def copies_kept(passes: int) -> int:
    """Different half-precision copies of a Linear's weight that so many forward passes keep for backward."""
    linear, kept = nn.Linear(4, 8, bias=False), set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) in ((8, 4), (4, 8)):
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    losses = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        for _ in range(passes):
            with compute_context(torch.bfloat16, CPU):
                losses.append(linear(torch.randn(3, 4, requires_grad=True)).float().sum())
    gradients = [torch.autograd.grad(loss, linear.weight)[0] for loss in losses]
    assert all(one.dtype is torch.float32 for one in gradients)
    return len(kept)


def test_passes_of_a_step_share_copies() -> None:
    assert copies_kept(3) == 3
    with holding_copies(torch.bfloat16, CPU):
        assert copies_kept(3) == 1
        assert not torch.is_autocast_enabled("cpu")


def test_nothing_is_held_in_full_precision() -> None:
    with holding_copies(None, CPU):
        assert copies_kept(2) == 2


def test_updates_on_the_host_are_fused_unless_foreach_is_asked_for() -> None:
    groups = [
        {"params": [nn.Parameter(torch.ones(3))], "lr": 0.1},
        {"params": [nn.Parameter(torch.empty(3, device="meta"))]},
    ]
    made = fused_on_host(groups, torch.optim.AdamW, {"lr": 1e-3})
    assert [group.get("fused") for group in made] == [True, None]
    assert fused_on_host(groups, torch.optim.AdamW, {"foreach": True}) == groups
    assert fused_on_host(groups, torch.optim.RMSprop, {}) == groups
    plain, fused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    for parameter, given in ((plain, {"params": [plain]}), (fused, {"params": [fused], "fused": True})):
        optimizer = torch.optim.AdamW([given], lr=0.1)
        parameter.grad = torch.tensor([1.0, -2.0, 0.5])
        optimizer.step()
    torch.testing.assert_close(fused, plain)


def split_mixed() -> list[tuple[int, bool, float | None]]:
    mesh = init_device_mesh("cpu", (2,))
    shared = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])) for _ in range(2)]
    plain = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    groups = split_groups(
        [{"params": [plain[0], shared[0], plain[1]], "weight_decay": 0.0}, {"params": [plain[2], shared[1]]}]
    )
    found = [(len(g["params"]), isinstance(g["params"][0], DTensor), g.get("weight_decay")) for g in groups]
    torch.optim.AdamW(groups, lr=1e-3, foreach=True)
    return found


def test_options_stay_with_their_parameters(pool: WorkerPool) -> None:
    wanted = {(1, False, None), (1, True, None), (2, False, 0.0), (1, True, 0.0)}
    assert [set(found) for found in pool.run(2, split_mixed)] == [wanted] * 2
