"""Interpolation of cut pictures against torch's on the whole ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.parallelism.sharded.collectives import distribute, full_tensor
from galvatron_lite.parallelism.sharded.tensor import Call, Rules, ShardSpec, global_shape, to_local
from galvatron_lite.parallelism.spatial.resizing import HANDLERS
from tests.parallelism.sharded_compare import SHAPES, alone, assert_equal, rules, together
from tests.parallelism.thread_group import ThreadGroup, run_threads

RULES = rules(HANDLERS)
MODES = {1: ["nearest", "nearest-exact", "linear", "area"], 3: ["nearest", "nearest-exact", "trilinear", "area"]}
MODES[2] = ["nearest", "nearest-exact", "bilinear", "bicubic", "area"]


@st.composite
def resamplings(draw: st.DrawFn) -> tuple[Tensor, dict[int, int], dict[str, Any]]:
    """A picture, by how many which dims are shared, and what is asked of interpolate."""
    sides = draw(st.integers(1, 3))
    shape = [draw(st.integers(4, 9 if sides < 3 else 6)) for _ in range(sides)]
    dims = draw(st.lists(st.sampled_from(range(2, 2 + sides)), min_size=1, max_size=2, unique=True))
    degrees = {dim: draw(st.integers(2, 4 if len(dims) == 1 else 2)) for dim in sorted(dims)}
    how: dict[str, Any] = {"mode": draw(st.sampled_from(MODES[sides]))}
    if "linear" in how["mode"] or how["mode"] == "bicubic":
        how["align_corners"] = draw(st.sampled_from([None, False, True]))
    if draw(st.booleans()):
        how["size"] = draw(st.one_of(st.integers(2, 15), st.tuples(*[st.integers(2, 15)] * sides)))
    else:
        factors = st.sampled_from([0.5, 0.7, 1.0, 1.3, 2.0, 3])
        how["scale_factor"] = draw(st.one_of(factors, st.tuples(*[factors] * sides)))
        how["recompute_scale_factor"] = draw(st.sampled_from([None, False, True]))
    torch.manual_seed(draw(st.integers(0, 9)))
    return torch.randn(2, 2, *shape, dtype=torch.float64), degrees, how


def _check(function: Callable[[Tensor], Tensor], picture: Tensor, degrees: dict[int, int]) -> None:
    weight = torch.randn_like(function(picture))
    theirs = alone(lambda x, _: function(x), picture, {}, weight)
    for ours in together(lambda x, _: function(x), picture, {}, weight, degrees, RULES):
        assert_equal(ours, theirs)


@settings(max_examples=50, deadline=None)
@given(resamplings())
@pytest.mark.filterwarnings("ignore")
def test_every_mode_size_and_scale(drawn: tuple[Tensor, dict[int, int], dict[str, Any]]) -> None:
    picture, degrees, how = drawn
    _check(lambda x: functional.interpolate(x, **how), picture, degrees)


@pytest.mark.filterwarnings("ignore")
def test_modules_and_old_names() -> None:
    picture = torch.randn(1, 2, 5, 6, dtype=torch.float64)
    for function in (
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        nn.UpsamplingNearest2d(size=(7, 9)),
        lambda x: functional.upsample(x, scale_factor=2),
        lambda x: functional.upsample_bilinear(x, size=(4, 11)),
        lambda x: functional.interpolate(input=x, size=x.shape[2:]),
    ):
        _check(function, picture, {2: 2, 3: 2})


def test_sides_of_single_precision_are_as_torchs_of_single_precision() -> None:
    """Which row is nearest hangs on rounding."""
    picture = torch.arange(2 * 103.0).view(1, 1, 103, 2)
    for size in (29, 77, 309, 611):
        for mode in ("nearest", "nearest-exact"):

            def work(group: ThreadGroup, size: int = size, mode: str = mode) -> Tensor:
                cut = distribute(picture.clone(), (ShardSpec(2, 103, group),), RULES)
                return full_tensor(functional.interpolate(cut, (size, 3), mode=mode))

            expected = functional.interpolate(picture, (size, 3), mode=mode)
            assert all(torch.equal(found, expected) for found in run_threads(3, work))


def test_more_ranks_than_rows() -> None:
    picture = torch.randn(1, 2, 2, 5, dtype=torch.float64)
    for size in ((7, 3), (2, 9), (1, 5)):
        for mode in ("nearest", "bilinear", "bicubic"):
            _check(lambda x, s=size, m=mode: functional.interpolate(x, s, mode=m), picture, {2: 3})  # type: ignore[misc]


def test_ranks_send_only_the_rows_that_others_need() -> None:
    """Bilinear, twice the rows: one row to each neighbour in forward, and its gradient in backward."""
    picture = torch.randn(2, 3, 12, 5)

    def work(group: ThreadGroup) -> tuple[int, int]:
        leaf = picture.clone().requires_grad_()
        cut = distribute(leaf, (ShardSpec(2, 12, group),), RULES)
        result = functional.interpolate(cut, scale_factor=2, mode="bilinear")
        forward = group.sent_bytes
        to_local(result).sum().backward()
        assert set(group.calls) == {"exchange"}
        return forward, group.sent_bytes - forward

    row = 2 * 3 * 5 * 4
    assert run_threads(3, work) == [(row, row), (2 * row, 2 * row), (row, row)]


def test_nothing_is_kept_for_backward_along_cut_sides() -> None:
    picture = torch.randn(2, 3, 12, 5)

    def work(group: ThreadGroup) -> int:
        kept = []
        cut = distribute(picture.clone().requires_grad_(), (ShardSpec(2, 12, group),), RULES)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.nbytes), x)[1], lambda x: x):
            functional.interpolate(cut, scale_factor=2, mode="bicubic")
        return sum(kept)

    assert run_threads(2, work) == [0, 0]


def test_channels_may_be_cut() -> None:
    picture = torch.randn(2, 5, 6, 5, dtype=torch.float64)
    _check(lambda x: functional.interpolate(x, scale_factor=1.5, mode="bilinear"), picture, {1: 2, 3: 2})


def test_sixteen_bits() -> None:
    picture = torch.randn(1, 2, 9, 5).bfloat16()
    expected = functional.interpolate(picture, size=(17, 5), mode="bicubic")

    def work(group: ThreadGroup) -> Tensor:
        cut = distribute(picture.clone(), (ShardSpec(2, 9, group),), RULES)
        return full_tensor(functional.interpolate(cut, size=(17, 5), mode="bicubic"))

    for found in run_threads(2, work):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_smoothed_pictures_are_gathered() -> None:
    def work(group: ThreadGroup) -> tuple[str, tuple[int, ...]]:
        names = []

        def other(call: Call) -> Tensor:
            names.append(call.name)
            return call.function(*map(full_tensor, call.args), **call.kwargs)

        cut = distribute(torch.randn(1, 1, 8, 8), (ShardSpec(2, 8, group),), Rules({**SHAPES, **HANDLERS}, other))
        found = functional.interpolate(cut, size=(3, 3), mode="bilinear", antialias=True)
        return names[0], global_shape(found)

    assert run_threads(2, work) == [("interpolate", (1, 1, 3, 3))] * 2


def test_what_torch_refuses_is_refused() -> None:
    def work(group: ThreadGroup) -> None:
        cut = distribute(torch.randn(1, 1, 8, 8), (ShardSpec(2, 8, group),), RULES)
        with pytest.raises(ValueError, match="only one of size or scale_factor"):
            functional.interpolate(cut, size=(3, 3), scale_factor=2)
        with pytest.raises(NotImplementedError, match="trilinear"):
            functional.interpolate(cut, size=(3, 3), mode="trilinear")

    run_threads(2, work)
