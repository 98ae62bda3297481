"""Reductions and products of cut tensors, against whole ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.parallelism.sharded_compare import Lines, compare, is_cut, picture

PIXELS: Lines = (2, 3)

Reduction = Callable[[Tensor, Any, bool], Any]
ADDED: dict[str, Reduction] = {
    "sum": lambda x, dims, keep: x.sum(dims, keep),
    "mean": lambda x, dims, keep: torch.mean(x, dims, keepdim=keep),
    "norm": lambda x, dims, keep: x.norm(2, dim=dims, keepdim=keep),
    "3-norm": lambda x, dims, keep: torch.linalg.vector_norm(x, 3, dims, keep),
}
REDUCTIONS: dict[str, Reduction] = {
    **ADDED,
    "amax": lambda x, dims, keep: x.amax(dims, keep),
    "biased var": lambda x, dims, keep: torch.var(x, dims, False, keep),
    "std_mean": lambda x, dims, keep: torch.std_mean(x, dim=dims, correction=0, keepdim=keep),
    "amin": lambda x, dims, keep: torch.amin(x.relu(), dim=dims, keepdim=keep),
    "largest": lambda x, dims, keep: torch.linalg.vector_norm(x, float("inf"), dims, keepdim=keep),
    "any": lambda x, dims, keep: (x > 1.5).any(dims, keep),
    "all": lambda x, dims, keep: torch.all(x > -1, dim=dims, keepdim=keep),
}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reductions_over_any_dims(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(REDUCTIONS)))
    function, gathers = REDUCTIONS[name], None if name not in ADDED else False
    shape = (2, 3, data.draw(st.integers(2, 7)), data.draw(st.integers(2, 6)))
    dims = tuple(data.draw(st.sets(st.integers(-4, 3), min_size=1)))
    dims = tuple({one % 4: one for one in dims}.values())
    keep = data.draw(st.booleans())
    cut, degrees = data.draw(st.sampled_from([((2,), (3,)), ((3,), (2,)), ((1,), (4,)), ((2, 3), (2, 3))]))
    # rounded, so that there are equal items
    tensor = (picture(*shape) * 4).round() / 4
    compare(lambda x: function(x, dims, keep), [tensor], [cut], degrees, gathers=gathers)


WHOLE: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum() + torch.sum(x.float(), dtype=torch.float64),
    "mean": lambda x: x.mean(),
    "norm": lambda x: x.norm() + torch.norm(x, p=1) + torch.linalg.norm(x),
    "max": lambda x: x.max() - x.min() + x.amax(),
    "max of equal ones": lambda x: (x - 1).relu().amin((2, 3)) + torch.max((x * 2).round() / 2),
    "any": lambda x: ((x > 2).any(), (x > -9).all(), (x > 0).count_nonzero()),
    "pool": lambda x: x.mean([2, 3]).unsqueeze(-1),
    "pool and keep": lambda x: (x.mean((2, 3), keepdim=True) * x).sum((2, 3)),
    "0-norm": lambda x: torch.linalg.vector_norm(x.relu(), 0) + x.sum(),
    "var": lambda x: x.var(False) + x.std() + torch.var(x, unbiased=True),
}


@pytest.mark.parametrize("name", WHOLE)
def test_reductions_over_everything(name: str) -> None:
    gathers = None if name in ("max", "max of equal ones", "any", "0-norm", "var") else False
    compare(WHOLE[name], [picture(2, 4, 7, 5)], [PIXELS], (3, 2), stays_cut=False, gathers=gathers)


def test_places_of_the_largest_along_whole_dims() -> None:
    compare(lambda x: x.max(1), [picture(2, 4, 7, 5)], [PIXELS], (3, 2), stays_cut=True)
    compare(lambda x: torch.min(x, dim=1, keepdim=True), [picture(2, 4, 7, 5)], [PIXELS], (3, 2), stays_cut=True)
    compare(lambda x: x.argmax(1), [picture(2, 4, 7, 5)], [PIXELS], (3, 2), stays_cut=True)


def test_places_of_the_largest_along_cut_dims() -> None:
    compare(lambda x: x.max(dim=2), [picture(2, 4, 7, 5)], [PIXELS], (3, 2), stays_cut=True, gathers=True)
    compare(lambda x: x.max(3)[0].max(2)[1], [picture(2, 4, 7, 5)], [PIXELS], (3, 2), stays_cut=False, gathers=True)


def test_larger_of_two() -> None:
    both = [picture(2, 4, 7, 5), picture(2, 4, 7, 5, seed=1)]
    compare(lambda x, y: torch.max(x, y) - torch.min(x, other=y), both, [PIXELS, ()], (3, 2), stays_cut=True)


def test_ranks_without_items_add_nothing() -> None:
    for name, function in ADDED.items():
        if name not in ("3-norm", "norm"):
            compare(lambda x, f=function: f(x, (2, 3), False), [picture(2, 3, 2, 5)], [(2,)], (4,), stays_cut=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Sixteen ranks err no more than one process does: by half a unit in the last place."""
    for function in (torch.mean, lambda x, dims: (x / 100).sum(dims)):
        compare(
            lambda x, f=function: f(x.to(dtype), (2, 3)),
            [picture(1, 2, 32, 32) + 100],
            [PIXELS],
            (4, 4),
            tolerance=torch.finfo(dtype).eps,
        )


