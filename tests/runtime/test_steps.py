"""Steps: mixed precision, the loss of a batch whose backward pass is done, updates."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from galvatron_lite.model.discover import discover_layers
from galvatron_lite.parallelism.precision import compute_context, holding_copies
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.optimizer import fused_on_host, split_groups
from tests.equivalence.families import PlainModel, make_batches
from tests.pool import WorkerPool
from tests.runtime.plans import make_plan

CPU = torch.device("cpu")


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


SAMPLES = 4
BATCHES = make_batches("plain", SAMPLES, 2)


def model_of(microbatches: int = 2) -> ParallelModel:
    torch.manual_seed(0)
    model = PlainModel()
    layers = discover_layers(model, BATCHES[0])
    names = [[layer.name for layer in layers]]
    plan = make_plan(names, [[Strategy()] * len(layers)], SAMPLES, microbatches)
    return ParallelModel(model, plan, layers, BATCHES[0], device="cpu")


def test_plain_parameters_stay_one_group() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    (group,) = split_groups(parameters)
    assert [id(p) for p in group["params"]] == [id(p) for p in parameters]


def test_updates_on_the_host_are_fused_unless_told() -> None:
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
