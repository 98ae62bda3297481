"""What users' training loops do: it trains as in one process, or is refused where the loop does it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.runtime.engine import ParallelModel
from tests.pool import WorkerPool
from tests.runtime.training import (
    SAMPLES,
    TOKENS,
    VOCAB,
    Case,
    examined_of,
    layers_of,
    make_batch,
    make_model,
    make_parallel,
    plan_of,
)
from tests.together import Together, together

MODEL, BLOCKS = "llama-tiny", 2
PLANS = {
    "data": Case([Strategy(data=2)] * 4, MODEL),
    "zero1": Case([Strategy(zero=2, zero_stage=1)] * 4, MODEL),
    "zero2": Case([Strategy(zero=2, zero_stage=2)] * 4, MODEL),
    "zero3 in micro-batches": Case([Strategy(zero=2, zero_stage=3)] * 4, MODEL, microbatches=2),
    "tensor": Case([Strategy(tensor=2)] * 4, MODEL),
    "micro-batches": Case([Strategy(data=2)] * 4, MODEL, microbatches=2),
    "host": Case([Strategy(data=2, offload=Offload.STATES)] * 4, MODEL),
    "pipeline": Case([Strategy()] * 4, MODEL, cuts=[2], microbatches=2),
}
Loop = Callable[[nn.Module], list[float]]


def batch_of(seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=1e-2, eps=1e-4)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups_of(model), lr=0.1)


def groups_of(model: nn.Module) -> Any:
    return model.param_groups() if isinstance(model, ParallelModel) else model.parameters()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    loss = model(**batch_of(seed))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def schedulers(model: nn.Module) -> list[float]:
    optimizer = adamw(model)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    losses = []
    for seed in range(3):
        losses.append(step(model, optimizer, seed))
        cosine.step()
        plateau.step(losses[-1])
    return losses


def closures(model: nn.Module) -> list[float]:
    optimizer = adamw(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch_of(0))
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(2)]  # type: ignore[call-overload]


def accumulating(model: nn.Module) -> list[float]:
    optimizer, losses = adamw(model), []
    for seed in range(4):
        loss = model(**batch_of(seed)) / 2
        loss.backward()
        losses.append(loss.item())
        if seed % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def counting(model: nn.Module) -> list[float]:
    """Steps are counted, whatever else calls the model."""
    optimizer, counts = adamw(model), []
    for seed in range(2):
        model(**batch_of(seed)).backward()
        step(model, optimizer, seed)
        with torch.no_grad():
            model(**batch_of(9))
        counts.append(float(model.step if isinstance(model, ParallelModel) else seed + 1))
    return counts


def zeroing_before_backward(model: nn.Module) -> list[float]:
    optimizer, losses = adamw(model), []
    for seed in range(3):
        loss = model(**batch_of(seed))
        optimizer.zero_grad(set_to_none=seed < 2)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def several_losses(model: nn.Module) -> list[float]:
    optimizer = adamw(model)
    loss = model(**batch_of(0)) + 0.5 * model(**batch_of(1))
    loss.backward()
    optimizer.step()
    return [loss.item()]


def weighted_by_a_parameter(model: nn.Module) -> list[float]:
    weight = nn.Parameter(torch.tensor(0.3))
    optimizers = sgd(model), torch.optim.SGD([weight], lr=0.01)
    for seed in range(2):
        ((-weight).exp() * model(**batch_of(seed)) + weight).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [weight.item()]


def several_optimizers(model: nn.Module) -> list[float]:
    parameters = list(model.parameters())
    many = torch.optim.AdamW([one for one in parameters if one.dim() > 1], lr=1e-2, eps=1e-4)
    few = torch.optim.SGD([one for one in parameters if one.dim() < 2], lr=0.1)
    losses = []
    for seed in range(2):
        loss = model(**batch_of(seed))
        loss.backward()
        many.step()
        few.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def freezing(model: nn.Module) -> list[float]:
    """Vectors, and all that the first stage of a pipeline has."""
    optimizer = adamw(model)
    losses = []
    for seed, trains in enumerate((False, True, False)):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trains or (parameter.dim() > 1 and not name.startswith(("embed", "blocks.0"))))
        losses.append(step(model, optimizer, seed))
    return losses


def thawing(model: nn.Module) -> list[float]:
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return [step(model, adamw(model), 0)]


def clamping(model: nn.Module) -> list[float]:
    optimizer, losses = adamw(model), []
    for seed in range(2):
        losses.append(step(model, optimizer, seed))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.05, 0.05)
    return losses


def swapping_averages(model: nn.Module) -> list[float]:
    optimizer, losses = adamw(model), []
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    for seed in range(2):
        losses.append(step(model, optimizer, seed))
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for average, parameter in zip(averages, model.parameters(), strict=True):
                parameter.copy_(average.lerp_(parameter, 0.5))
            losses.append(float(model(**batch_of(9))))
            for before, parameter in zip(kept, model.parameters(), strict=True):
                parameter.copy_(before)
    return losses


def evaluating(model: nn.Module) -> list[float]:
    optimizer, losses = adamw(model), []
    for seed in range(2):
        losses.append(step(model, optimizer, seed))
        model.eval()
        with torch.inference_mode():
            losses.append(float(model(**batch_of(9))))
        model.train()
    return losses


def sharpness_aware(model: nn.Module) -> list[float]:
    """SAM: the gradient beside the parameters."""
    optimizer = sgd(model)
    model(**batch_of(0)).backward()
    with torch.no_grad():
        moved = [(one, one.grad.clone().mul_(0.05)) for one in model.parameters() if one.grad is not None]
        for parameter, way in moved:
            parameter.add_(way)
    optimizer.zero_grad()
    loss = model(**batch_of(0))
    loss.backward()
    with torch.no_grad():
        for parameter, way in moved:
            parameter.sub_(way)
    optimizer.step()
    return [loss.item()]


def penalties(model: nn.Module) -> list[float]:
    loss = model(**batch_of(0)) + 0.01 * next(model.parameters()).square().sum()
    loss.backward()
    return [loss.item()]


def calling_the_model_itself(model: nn.Module) -> list[float]:
    inner = model.module if isinstance(model, ParallelModel) else model
    with torch.no_grad():
        loss = inner(**batch_of(0)) if not isinstance(model, ParallelModel) or len(model.plan.stages) == 1 else 0.0
    inner(**batch_of(0)).backward()
    return [float(loss)]


def hooks(model: nn.Module) -> list[float]:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return [step(model, sgd(model), 0)]


def steps_in_backward(model: nn.Module) -> list[float]:
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
    loss = model(**batch_of(0))
    loss.backward()
    return [loss.item()]


def gradients_by_hand(model: nn.Module) -> list[float]:
    parameters = list(model.parameters())
    loss = model(**batch_of(0))
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    sgd(model).step()
    return [loss.item()]


def backward_twice(model: nn.Module) -> list[float]:
    optimizer = sgd(model)
    loss = model(**batch_of(0))
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    return [loss.item()]


def casting(model: nn.Module) -> list[float]:
    model.to("cpu").float()
    model.to(torch.bfloat16)
    return []


def users_model(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, ParallelModel) else model


def zeroing_the_model(model: nn.Module) -> list[float]:
    optimizer, losses = adamw(model), []
    for seed in range(3):
        users_model(model).zero_grad()
        loss = model(**batch_of(seed))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def clipping_the_model(model: nn.Module) -> list[float]:
    optimizer, losses = adamw(model), []
    for seed in range(2):
        loss = model(**batch_of(seed))
        loss.backward()
        losses += [loss.item(), float(nn.utils.clip_grad_norm_(users_model(model).parameters(), 0.1))]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def reading_gradients(model: nn.Module) -> list[float]:
    model(**batch_of(0)).backward()
    read = [0.0, 0.0, 0.0]
    for parameter in model.parameters():
        assert parameter.grad is not None
        read[0] += float(parameter.grad.norm())
        read[1] = max(read[1], parameter.grad.clone().abs().max().item())
        read[0] += float(abs(parameter.grad.cpu().numpy()).sum())
        read[2] += bool((parameter.grad * parameter.grad > 1e-7).any())
    return read


def zeroing_rows(model: nn.Module) -> list[float]:
    """Rows of some embeddings get no gradient."""
    optimizer, losses = adamw(model), []
    for seed in range(2):
        loss = model(**batch_of(seed))
        loss.backward()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                gradient = parameter.grad
                assert gradient is not None
                gradient[:3] = 0.0
                gradient[gradient.abs() < 1e-4] = 0.0
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def changing_a_row(model: nn.Module) -> list[float]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[1::2].mul_(0.5)
    return [step(model, sgd(model), 0)]


def noise(model: nn.Module) -> list[float]:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return [step(model, sgd(model), 0)]


def normalising_parameters(model: nn.Module) -> list[float]:
    losses = [step(model, sgd(model), 0)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(parameter.norm() + 1)
    return losses


def clipping_values_of_the_model(model: nn.Module) -> list[float]:
    optimizer, losses = sgd(model), []
    for seed in range(2):
        loss = model(**batch_of(seed))
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_value_(users_model(model).parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def setting_values_of_the_model(model: nn.Module) -> list[float]:
    optimizer, losses = adamw(model), []
    for seed in range(3):
        losses.append(step(model, optimizer, seed))
        for parameter in users_model(model).parameters():
            if seed:
                parameter.data.clamp_(-0.05, 0.05)
            else:
                with torch.no_grad():
                    parameter.mul_(0.5)
    return losses


def freezing_the_model(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.SGD(groups_of(model), lr=0.1, momentum=0.9), []
    for seed in range(3):
        losses.append(step(model, optimizer, seed))
        for parameter in users_model(model).parameters():
            parameter.requires_grad_(parameter.dim() > 1)
    return losses


def replacing_data(model: nn.Module) -> list[float]:
    optimizer = sgd(model)
    losses = [step(model, optimizer, 0)]
    for parameter in users_model(model).parameters():
        parameter.data = parameter.data * 0.5
    return [*losses, step(model, optimizer, 1)]


def setting_values_of_shards(model: nn.Module) -> list[float]:
    optimizer, losses = adamw(model), []
    for seed in range(3):
        losses.append(step(model, optimizer, seed))
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
    return losses


def replacing_data_of_shards(model: nn.Module) -> list[float]:
    optimizer = sgd(model)
    losses = [step(model, optimizer, 0)]
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    return [*losses, step(model, optimizer, 1)]


def replacing_a_module(model: nn.Module) -> list[float]:
    inner = users_model(model)
    inner.embed, inner.norm = nn.Identity(), nn.Identity()
    return [step(model, sgd(model), 0)]


def casting_the_model(model: nn.Module) -> list[float]:
    users_model(model).half()
    return [step(model, sgd(model), 0)]


def copying_the_model(model: nn.Module) -> list[float]:
    copied = copy.deepcopy(users_model(model))
    return [float(sum(one.detach().square().sum() for one in copied.parameters()))]


def wrapping(model: nn.Module) -> list[float]:
    nn.parallel.DistributedDataParallel(model)
    return []


def resilient(model: nn.Module) -> list[float]:
    optimizer = torch.optim.Rprop(groups_of(model), lr=1e-3)
    return [step(model, optimizer, seed) for seed in range(2)]


def hooks_of_blocks(model: nn.Module) -> list[float]:
    def halve(_module: nn.Module, gradients: Any, _outputs: Any) -> Any:
        return tuple(None if one is None else one / 2 for one in gradients)

    for block in users_model(model).blocks.children():
        block.register_full_backward_hook(halve)
    return [step(model, sgd(model), seed) for seed in range(2)]


def patched_blocks(model: nn.Module) -> list[float]:
    def halved(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return 0.5 * forward(*args, **kwargs)

    for block in users_model(model).blocks.children():
        block.forward = partial(halved, block.forward)
    return [step(model, sgd(model), seed) for seed in range(2)]


def replaced_parameters(model: nn.Module) -> list[float]:
    norm: Any = users_model(model).norm
    norm.weight = nn.Parameter(torch.ones_like(norm.weight))
    return [step(model, sgd(model), 0)]


def added_modules(model: nn.Module) -> list[float]:
    for block in users_model(model).blocks.children():
        block.added = nn.Linear(4, 4)
    return [step(model, sgd(model), 0)]


def parameters_from_before(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(users_model(model).before, lr=0.1)  # type: ignore[arg-type]
    return [step(model, optimizer, seed) for seed in range(2)]


def adversarial(model: nn.Module) -> list[float]:
    weights = torch.ones(SAMPLES, TOKENS, requires_grad=True)
    model(**batch_of(0), weights=weights)
    return []


LOOPS: dict[str, tuple[Loop, str]] = {
    "schedulers": (schedulers, ""),
    "closures": (closures, ""),
    "accumulating": (accumulating, ""),
    "counting": (counting, ""),
    "zeroing before backward": (zeroing_before_backward, ""),
    "several losses": (several_losses, ""),
    "weighted by a parameter": (weighted_by_a_parameter, ""),
    "several optimizers": (several_optimizers, ""),
    "freezing": (freezing, ""),
    "thawing": (thawing, "It was frozen when the plan was applied"),
    "clamping": (clamping, ""),
    "swapping averages": (swapping_averages, ""),
    "evaluating": (evaluating, ""),
    "sharpness aware": (sharpness_aware, ""),
    "penalties": (penalties, "inside the model's forward"),
    "calling the model itself": (calling_the_model_itself, "parallel.train_step(batch, optimizer)"),
    "hooks": (hooks, "A hook on a parameter"),
    "hooks of the model": (lambda model: [step(model, sgd(model), 0)], "A hook on a parameter"),
    "steps in backward": (steps_in_backward, "A hook on a parameter"),
    "gradients by hand": (gradients_by_hand, "loss.backward() alone"),
    "backward twice": (backward_twice, "a second time"),
    "casting": (casting, "before auto_parallelize"),
    "adversarial": (adversarial, "requires a gradient"),
    "zeroing the model": (zeroing_the_model, ""),
    "clipping the model": (clipping_the_model, "parallel.clip_grad_norm(max_norm)"),
    "reading gradients": (reading_gradients, "parallel.clip_grad_norm(max_norm)"),
    "zeroing rows": (zeroing_rows, "places and random numbers"),
    "changing a row": (changing_a_row, "places"),
    "noise": (noise, "andom numbers"),
    "normalising parameters": (normalising_parameters, "parallel.full_state_dict()"),
    "parameters from before": (parameters_from_before, "parallel.parameters()"),
    "clipping values of the model": (clipping_values_of_the_model, "parallel.parameters()"),
    "setting values of the model": (setting_values_of_the_model, ""),
    "freezing the model": (freezing_the_model, ""),
    "replacing data": (replacing_data, "parameter.data.copy_"),
    "setting values of shards": (setting_values_of_shards, ""),
    "replacing data of shards": (replacing_data_of_shards, "parameter.data.copy_"),
    "replacing a module": (replacing_a_module, "before auto_parallelize"),
    "casting the model": (casting_the_model, "before auto_parallelize"),
    "copying the model": (copying_the_model, "AveragedModel"),
    "wrapping": (wrapping, "sums gradients over ranks already"),
    "resilient": (resilient, "does not run on shards"),
    "hooks of blocks": (hooks_of_blocks, "A pipeline stage ends at it"),
    "patched blocks": (patched_blocks, ""),
    "replaced parameters": (replaced_parameters, "before auto_parallelize"),
    "added modules": (added_modules, "before auto_parallelize"),
}
"""Loops, and what the error says where a plan cannot follow."""
ALWAYS_REFUSED = {
    "thawing", "penalties", "calling the model itself", "hooks", "hooks of the model", "gradients by hand", "casting",
    "adversarial", "added modules", "replaced parameters", "replacing a module", "casting the model", "wrapping",
}  # fmt: skip
SHARDED = {
    "parameters from before", "replacing data", "replacing data of shards", "copying the model", "resilient",
    "changing a row", "noise",
}  # fmt: skip
REFUSED = {
    "pipeline": {
        "noise", "hooks of blocks", "reading gradients", "steps in backward", "backward twice", "clipping the model",
        "copying the model",
    },
    "zero2": SHARDED,
    "zero3 in micro-batches": {"steps in backward", "backward twice", *SHARDED},
    "data": {"steps in backward"},
    "host": {"steps in backward", "parameters from before"},
    "micro-batches": {"steps in backward", "backward twice"},
    "zero1": {"steps in backward", "clipping the model", "clipping values of the model", *SHARDED}
    - {"copying the model"},
    "tensor": {
        "changing a row",
        "noise",
        "zeroing rows",
        "reading gradients",
        "normalising parameters",
        "steps in backward",
        "clipping the model",
        "copying the model",
    },
}  # fmt: skip


def loops_under(case: Case) -> list[str]:
    """All; what is refused before ranks meet, under two plans."""
    return [name for name in LOOPS if name not in ALWAYS_REFUSED or case in (PLANS["tensor"], PLANS["pipeline"])]


def model_for(loop: str) -> nn.Module:
    model = make_model(MODEL, BLOCKS)
    if loop == "parameters from before":
        model.before = list(model.parameters())
    for parameter in model.parameters():
        if parameter.dim() < 2 and loop == "thawing":
            parameter.requires_grad_(False)
        if loop == "hooks of the model":
            parameter.register_hook(lambda gradient: gradient / 2)
    return model


@examined_of(MODEL, BLOCKS).taken()
def run_loops(case: Case) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in loops_under(case):
        loop, model = LOOPS[name][0], model_for(name)
        try:
            parallel = ParallelModel(model, plan_of(case), layers_of(MODEL, BLOCKS), make_batch(), device="cpu")
            found[name] = loop(parallel), parallel.full_state_dict()
        except InputError as error:
            found[name] = str(error)
    return found


@cache
def alone(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """What a loop finds in one process, and the state after it."""
    model = model_for(name)
    return LOOPS[name][0](model), model.state_dict()


looped = together(run_loops, PLANS)


@pytest.mark.parametrize("plan", PLANS)
def test_loops_train_as_in_one_process_or_are_refused(looped: Together, plan: str) -> None:
    for found in looped[plan]:
        for name, result in found.items():
            message = LOOPS[name][1]
            if name in ALWAYS_REFUSED | REFUSED.get(plan, set()):
                assert isinstance(result, str), name
                assert message in result
                continue
            assert not isinstance(result, str), (name, result)
            losses, state = alone(name)
            assert result[0] == pytest.approx(losses, rel=1e-4), name
            for key, wanted in state.items():
                assert float((result[1][key] - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max()), (name, key)


def test_a_compiled_split_model_trains_like_one_that_is_not(pool: WorkerPool) -> None:
    assert pool.run(2, compiled) == [pytest.approx([make_model(MODEL, BLOCKS)(**batch_of(0)).item()])] * 2


def compiled() -> list[float]:
    loss = torch.compile(make_parallel(PLANS["pipeline"]), backend="eager")(**batch_of(0))
    loss.backward()
    return [loss.item()]


def test_another_loss_before_the_models_is_refused(pool: WorkerPool) -> None:
    for said in pool.run(2, other_loss_first):
        assert "of another loss than the model's" in said


def other_loss_first() -> str:
    parallel = make_parallel(PLANS["data"])
    with pytest.raises(InputError) as raised:
        next(parallel.parameters()).square().sum().backward()
    return str(raised.value)


def test_a_count_of_a_part_of_the_parameters_warns(pool: WorkerPool) -> None:
    assert pool.run(2, counted) == [True, True]


def counted() -> bool:
    parallel = make_parallel(PLANS["pipeline"])
    with pytest.warns(UserWarning, match="a sum over parallel"):
        float(sum(one.detach().abs().sum() + one.norm() for one in parallel.parameters()))
    with pytest.warns(UserWarning, match="counts those of this one"):
        return sum(one.numel() for one in parallel.parameters()) > 0