Product = Callable[..., Any]
PRODUCTS: list[tuple[Product, Sequence[Tensor], Sequence[Lines], bool]] = [
    (
        lambda x, w, b: functional.linear(x.permute(0, 2, 3, 1), w, b).permute(0, 3, 1, 2),
        [picture(2, 4, 7, 5), picture(6, 4), picture(6)],
        [PIXELS, (), ()],
        True,
    ),
    (lambda x, w: functional.linear(x, w), [picture(2, 4, 7, 5), picture(6, 5)], [PIXELS, ()], True),
    (lambda x, w: functional.linear(x, w, w[:, 0]), [picture(2, 3, 5), picture(6, 5)], [(2, -1), ()], False),
    (lambda x, w: x.permute(0, 2, 3, 1) @ w, [picture(2, 4, 7, 5), picture(4, 3)], [PIXELS, ()], True),
    (lambda x, w: x @ w, [picture(2, 4, 7, 5), picture(5, 3)], [PIXELS, ()], True),
    (lambda x, w: w @ x, [picture(2, 4, 7, 5), picture(3, 7)], [PIXELS, ()], True),
    (lambda x, y: x @ y.mT, [picture(2, 4, 7, 5), picture(2, 4, 6, 5)], [PIXELS, PIXELS], True),
    (lambda x, v: x @ v, [picture(2, 4, 7, 5), picture(5)], [PIXELS, ()], True),
    (lambda x, y: torch.bmm(x, y), [picture(2, 7, 5), picture(2, 5, 3)], [(1, 2), ()], True),
    (lambda x, w: torch.einsum("nchw,oc->nohw", x, w), [picture(2, 4, 7, 5), picture(3, 4)], [PIXELS, ()], True),
    (
        lambda x, y: torch.einsum("nchw,ndhw->ncd", x, y),
        [picture(2, 4, 7, 5), picture(2, 3, 7, 5)],
        [PIXELS, PIXELS],
        False,
    ),
    (lambda x, y: torch.einsum("nchw, nchw", x, y), [picture(2, 4, 7, 5)] * 2, [PIXELS, ()], False),
]


@pytest.mark.parametrize("number", range(len(PRODUCTS)))
def test_matrix_products_of_shards(number: int) -> None:
    function, tensors, cut, stays_cut = PRODUCTS[number]
    compare(function, tensors, cut, (3, 2), stays_cut=stays_cut)


@pytest.mark.parametrize("cut", [(2,), (3,), (2, 3)])
def test_attention_over_pixels(cut: Lines) -> None:
    """Rows stay cut where they merge with whole columns; keys and values are gathered."""

    def attend(x: Tensor, w: Tensor) -> Tensor:
        tokens = functional.layer_norm(x.flatten(2).transpose(1, 2), (4,))
        query, key, value = functional.linear(tokens, w).view(2, 35, 3, 2, 2).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=torch.ones(35, 35).tril().bool())
        by_hand = (query @ key.transpose(-2, -1) / 2**0.5).softmax(-1) @ value
        return (found + by_hand).transpose(1, 2).flatten(2).transpose(1, 2).reshape(x.shape) + x

    compare(
        attend, [picture(2, 4, 7, 5), picture(12, 4)], [cut, ()], (3, 2)[: len(cut)], stays_cut=True, gathers=3 in cut
    )
    compare(
        lambda x, y: functional.scaled_dot_product_attention(x, y, y),
        [picture(2, 2, 5, 4)] * 2,
        [(2,), ()],
        (3,),
        stays_cut=True,
    )


