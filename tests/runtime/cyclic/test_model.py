"""``CyclicModel`` on one process: what it refuses, how it is made, precision, models of all sorts."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite import auto, auto_parallelize
from galvatron_lite.errors import InputError, LaunchError, NonFiniteLossError
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.cyclic.model import CyclicModel
from galvatron_lite.world import join
from tests.cyclic_reference import train_reference
from tests.parallelism.cyclic.models import Blocks, blocks_case, make_batches, make_plan, split

SGD = partial(torch.optim.SGD, lr=0.05)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    join(torch.device("cpu"))
    torch.manual_seed(0)
    yield
    dist.destroy_process_group()


def made(count: int = 2, **options: Any) -> tuple[CyclicModel, list[dict[str, Tensor]]]:
    model, layers, stages = blocks_case(count)
    return CyclicModel(model, make_plan(stages, "cdp-v2", "single"), layers, **options), make_batches(3, count)


def discovered(stages: list[list[str]]) -> list[list[str]]:
    """With the layers before and after the blocks."""
    return [["before", *stages[0]], *stages[1:-1], [*stages[-1], "after"]]


def thirds(names: list[str]) -> list[list[str]]:
    third = (len(names) + 2) // 3
    return [names[start : start + third] for start in range(0, len(names), third)]


def test_auto_parallelize_takes_a_plan() -> None:
    model, _, stages = blocks_case(3)
    batches = make_batches(4, 3)
    expected = train_reference(model, stages, [split(batch, 3) for batch in batches], optimizer_factory=SGD)
    plan = make_plan(discovered(stages), "cdp-v2", "single")
    blocks = [name for stage in stages for name in stage]
    cyclic = auto_parallelize(model, batches[0], plan=plan, blocks=blocks)
    assert isinstance(cyclic, CyclicModel)
    optimizer = cyclic.optimizer(torch.optim.SGD, lr=0.05)
    for batch in batches:
        cyclic.train_step(batch, optimizer)
    for name, value in cyclic.full_state_dict().items():
        torch.testing.assert_close(value, expected[-1].parameters[name])


@dataclass(frozen=True)
class FakeProfile:
    """What ``auto_parallelize`` reads of a profile before it plans."""

    graph: Any = field(default_factory=lambda: SimpleNamespace(dead=0, parameters=1))
    needs: Any = None


@pytest.mark.parametrize(
    ("delay", "told"),
    [
        (None, {"allow_delay": False, "fix": ()}),
        ("cyclic", {"allow_delay": True, "fix": ()}),
        ("cdp-v1", {"allow_delay": True, "fix": ("rule=cdp-v1",)}),
    ],
)
def test_the_planner_gets_the_delay(monkeypatch: pytest.MonkeyPatch, delay: str | None, told: dict[str, Any]) -> None:
    model, layers, stages = blocks_case(2)
    asked: list[dict[str, Any]] = []

    def plan(_profile: Any, **setup: Any) -> Plan:
        asked.append(setup)
        return make_plan(discovered(stages), "cdp-v1", "single")

    monkeypatch.setattr("galvatron_lite.api.plan", plan)
    monkeypatch.setattr("galvatron_lite.auto._find_profile", lambda *_: FakeProfile())
    auto_parallelize(model, make_batches(1, 2)[0], delay=delay, blocks=[layer.name for layer in layers])
    assert {key: asked[0][key] for key in told} == told


def test_refusals() -> None:
    cyclic, batches = made()
    optimizer = cyclic.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(InputError, match=r"max_grad_norm.*1\.0.*clip each stage"):
        cyclic.train_step(batches[0], optimizer, max_grad_norm=1.0)
    with pytest.raises(InputError, match=r"batch: 3 .*multiple of 2"):
        cyclic.train_step({key: value[:3] for key, value in batches[0].items()}, optimizer)
    with pytest.raises(InputError, match=r"call of the model.*full_state_dict"):
        cyclic(batches[0])
    with pytest.raises(InputError, match=r"optimizer.*SGD.*of this model"):
        cyclic.train_step(batches[0], torch.optim.SGD(cyclic.parameters(), lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="max_grad_norm"):
        made(max_grad_norm=1.0)


@pytest.mark.parametrize(("mode", "delay"), [(None, "v3"), ("inference", "cyclic")])
def test_a_delay_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch, mode: str | None, delay: str) -> None:
    monkeypatch.setattr("galvatron_lite.auto._find_profile", lambda *_: FakeProfile())
    with pytest.raises(InputError, match=f"delay: '{delay}'.*leave it out"):
        auto_parallelize(Blocks(2), make_batches(1, 2)[0], blocks=["blocks.0", "blocks.1"], mode=mode, delay=delay)


def test_a_world_of_another_size_is_refused() -> None:
    model, layers, stages = blocks_case(2)
    with pytest.raises(LaunchError, match=r"for 3 device.*but 1 process"):
        CyclicModel(model, make_plan(stages, "cdp-v1", "stages"), layers)


def test_tied_parameters_over_stages_are_refused() -> None:
    model, layers, stages = blocks_case(2)
    model.blocks[1].weight = model.blocks[0].weight
    with pytest.raises(InputError, match=r"blocks\.0\.weight.*blocks\.0 and blocks\.1 share it.*Untie"):
        CyclicModel(model, make_plan(stages, "cdp-v2", "single"), layers)


def test_a_loss_that_is_not_finite_stops() -> None:
    cyclic, batches = made()
    optimizer = cyclic.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(NonFiniteLossError, match=r"micro-batch 0.*last checkpoint"):
        cyclic.train_step({key: value * float("inf") for key, value in batches[0].items()}, optimizer)


def test_each_stage_has_an_optimizer() -> None:
    cyclic, _ = made(3)
    optimizer = cyclic.optimizer(torch.optim.Adam, lr=0.1)
    assert len(optimizer.stages) == len(optimizer.param_groups) == 3
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(cyclic.module.parameters()))


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_early_release_and_recomputation_change_no_number(recompute: Recompute) -> None:
    model, layers, stages = blocks_case(4)
    batches, found = make_batches(4, 4), []
    for early_release, strategy in ((False, Strategy()), (True, Strategy(recompute=recompute))):
        plan = make_plan(stages, "cdp-v2", "single", strategy=strategy)
        cyclic = CyclicModel(copy.deepcopy(model), plan, layers, early_release=early_release)
        optimizer = cyclic.optimizer(torch.optim.Adam, lr=0.01)
        for batch in batches:
            cyclic.train_step(batch, optimizer)
        found.append(cyclic.full_state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_u_net_is_cut_across_its_skips() -> None:
    model = build("unet-mini", image_size=8).double()
    example = {key: one.double() if one.is_floating_point() else one for key, one in model.example_batch(6).items()}
    layers = discover_layers(model, example)
    stages = thirds([layer.name for layer in layers])
    plan = replace(make_plan(stages, "cdp-v2", "single"), microbatches=3, global_batch=6)
    paths = [[path for layer in layers if layer.name in names for path in layer.modules] for names in stages]
    parts = [{key: one[start : start + 2] for key, one in example.items()} for start in (0, 2, 4)]
    expected = train_reference(model, paths, [parts] * 3, optimizer_factory=SGD)
    cyclic = CyclicModel(model, plan, layers, example)
    optimizer = cyclic.optimizer(torch.optim.SGD, lr=0.05)
    for _ in range(3):
        cyclic.train_step(example, optimizer)
    state = cyclic.full_state_dict()
    for name, value in {**expected[-1].parameters, **expected[-1].buffers}.items():
        # the zoo takes its loss in single precision; plain torch is as near to the reference (4e-9 in the gradient)
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-8)


def test_bf16_compute_keeps_parameters_in_single_precision() -> None:
    model, layers, stages = blocks_case(2)
    seen: list[torch.dtype] = []
    plan, batches = make_plan(stages, "cdp-v2", "single"), make_batches(3, 2)
    cyclic = CyclicModel(copy.deepcopy(model), plan, layers, precision="bf16")
    block = cyclic.runtime.parts[1].model.get_submodule("blocks.1")
    block.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    optimizer = cyclic.optimizer(torch.optim.SGD, lr=0.05)
    losses = [float(cyclic.train_step(batch, optimizer)) for batch in batches]
    expected = train_reference(model, stages, [split(batch, 2) for batch in batches], optimizer_factory=SGD)
    assert losses[0] == pytest.approx(expected[0].loss, rel=0.02)
    assert set(seen) == {torch.bfloat16}
    for name, value in cyclic.full_state_dict().items():
        assert value.dtype is torch.float32
        torch.testing.assert_close(value, expected[-1].parameters[name], rtol=0.02, atol=0.02)


def test_a_model_without_values_is_given_some() -> None:
    _, layers, stages = blocks_case(2)
    with torch.device("meta"):
        model = Blocks(2)
    cyclic = CyclicModel(model, make_plan(stages, "cdp-v2", "single"), layers, seed=3)
    optimizer, batch = cyclic.optimizer(torch.optim.SGD, lr=0.1), make_batches(1, 2)[0]
    assert bool(torch.isfinite(cyclic.train_step(batch, optimizer)))
    assert all(not one.is_meta for one in cyclic.full_state_dict().values())


class Sampling(nn.Module):
    """Training and evaluation differ."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


