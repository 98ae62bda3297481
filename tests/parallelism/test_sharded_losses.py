"""Losses of cut predictions, against whole ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.parallelism.sharded_functions import Lines, compare, is_cut, picture

PIXELS: Lines = (2, 3)
SHAPE = (2, 4, 5, 7)


def classes(*shape: int, ignored: bool = True) -> Tensor:
    found = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(3))
    if ignored:
        found[0, 0] = -100
    return found


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_classification_of_pixels(data: st.DataObject) -> None:
    options: dict[str, Any] = {
        "reduction": data.draw(st.sampled_from(["mean", "sum", "none"])),
        "weight": data.draw(st.sampled_from([None, picture(4).abs()])),
        "label_smoothing": data.draw(st.sampled_from([0.0, 0.2])),
    }
    target = classes(2, 5, 7)
    if data.draw(st.booleans()):
        options["ignore_index"] = 2
        target = target.clamp_min(0)
    where: Lines = data.draw(st.sampled_from([(), (1, 2)]))
    degrees = data.draw(st.sampled_from([(3, 2), (2, 2), (4, 1)]))
    compare(
        lambda x, t: functional.cross_entropy(x, t, **options),
        [picture(*SHAPE), target],
        [PIXELS, where],
        degrees,
        stays_cut=options["reduction"] == "none",
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("cut", [PIXELS, ()])
def test_classification_by_probabilities(reduction: str, cut: Lines) -> None:
    compare(
        lambda x, t: functional.cross_entropy(x, t.softmax(1), picture(4).abs(), reduction=reduction),
        [picture(*SHAPE), picture(*SHAPE, seed=1)],
        [PIXELS, cut],
        (3, 2),
        stays_cut=reduction == "none",
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_likelihoods_of_pixels(reduction: str) -> None:
    loss = nn.NLLLoss(picture(4).abs(), reduction=reduction)
    compare(lambda x, t: loss(x.log_softmax(1), t), [picture(*SHAPE), classes(2, 5, 7)], [PIXELS, ()], (3, 2))
    compare(functional.nll_loss, [picture(2, 4, 9), classes(2, 9)], [(2,), (1,)], (4,), stays_cut=False)


def test_whole_logits_and_cut_targets() -> None:
    compare(functional.cross_entropy, [picture(*SHAPE), classes(2, 5, 7)], [(), (1, 2)], (3, 2), stays_cut=False)


def test_logits_whose_classes_are_cut_are_gathered() -> None:
    compare(
        functional.cross_entropy, [picture(*SHAPE), classes(2, 5, 7)], [(1,), ()], (2,), stays_cut=False, gathers=True
    )


def test_older_names_of_reductions() -> None:
    both = [picture(*SHAPE), classes(2, 5, 7)]
    for given_names in ({"size_average": False}, {"reduce": False}, {"size_average": True, "reduce": True}):
        compare(lambda x, t, k=given_names: functional.cross_entropy(x, t, **k), both, [PIXELS, ()], (2, 2))


ITEMWISE: dict[str, Callable[..., Any]] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "smooth l1": lambda x, y, **how: functional.smooth_l1_loss(x, y, beta=0.5, **how),
    "huber": lambda x, y, **how: functional.huber_loss(x, y, delta=0.7, **how),
    "bce": lambda x, y, **how: functional.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **how),
    "bce logits": lambda x, y, **how: functional.binary_cross_entropy_with_logits(
        x, y.sigmoid(), pos_weight=picture(4, 1, 1).abs(), **how
    ),
    "weighed bce": lambda x, y, **how: functional.binary_cross_entropy_with_logits(
        x, y.sigmoid(), weight=picture(5, 7).abs(), **how
    ),
    "kl": lambda x, y, **how: functional.kl_div(x.log_softmax(1), y.softmax(1), **how),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ITEMWISE)
def test_losses_of_each_item(name: str, reduction: str) -> None:
    both = [picture(*SHAPE), picture(*SHAPE, seed=1)]
    for cut in (PIXELS, ()):
        compare(
            lambda x, y: ITEMWISE[name](x, y, reduction=reduction),
            both,
            [PIXELS, cut],
            (3, 2),
            stays_cut=reduction == "none",
        )


def test_means_over_samples() -> None:
    both = [picture(*SHAPE), picture(*SHAPE, seed=1)]
    compare(lambda x, y: ITEMWISE["kl"](x, y, reduction="batchmean"), both, [PIXELS, ()], (3, 2), stays_cut=False)


def test_ranks_without_pixels_add_nothing() -> None:
    both = [picture(2, 4, 2, 3), classes(2, 2, 3, ignored=False)]
    compare(functional.cross_entropy, both, [(2,), ()], (4,), stays_cut=False)
    compare(functional.mse_loss, [both[0], both[0] * 2], [(2,), ()], (4,), stays_cut=False)


def test_losses_of_half_precision_do_not_overflow() -> None:
    both = [picture(1, 4, 96, 96) * 20, torch.zeros(1, 96, 96, dtype=torch.long)]
    compare(lambda x, t: functional.cross_entropy(x.bfloat16(), t), both, [PIXELS, ()], (2, 2), tolerance=2e-2)
    # torch's own mean is infinite here
    compare(
        lambda x, t: functional.cross_entropy(x.half() if is_cut(x) else x, t).double(),
        both,
        [PIXELS, ()],
        (2, 2),
        tolerance=2e-2,
    )
