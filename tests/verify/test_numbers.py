"""Small models under small plans on processes of their own; runtimes that are wrong are found."""

from unittest.mock import patch

import torch

import galvatron_lite.runtime.engine
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.zoo import build
from galvatron_lite.plans.schema import Plan
from galvatron_lite.plans.written import parse_strategy
from galvatron_lite.verify.numbers.check import check_numbers
from galvatron_lite.verify.numbers.train import training_fork
from galvatron_lite.verify.schema import Check, Verdict
from galvatron_lite.verify.source import ModelSource, factory_source, named_source
from tests.equivalence.plans import write_plan


def plan_for(source: ModelSource, text: str, *, stages: int = 1, devices: int, **fields: object) -> Plan:
    """The same strategy for every layer, and stages of as many layers."""
    model, batch, _ = source.on_meta()
    names = [layer.name for layer in discover_layers(model, batch or model.example_batch(2))]  # type: ignore[operator]
    parts = [names[index * len(names) // stages : (index + 1) * len(names) // stages] for index in range(stages)]
    strategies = dict.fromkeys(names, parse_strategy(text))
    strategies["before"] = strategies["after"] = parse_strategy(text.removesuffix(" recompute"))
    return write_plan(parts, strategies, devices=devices, batch=64, **fields)  # type: ignore[arg-type]


def checked(source: ModelSource, plan: Plan, **options: object) -> Check:
    with training_fork(source, patience=120) as fork:
        return check_numbers(source, plan, fork, timeout=240, **options)  # type: ignore[arg-type]


LLAMA = named_source("llama-tiny")


def test_a_large_plan_trains_like_one_process_when_it_is_small() -> None:
    plan = plan_for(LLAMA, "zero3x16 recompute", stages=4, devices=64, microbatches=4)
    check = checked(LLAMA, plan)
    assert (check.verdict, check.name) == (Verdict.PASSED, "numbers"), check
    assert "4 gloo processes" in check.said
    assert "Not kept small: every stage" in check.said
    assert check.details[0] == (
        "plan: 64 devices, 4 stages, batch 64 in 4 micro-batches -> 4 devices, 2 stages, batch 8 in 4 micro-batches"
    )


class _Forgetful(torch.optim.SGD):
    """Leaves out the first parameter."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        first = self.param_groups[0]["params"][0]
        before = first.detach().clone()
        super().step(closure)  # type: ignore[arg-type]
        with torch.no_grad():
            first.copy_(before)


def test_a_gradient_that_is_not_averaged_is_found() -> None:
    plan = plan_for(LLAMA, "data2", devices=2)
    with patch("galvatron_lite.parallelism.data.apply._launch", lambda _bucket: None):
        check = checked(LLAMA, plan)
    assert check.verdict is Verdict.FAILED, check
    assert "gradients of step 1" in check.said
    assert "ranks 0, 1" in check.said


def test_a_weight_that_is_not_updated_is_found() -> None:
    plan = plan_for(LLAMA, "tensor2", devices=2)
    real = galvatron_lite.runtime.engine.ParallelModel.optimizer

    def forgetful(self: object, factory: object, **options: object) -> object:
        return real(self, _Forgetful, **options)  # type: ignore[arg-type]

    with patch.object(galvatron_lite.runtime.engine.ParallelModel, "optimizer", forgetful):
        check = checked(LLAMA, plan)
    assert check.verdict is Verdict.FAILED
    assert "weights after step 2" in check.said
    assert any("embed.weight" in line for line in check.details)
    assert not any("gradients of step 1" in line for line in check.details)


def masked() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Samples of which unlike shares of labels count."""
    torch.manual_seed(0)
    model = build("gpt-tiny", vocab=64, layers=4, hidden=16, heads=2, sequence=16)
    tokens = torch.randint(0, 64, (8, 16))
    return model, {
        "tokens": tokens,
        "labels": tokens.where(torch.arange(16) % (torch.arange(8)[:, None] + 1) == 0, -100),
    }


def test_shares_with_unlike_counts_of_labels_weigh_as_in_training() -> None:
    source = factory_source(masked)
    for plan in (plan_for(source, "data2", devices=2), plan_for(source, "whole", devices=1, microbatches=2)):
        check = checked(source, plan)
        assert check.verdict is Verdict.PASSED, check


class Convolutions(torch.nn.Module):
    """A network without blocks; sums over pixels are compared in float64, so its float32 batch is converted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3)
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(pixels)
        return output


def test_a_plain_convolutional_network_is_trained() -> None:
    source = factory_source(
        lambda: (Convolutions(), {"pixels": torch.randn(8, 3, 8, 8)}, lambda output, _: output.square().mean())
    )
    check = checked(source, plan_for(source, "data2", devices=2))
    assert check.verdict is Verdict.PASSED, check