def test_the_stages_follow_the_mode() -> None:
    _, layers, stages = blocks_case(2)
    cyclic = CyclicModel(Sampling(), make_plan(stages, "cdp-v2", "single"), layers)
    for mode in (False, True):
        cyclic.train(mode)
        assert {part.model.blocks[0][1].training for part in cyclic.runtime.parts.values()} == {mode}


class Shifted(Blocks):
    """With a buffer that no layer holds."""

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("shift", torch.full((3,), 2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + self.shift, y)


def fill_shift(module: nn.Module) -> None:
    if isinstance(module, Shifted):
        module.shift.fill_(2.0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_buffers_of_no_layer_are_in_the_whole_state(device: str) -> None:
    with torch.device(device):
        model = Shifted()
    batch = make_batches(1, 2)[0]
    layers = discover_layers(model, batch, ["blocks.0", "blocks.1"])
    plan = make_plan([["before", "blocks.0"], ["blocks.1", "after"]], "cdp-v2", "single")
    cyclic = CyclicModel(model, plan, layers, batch, init_fn=fill_shift)
    cyclic.train_step(batch, cyclic.optimizer(torch.optim.SGD, lr=0.1))
    state = cyclic.full_state_dict()
    assert torch.equal(state["shift"], torch.full((3,), 2.0))
    assert state.keys() == model.state_dict().keys()
    cyclic.load_full_state_dict({name: value + 1 for name, value in state.items()})
    assert torch.equal(cyclic.full_state_dict()["shift"], torch.full((3,), 3.0))


def test_what_other_models_have_is_refused_with_what_to_do() -> None:
    cyclic, _ = made()
    optimizer = cyclic.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(InputError, match=r"optimizer\(factory, scheduler=make_scheduler\)"):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    told = dict.fromkeys(["step", "zero_grad"], r"train_step\(batch, optimizer\)")
    for name, remedy in {**told, **dict.fromkeys(["state_dict", "load_state_dict"], r"save\(folder\)")}.items():
        with pytest.raises(InputError, match=f"{name} of the optimizer.*{remedy}"):
            getattr(optimizer, name)
    for name in ("param_groups", "clip_grad_norm", "outputs"):
        with pytest.raises(InputError, match=f"{name} of the model"):
            getattr(cyclic, name)
    with pytest.raises(AttributeError):
        _ = cyclic.nothing
    with pytest.raises(InputError, match="There is no such folder"):
        cyclic.load("nothing/at/all")


@pytest.mark.parametrize(
    ("delay", "told"), [("cdp-v1", "is one of cdp-v2"), (True, "delay: 'True'.*'cyclic', 'cdp-v1'")]
)
def test_a_delay_that_is_not_the_given_plans_is_refused(delay: Any, told: str) -> None:
    model, _, stages = blocks_case(2)
    with pytest.raises(InputError, match=told):
        auto_parallelize(model, make_batches(1, 2)[0], plan=make_plan(stages, "cdp-v2", "single"), delay=delay)


def test_a_delay_that_tied_parameters_rule_out_is_refused() -> None:
    remedy = "cyclic: data: before and after share parameters and must be in one"
    tie = SimpleNamespace(first="before", second="after", parameters=1)
    profile: Any = SimpleNamespace(graph=SimpleNamespace(ties=(tie,)))
    error = auto._delay_error(profile, "cdp-v2", InputError("--fix schedule", "cyclic", remedy))
    assert re.match("delay: 'cdp-v2'.* before and after share parameters.* Untie them", str(error))
