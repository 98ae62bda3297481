"""Optimizers and clipping of other code: equal to one process under every plan, or refused before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.runtime.optimizer import _built_again, _check_parameters, _copied, _reach
from tests.pool import WorkerPool
from tests.runtime.examined import examined_once
from tests.runtime.plans import losses_alone, split_model
from tests.runtime.training import Case, make_batch, make_model, make_parallel
from tests.together import Together, together

CPU, STEPS, BLOCKS = torch.device("cpu"), 2, 2
OptimizerFactory = Callable[..., torch.optim.Optimizer]


class Normed(torch.optim.Optimizer):
    """Steps of unit length: of each tensor (as LAMB and LARS), or of all of them together."""

    def __init__(self, params: Any, lr: float = 0.1, *, together: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.together = together

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            norms = [p.grad.norm() for p in held]
            total = torch.stack(norms).norm() if norms else None
            for p, norm in zip(held, norms, strict=True):
                p.sub_(p.grad / (total if self.together else norm) * group["lr"])


class Lion(torch.optim.Optimizer):
    """Signs of a running mean."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.sub_(mean.lerp(p.grad, 0.1).sign() * group["lr"])
                    mean.lerp_(p.grad, 0.01)


class Rounded(torch.optim.Optimizer):
    """Rounds blocks of 16 items by their largest, as 8-bit states are."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for p in self.param_groups[0]["params"]:
            blocks = nn.functional.pad(p.grad.flatten(), (0, -p.numel() % 16)).view(-1, 16)
            scale = blocks.abs().amax(1, keepdim=True) / 127
            rounded = (blocks / scale).round() * scale
            p.sub_(rounded.flatten()[: p.numel()].view_as(p) * self.param_groups[0]["lr"])


def lamb(params: Any, **options: Any) -> torch.optim.Optimizer:
    return Normed(params, **options)


def by_total(params: Any, **options: Any) -> torch.optim.Optimizer:
    return Normed(params, together=True, **options)


REACH: list[tuple[OptimizerFactory, dict[str, Any], str | None]] = [
    *((one, {}, None) for one in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, Lion)),
    *((one, {}, None) for one in (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RAdam)),
    *((one, {}, None) for one in (torch.optim.Adamax, torch.optim.ASGD, torch.optim.Rprop)),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True, "lr": 0.0}, None),
    (torch.optim.Adam, {"fused": True, "lr": 1e-9}, None),
    (torch.optim.AdamW, {"lr": torch.tensor(0.0), "capturable": False}, None),
    (lamb, {}, "tensor"),
    (by_total, {}, "model"),
    (torch.optim.Adafactor, {}, "tensor"),
    (torch.optim.Muon, {}, "tensor"),
    (Rounded, {}, "tensor"),
    (torch.optim.LBFGS, {}, "TypeError"),
]


@pytest.mark.parametrize(("factory", "options", "wanted"), REACH)
def test_what_an_update_depends_on(factory: OptimizerFactory, options: dict[str, Any], wanted: str | None) -> None:
    made = factory([nn.Parameter(torch.ones(4, 4))], **options)
    torch.optim.lr_scheduler.LambdaLR(made, lambda _: 1.0)  # it replaces step() of the instance
    group = {key: value for key, value in made.param_groups[0].items() if key != "params"}
    before = torch.get_rng_state()
    ways = [[lambda groups: factory(groups, **options)], [_copied(made) if factory is by_total else _built_again(made)]]
    for way in ways:
        found = _reach(way, group, 2, CPU, pieces=True)
        assert found == wanted or (wanted == "TypeError" and found is not None and found.startswith(wanted))
    if factory is not torch.optim.Adagrad:  # it has states from the beginning
        assert (_reach([_copied(made)], group, 2, CPU, pieces=True) is None) == (wanted is None)
    assert torch.equal(before, torch.get_rng_state())
    assert not made.state or factory is torch.optim.Adagrad


BLOCK = Strategy(tensor=2)
PLANS: dict[str, Case] = {
    "data": Case([Strategy(data=2)] * 4),
    "zero1": Case([Strategy(zero=2, zero_stage=1)] * 4),
    "zero3": Case([Strategy(zero=2, zero_stage=3)] * 4),
    "tensor": Case([BLOCK] * 4),
    "context": Case([Strategy(context=2)] * 4),
    "mixed": Case([Strategy(data=2), BLOCK, Strategy(zero=2, zero_stage=3), Strategy(data=2)]),
    "pipeline": Case([Strategy()] * 4, cuts=[2], microbatches=2),
    "offload": Case([Strategy(zero=2, zero_stage=3, offload=Offload.STATES)] * 4),
    "mixture": Case([Strategy(data=2), *[Strategy(data=2, expert=2)] * 2, Strategy(data=2)], "moe-tiny"),
}
# of models without biases of keys, whose gradients are noise
PLANS = {name: replace(case, model="llama-tiny") if case.model == "gpt-tiny" else case for name, case in PLANS.items()}
WHOLE = {"data", "context"}
"""Plans under which every rank has whole parameters, and all of them."""
MAX_NORM = 0.05


def by_torch(parameters: Iterable[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, MAX_NORM)


def by_hand(parameters: Iterable[nn.Parameter]) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = sum(g.detach().data.norm(2) ** 2 for g in gradients) ** 0.5
    for g in gradients:
        g.mul_(torch.clamp(MAX_NORM / (total + 1e-6), max=1.0))


def by_squares(parameters: Iterable[nn.Parameter]) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = torch.sqrt(sum((g.float() ** 2).sum() for g in gradients))
    for g in gradients:
        g.mul_(torch.clamp(MAX_NORM / (total + 1e-6), max=1.0))


def of_elements(parameters: Iterable[nn.Parameter]) -> None:
    nn.utils.clip_grad_value_(parameters, 1e-3)


CLIPS = (by_torch, by_hand, by_squares, of_elements)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[..., None] | None) -> list[float]:
    """The user's own loop."""
    clips = (lambda _: None) if clip is None else lambda one: clip(one.parameters())
    return losses_alone(model, optimizer, [make_batch()] * STEPS, clips)


