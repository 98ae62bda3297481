"""Losses in which samples weigh unlike train as in one process, however a batch is shared, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.loss_weight import TargetCount, TargetCounts, share_factors
from tests.pool import WorkerPool
from tests.runtime.losses import count_mask, differences, refusal

TWO = ("data", "zero1", "zero3", "pipeline")
FOUR = ("pipeline and data",)


@pytest.mark.parametrize(
    ("kind", "options", "more"),
    [
        ("llama", {}, ("context", "tensor")),
        ("bert", {}, ("tensor",)),
        ("t5", {}, ()),
        ("plain", {}, ("tensor",)),
        ("classes", {}, ()),
        ("sum", {"loss_reduction": "sum"}, ()),
        ("masked", {"loss_weight": count_mask}, ()),
        ("buffers", {}, ()),
    ],
)
def test_as_in_one_process(pool: WorkerPool, kind: str, options: dict[str, Any], more: tuple[str, ...]) -> None:
    for world, names in ((1, ("micro-batches",)), (2, (*TWO, *more)), (4, FOUR)):
        for found in pool.run(world, differences, kind=kind, names=names, **options):
            assert found == []


@pytest.mark.parametrize(
    ("kind", "names", "said"),
    [
        ("masked", ("micro-batches", "data", "pipeline"), "loss_weight="),
        ("buffers", ("tensor",), "Forward passes update"),
        ("sum", ("micro-batches", "data"), "loss_reduction='sum'"),
        ("contrastive", ("micro-batches", "data", "pipeline"), "--fix dp=1"),
        ("penalty", ("zero3", "pipeline", "tensor"), "weight_decay"),
        ("tied by hand", ("zero3", "pipeline", "tensor"), "outside of their layers"),
    ],
)
def test_refused_before_the_first_step(pool: WorkerPool, kind: str, names: tuple[str, ...], said: str) -> None:
    for name in names:
        world = 1 if name == "micro-batches" else 2
        for message in pool.run(world, refusal, kind=kind, name=name):
            assert message.startswith("InputError")
            assert said in message


def test_a_share_in_which_nothing_counts(pool: WorkerPool) -> None:
    (message,) = pool.run(1, refusal, kind="masked 0/0", name="micro-batches", loss_weight=count_mask)
    assert ".clamp(min=1)" in message


@pytest.mark.parametrize(
    ("kind", "names"), [("contrastive", ("tensor",)), ("penalty", ("data", "zero1")), ("tied by hand", ("data", "zero1"))]
)
def test_plans_that_may_stay(pool: WorkerPool, kind: str, names: tuple[str, ...]) -> None:
    for found in pool.run(2, differences, kind=kind, names=names):
        assert found == []


def test_means_over_different_targets_that_count_unlike() -> None:
    labels = torch.tensor([[1, -100], [1, 1]])
    counts = TargetCounts((TargetCount(".a", 0, -100), TargetCount(".b", 0, -100)))
    assert share_factors(counts, "mean", {"a": labels, "b": labels}, 2) is not None
    with pytest.raises(InputError, match=r"different targets \(a, b\)"):
        share_factors(counts, "mean", {"a": labels, "b": labels.abs()}, 2)


def test_weights_are_numbers_of_at_least_zero() -> None:
    with pytest.raises(InputError, match="loss_weight"):
        share_factors(lambda _: -1.0, "mean", torch.ones(4, 2), 2)