def test_attention_that_depends_on_places_gathers() -> None:
    def attend(x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    compare(attend, [picture(2, 2, 5, 4)], [(2,)], (3,), stays_cut=False, gathers=True)


# Losses of cut predictions, against whole ones.


BOTH_SIDES: Lines = (2, 3)
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
        [BOTH_SIDES, where],
        degrees,
        stays_cut=options["reduction"] == "none",
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("cut", [BOTH_SIDES, ()])
def test_classification_by_probabilities(reduction: str, cut: Lines) -> None:
    compare(
        lambda x, t: functional.cross_entropy(x, t.softmax(1), picture(4).abs(), reduction=reduction),
        [picture(*SHAPE), picture(*SHAPE, seed=1)],
        [BOTH_SIDES, cut],
        (3, 2),
        stays_cut=reduction == "none",
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_likelihoods_of_pixels(reduction: str) -> None:
    loss = nn.NLLLoss(picture(4).abs(), reduction=reduction)
    compare(lambda x, t: loss(x.log_softmax(1), t), [picture(*SHAPE), classes(2, 5, 7)], [BOTH_SIDES, ()], (3, 2))
    compare(functional.nll_loss, [picture(2, 4, 9), classes(2, 9)], [(2,), (1,)], (4,), stays_cut=False)


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
    for cut in (BOTH_SIDES, ()):
        compare(
            lambda x, y: ITEMWISE[name](x, y, reduction=reduction),
            [picture(*SHAPE), picture(*SHAPE, seed=1)],
            [BOTH_SIDES, cut],
            (3, 2),
            stays_cut=reduction == "none",
        )


PREDICTED, BOTH = [picture(*SHAPE), classes(2, 5, 7)], [picture(*SHAPE), picture(*SHAPE, seed=1)]
FEW = [picture(2, 4, 2, 3), classes(2, 2, 3, ignored=False)]
LOSSES: dict[str, tuple[Callable[..., Any], Sequence[Tensor], Sequence[Lines], Sequence[int], dict[str, Any]]] = {
    "whole logits, cut targets": (functional.cross_entropy, PREDICTED, [(), (1, 2)], (3, 2), {}),
    "classes that are cut": (functional.cross_entropy, PREDICTED, [(1,), ()], (2,), {"gathers": True}),
    "size_average": (lambda x, t: functional.cross_entropy(x, t, size_average=False), PREDICTED, [BOTH_SIDES, ()],
                     (2, 2), {}),
    "not reduced": (lambda x, t: functional.cross_entropy(x, t, reduce=False), PREDICTED, [BOTH_SIDES, ()], (2, 2),
                    {"stays_cut": None}),
    "size_average and reduce": (lambda x, t: functional.cross_entropy(x, t, size_average=True, reduce=True), PREDICTED,
                                [BOTH_SIDES, ()], (2, 2), {}),
    "mean over samples": (lambda x, y: ITEMWISE["kl"](x, y, reduction="batchmean"), BOTH, [BOTH_SIDES, ()], (3, 2), {}),
    "ranks without pixels to classify": (functional.cross_entropy, FEW, [(2,), ()], (4,), {}),
    "ranks without pixels": (functional.mse_loss, [FEW[0], FEW[0] * 2], [(2,), ()], (4,), {}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*will be deprecated")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_shards(name: str) -> None:
    function, tensors, cut, degrees, how = LOSSES[name]
    compare(function, tensors, cut, degrees, **{"stays_cut": False, **how})


def test_losses_of_half_precision_do_not_overflow() -> None:
    both = [picture(1, 4, 96, 96) * 20, torch.zeros(1, 96, 96, dtype=torch.long)]
    compare(lambda x, t: functional.cross_entropy(x.bfloat16(), t), both, [BOTH_SIDES, ()], (2, 2), tolerance=2e-2)
    # torch's own mean is infinite here
    compare(
        lambda x, t: functional.cross_entropy(x.half() if is_cut(x) else x, t).double(),
        both,
        [BOTH_SIDES, ()],
        (2, 2),
        tolerance=2e-2,
    )