@examined_once()
def clipped(case: Case) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for clip in CLIPS:
        parallel = make_parallel(case)
        try:
            losses = train(parallel, torch.optim.AdamW(parallel.param_groups(), lr=1e-2, eps=1e-4), clip)
            found[clip.__name__] = losses, parallel.full_state_dict()
        except InputError as error:
            found[clip.__name__] = str(error)
    return found


clipped_runs = together(clipped, PLANS)


def same(found: tuple[list[float], dict[str, Tensor]], wanted: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-4)
    for name, tensor in wanted[1].items():
        assert float((found[1][name] - tensor).abs().max()) <= 1e-4 * float(tensor.abs().max()), name


@cache
def trained_alone(
    model: str, name: str, clip: Callable[..., None] | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """One process, with an optimizer of ``FACTORIES``."""
    alone, (factory, options) = make_model(model, BLOCKS), FACTORIES[name]
    return train(alone, factory(alone.parameters(), **options), clip), dict(alone.state_dict())


@pytest.mark.parametrize("name", PLANS)
def test_clipping_by_other_code(clipped_runs: Together, name: str) -> None:
    for clip in CLIPS:
        for found in clipped_runs[name]:
            result = found[clip.__name__]
            if isinstance(result, str):
                assert name not in WHOLE
                assert clip is not of_elements
                assert "parallel.clip_grad_norm(max_norm)" in result
            else:
                same(result, trained_alone(PLANS[name].model, "adamw", clip))
    assert {name} <= WHOLE or any(isinstance(one, str) for one in clipped_runs[name][0].values()) or "zero" in name


FACTORIES: dict[str, tuple[OptimizerFactory, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-4}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "lamb": (lamb, {"lr": 1e-2}),
    "total": (by_total, {"lr": 1e-2}),
}
WAYS = {name: ("made", "own", "by hand") if name in ("adamw", "total") else ("made",) for name in FACTORIES}


@examined_once()
def stepped(case: Case) -> dict[tuple[str, str], Any]:
    """Each optimizer as the model makes it, and as a user does."""
    found: dict[tuple[str, str], Any] = {}
    for name, (factory, options) in FACTORIES.items():
        for way in WAYS[name]:
            parallel = make_parallel(case)
            try:
                if way == "made":
                    optimizer = parallel.optimizer(factory, **options)
                else:
                    optimizer = factory(parallel.param_groups(), **options)
                if way == "by hand":
                    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
                    losses = train(parallel, optimizer, None)
                else:
                    losses = [float(parallel.train_step(make_batch(), optimizer)) for _ in range(STEPS)]
                found[name, way] = losses, parallel.full_state_dict()
            except InputError as error:
                found[name, way] = str(error)
    return found


stepped_runs = together(stepped, PLANS)


@pytest.mark.parametrize("plan", PLANS)
def test_optimizers_of_other_libraries(stepped_runs: Together, plan: str) -> None:
    right = {"adamw"} | ({"adafactor", "lamb", "total"} if plan in WHOLE else set())
    right |= {"adafactor", "lamb"} if plan == "pipeline" else set()
    for name in FACTORIES:
        for found in stepped_runs[plan]:
            for way in WAYS[name]:
                result = found[name, way]
                if name in right:
                    assert not isinstance(result, str), (name, way, result)
                    same(result, trained_alone(PLANS[plan].model, name))
                else:
                    assert isinstance(result, str), (name, way)
                    assert "parameters whole" in result


def of_another_model() -> list[str]:
    said = []
    model = make_model("gpt-tiny", BLOCKS)
    before = torch.optim.AdamW(list(model.parameters()))
    for name, parameters in (("zero3", None), ("zero1", lambda parallel: parallel.module.parameters())):
        parallel = make_parallel(PLANS[name])
        optimizer = before if parameters is None else torch.optim.AdamW(parameters(parallel))
        with pytest.raises(InputError) as raised:
            parallel.train_step(make_batch(), optimizer)
        said.append(str(raised.value))
    return said


def test_an_optimizer_of_parameters_that_are_not_updated_is_refused(pool: WorkerPool) -> None:
    for said in pool.run(2, of_another_model):
        assert all("parallel.optimizer(torch.optim.AdamW" in one for one in said)


def averaged(case: Case) -> tuple[dict[str, Tensor], list[float]]:
    parallel = make_parallel(case)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-4)
    average = AveragedModel(parallel, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    losses = []
    for _ in range(STEPS):
        losses.append(float(parallel.train_step(make_batch(), optimizer)))
        average.update_parameters(parallel)
    whole = average.module.full_state_dict()
    losses.append(float(parallel.train_step(make_batch(), optimizer)))
    return whole, losses


averaged_runs = together(averaged, PLANS)


@pytest.mark.parametrize("name", ["data", "zero1", "zero3", "tensor", "mixed", "pipeline", "offload", "mixture"])
def test_averages_of_parameters(averaged_runs: Together, name: str) -> None:
    model = make_model(PLANS[name].model, BLOCKS)
    average, losses = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(STEPS + 1):
        losses += losses_alone(model, optimizer, [make_batch()])
        if step < STEPS:
            average.update_parameters(model)
    for whole, theirs in averaged_runs[name]:
        same((theirs, whole), (losses, dict(average.module.state_dict())))


def test_a_model_may_be_collected_while_an_optimizer_steps() -> None:
    models, batch = [], make_batch()
    handle = register_optimizer_step_pre_hook(lambda *_: models.__delitem__(slice(1, None)))
    models += [split_model(make_model("gpt-tiny"), batch, Strategy()) for _ in range(2)]
    optimizer = models[0].optimizer(torch.optim.SGD, lr=0.1)
    models[0].train_step(batch, optimizer)
    handle.remove()
    assert (len(models), models[0].step) == (1, 1)


def test_an_optimizer_that_needs_sparse_gradients_is_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    refused = _check_parameters(torch.optim.SparseAdam(parameters), parameters, parameters)
    assert "are dense under every plan" in str(refused)
