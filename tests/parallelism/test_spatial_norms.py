"""Normalisation of cut pictures against the whole picture: results, gradients, running statistics, bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.collectives import distribute, full_tensor
from galvatron_lite.parallelism.sharded.tensor import Call, Rules, ShardSpec, image_specs, locals_only, to_local
from galvatron_lite.parallelism.spatial.cost import STATISTIC_BYTES
from galvatron_lite.parallelism.spatial.norms import HANDLERS, as_autocast, sync_batch_norm
from tests.parallelism.sharded_compare import Outcome, Parameters, alone, assert_equal, lines_of, rules, together
from tests.parallelism.thread_group import ThreadGroup, run_threads

CHANNELS = 6
RULES = rules(HANDLERS)
FEW = settings(max_examples=12, deadline=None)


@st.composite
def cut_pictures(draw: st.DrawFn, channels: bool = False) -> tuple[Tensor, dict[int, int]]:
    """A picture of one to three sides, and by how many which dims are shared."""
    sides = draw(st.integers(1, 3))
    extents = [draw(st.integers(3, 7)) for _ in range(sides)]
    dims = draw(st.lists(st.sampled_from(range(1 if channels else 2, 2 + sides)), min_size=1, max_size=2, unique=True))
    degrees = {dim: draw(st.integers(2, 4 if len(dims) == 1 else 2)) for dim in sorted(dims)}
    torch.manual_seed(draw(st.integers(0, 9)))
    return 3 + 2 * torch.randn(2, CHANNELS, *extents, dtype=torch.float64), degrees


def _parameters(running: bool = False, shape: tuple[int, ...] = (CHANNELS,)) -> Parameters:
    made = {name: torch.randn(shape, dtype=torch.float64).requires_grad_() for name in ("weight", "bias")}
    if running:
        made |= {"running_mean": torch.randn(shape).double(), "running_var": torch.rand(shape).double()}
    return made


def _check(
    function: Callable[..., Tensor], picture: Tensor, parameters: Parameters, degrees: dict[int, int]
) -> list[Outcome]:
    weight = torch.randn_like(picture)
    theirs = alone(function, picture, parameters, weight)
    ours = together(function, picture, parameters, weight, degrees, RULES)
    for one in ours:
        if 1 in degrees and "running_mean" in parameters:  # a rank's own channels only: see gather_running
            one.after = theirs.after
        assert_equal(one, theirs)
    return ours


@FEW
@given(cut_pictures(channels=True), st.booleans(), st.booleans(), st.booleans())
def test_batch_norm(drawn: tuple[Tensor, dict[int, int]], training: bool, affine: bool, tracked: bool) -> None:
    picture, degrees = drawn
    parameters = _parameters(running=True)
    if not affine:
        del parameters["weight"], parameters["bias"]
    if training and not tracked:
        del parameters["running_mean"], parameters["running_var"]

    def function(x: Tensor, p: Parameters) -> Tensor:
        means = p.get("running_mean"), p.get("running_var")
        return functional.batch_norm(x, *means, p.get("weight"), p.get("bias"), training, 0.3, 1e-4)

    _check(function, picture, parameters, degrees)


@FEW
@given(cut_pictures(), st.booleans(), st.booleans())
def test_instance_norm(drawn: tuple[Tensor, dict[int, int]], tracked: bool, batch: bool) -> None:
    picture, degrees = drawn
    parameters = _parameters(running=tracked)

    def function(x: Tensor, p: Parameters) -> Tensor:
        means = p.get("running_mean"), p.get("running_var")
        return functional.instance_norm(x, *means, p["weight"], p["bias"], batch or not tracked, 0.3)

    _check(function, picture, parameters, degrees)


@FEW
@given(cut_pictures(channels=True), st.sampled_from([1, 2, 3, 6]))
def test_group_norm(drawn: tuple[Tensor, dict[int, int]], groups: int) -> None:
    picture, degrees = drawn
    if groups % degrees.get(1, 1):
        degrees = {2: 2}
    _check(lambda x, p: functional.group_norm(x, groups, p["weight"], p["bias"]), picture, _parameters(), degrees)


@FEW
@given(cut_pictures(channels=True), st.integers(1, 4), st.booleans())
def test_layer_norm_and_rms_norm(drawn: tuple[Tensor, dict[int, int]], dims: int, centred: bool) -> None:
    picture, degrees = drawn
    shape = tuple(picture.shape[1:])[-dims:]
    parameters = _parameters(shape=shape)

    def function(x: Tensor, p: Parameters) -> Tensor:
        if centred:
            return functional.layer_norm(x, shape, p["weight"], p["bias"])
        return functional.rms_norm(x, shape, p["weight"])

    _check(function, picture, parameters, degrees)


def test_layer_norm_over_cut_channels_that_are_last() -> None:
    picture = torch.randn(2, 3, 5, CHANNELS, dtype=torch.float64)
    _check(lambda x, p: functional.layer_norm(x, (CHANNELS,), p["weight"], p["bias"]), picture, _parameters(), {3: 4})


def test_local_response_norm() -> None:
    picture = torch.randn(2, CHANNELS, 5, 4, dtype=torch.float64)
    _check(lambda x, _: functional.local_response_norm(x, 3, 0.5, 0.7, 2.0), picture, {}, {2: 3, 3: 2})


@pytest.mark.parametrize("name", ["batch_norm", "instance_norm", "group_norm", "layer_norm", "rms_norm"])
def test_torchs_built_in_functions_of_the_same_names(name: str) -> None:
    picture = torch.randn(2, CHANNELS, 5, 4, dtype=torch.float64)
    calls: dict[str, Callable[[Tensor, Parameters], Tensor]] = {
        "batch_norm": lambda x, p: torch.batch_norm(
            x, p["weight"], p["bias"], p["running_mean"], p["running_var"], True, 0.1, 1e-5, False
        ),
        "instance_norm": lambda x, p: torch.instance_norm(
            x, p["weight"], p["bias"], p["running_mean"], p["running_var"], True, 0.1, 1e-5, False
        ),
        "group_norm": lambda x, p: torch.group_norm(x, 3, p["weight"], p["bias"]),
        "layer_norm": lambda x, _: torch.layer_norm(x, (CHANNELS, 5, 4)),
        "rms_norm": lambda x, _: torch.rms_norm(x, (CHANNELS, 5, 4)),
    }
    _check(calls[name], picture, _parameters(running=True), {2: 3})


@pytest.mark.parametrize("momentum", [0.2, None])
def test_modules_keep_running_statistics_over_batches(momentum: float | None) -> None:
    torch.manual_seed(1)
    batches = torch.randn(3, 2, CHANNELS, 5, 4, dtype=torch.float64)
    module = nn.BatchNorm2d(CHANNELS, momentum=momentum).double()
    for batch in batches:
        module(batch)

    def work(group: ThreadGroup) -> dict[str, Tensor]:
        mine = nn.BatchNorm2d(CHANNELS, momentum=momentum).double()
        for batch in batches:
            mine(distribute(batch.clone(), image_specs(batch.shape, (None, group, None)), RULES))
        return dict(mine.state_dict())

    for found in run_threads(3, work):
        torch.testing.assert_close(found, dict(module.state_dict()), rtol=1e-12, atol=1e-12)


def test_parameters_may_be_cut_as_the_channels_are() -> None:
    picture = torch.randn(2, CHANNELS, 3, 4, dtype=torch.float64)
    parameters = _parameters()
    theirs = functional.batch_norm(picture, None, None, parameters["weight"], parameters["bias"], True)

    def work(group: ThreadGroup) -> Tensor:
        cut = ShardSpec(1, CHANNELS, group)
        weight = parameters["weight"].detach().narrow(0, cut.start, cut.length)
        bias = distribute(parameters["bias"].detach().clone(), (ShardSpec(0, CHANNELS, group),), RULES)
        return full_tensor(
            functional.batch_norm(distribute(picture.clone(), (cut,), RULES), None, None, weight, bias, True)
        )

    for found in run_threads(4, work):
        torch.testing.assert_close(found, theirs, rtol=1e-12, atol=1e-12)


class Counted(ThreadGroup):
    """Counts the bytes a rank gives to collectives."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.sent_bytes += tensor.nbytes
        return super().all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self.sent_bytes += tensor.nbytes
        return super().all_gather(tensor, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_hold_two_fp32_numbers_a_channel_in_either_pass(dtype: torch.dtype) -> None:
    picture = torch.randn(2, CHANNELS, 6, 4, dtype=dtype)

    def work(group: ThreadGroup) -> tuple[int, int, dict[str, int]]:
        line = Counted(group.size, group.rank, group.meeting)
        leaf = picture.clone().requires_grad_()
        result = functional.batch_norm(distribute(leaf, (ShardSpec(2, 6, line),), RULES), None, None, training=True)
        forward = line.sent_bytes
        to_local(result).sum().backward()
        return forward, line.sent_bytes - forward, dict(line.calls)

    expected = 2 * CHANNELS * STATISTIC_BYTES
    for found in run_threads(2, work):
        assert found == (expected, expected, {"all_gather": 1, "all_reduce": 1})


def test_sixteen_bits_are_normalised_by_wide_statistics() -> None:
    """As closely as torch's own kernel, which rounds results once."""
    torch.manual_seed(0)
    picture = (100 + torch.randn(4, CHANNELS, 8, 8)).bfloat16()
    weight = torch.randn(picture.shape).bfloat16()
    parameters = {"weight": torch.rand(CHANNELS).requires_grad_(), "running_mean": torch.zeros(CHANNELS)}
    parameters |= {"bias": torch.rand(CHANNELS).requires_grad_(), "running_var": torch.zeros(CHANNELS)}

    def function(x: Tensor, p: Parameters) -> Tensor:
        return functional.batch_norm(x, p["running_mean"], p["running_var"], p["weight"], p["bias"], True)

    theirs = alone(function, picture, parameters, weight)
    for ours in together(function, picture, parameters, weight, {2: 2}, RULES):
        assert ours.result.dtype is torch.bfloat16
        torch.testing.assert_close(ours.after, theirs.after, rtol=1e-5, atol=1e-5)
        assert (ours.result == theirs.result).double().mean() > 0.97
        torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(ours.picture, theirs.picture, rtol=2e-2, atol=2e-2)


def test_large_means_lose_no_precision() -> None:
    picture = 1e4 + torch.randn(2, CHANNELS, 8, 8)
    exact = functional.batch_norm(picture.double(), None, None, training=True)

    def work(group: ThreadGroup) -> Tensor:
        cut = distribute(picture.clone(), image_specs(picture.shape, (None, group, None)), RULES)
        return full_tensor(functional.batch_norm(cut, None, None, training=True))

    theirs = (functional.batch_norm(picture, None, None, training=True) - exact).abs().max()
    for found in run_threads(4, work):
        assert (found - exact).abs().max() <= 2 * theirs + 1e-5


def test_what_is_kept_for_backward_is_the_share_and_its_statistics() -> None:
    picture = torch.randn(2, CHANNELS, 8, 8)
    kept: list[list[int]] = []

    def work(group: ThreadGroup) -> None:
        leaf = picture.clone().requires_grad_()
        cut = distribute(leaf, image_specs(picture.shape, (None, group, None)), RULES)
        mine: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (mine.append(x.nbytes), x)[1], lambda x: x):
            functional.batch_norm(cut, None, None, training=True)
        kept.append(mine)

    run_threads(2, work)
    assert kept == [[picture.nbytes // 2, 4 * CHANNELS, 4 * CHANNELS]] * 2


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: functional.group_norm(x, 3),
    "instance_norm": functional.instance_norm,
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[1:]),
    "rms_norm": lambda x: functional.rms_norm(x, x.shape[1:]),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_may_be_written_to(name: str) -> None:
    picture = torch.randn(2, CHANNELS, 5, 4, dtype=torch.float64)

    def work(group: ThreadGroup) -> Tensor:
        leaf = picture.clone().requires_grad_()
        result = CALLS[name](distribute(leaf, (ShardSpec(2, 5, group),), RULES))
        with locals_only():
            result.mul_(2.0).clamp_(min=0.5).sum().backward()
        return group.all_reduce(leaf.grad)

    leaf = picture.clone().requires_grad_()
    CALLS[name](leaf).mul_(2.0).clamp_(min=0.5).sum().backward()
    for found in run_threads(2, work):
        torch.testing.assert_close(found, leaf.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["batch_norm", "group_norm", "layer_norm"])
def test_autocast_gives_the_types_it_gives_one_device(name: str) -> None:
    picture = torch.randn(2, CHANNELS, 4, 3).bfloat16()

    def work(group: ThreadGroup) -> torch.dtype:
        cut = distribute(picture.clone(), (ShardSpec(2, 4, group),), RULES)
        with torch.autocast("cpu", torch.bfloat16):
            return to_local(CALLS[name](cut)).dtype

    with torch.autocast("cpu", torch.bfloat16):
        expected = CALLS[name](picture).dtype
    assert run_threads(2, work) == [expected] * 2


def test_accelerators_take_fp32_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's autocast of CUDA does; asked of a device without numbers."""
    tensor = torch.empty(2, dtype=torch.bfloat16, device="meta")
    assert as_autocast(tensor) is tensor
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda _: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: True)
    assert as_autocast(tensor).dtype is torch.float32
    assert as_autocast(tensor.new_empty(2, device="cpu")).dtype is torch.bfloat16


def _refused(group: ThreadGroup) -> None:
    cut = distribute(torch.randn(1, CHANNELS, 1, 1), image_specs((1, CHANNELS, 1, 1), (None, group, None)), RULES)
    with pytest.raises(InputError, match="more than one value per channel"):
        functional.batch_norm(cut, None, None, training=True)


def test_one_value_a_channel_is_refused() -> None:
    run_threads(2, _refused)


def test_calls_without_a_rule_use_the_fallback() -> None:
    def work(group: ThreadGroup) -> list[str]:
        others: list[str] = []

        def other(call: Call) -> Any:
            others.append(call.name)
            return call.function(
                *[full_tensor(one) if isinstance(one, Tensor) else one for one in call.args], **call.kwargs
            )

        cut = distribute(torch.randn(2, CHANNELS, 3, 4), (ShardSpec(1, CHANNELS, group),), Rules(HANDLERS, other))
        functional.group_norm(cut, 3)
        return others

    assert run_threads(2, work) == [["group_norm"]] * 2


@pytest.mark.parametrize("pixels", [1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_synchronised_batch_norm_takes_its_statistics_over_other_samples_too(pixels: int, training: bool) -> None:
    """Two data ranks with unequal samples, each alone or shared by two."""
    torch.manual_seed(2)
    picture, weight = torch.randn(2, 5, CHANNELS, 5, 4, dtype=torch.float64).unbind()
    bounds = [(0, 2), (2, 3)]
    made = partial(nn.SyncBatchNorm, CHANNELS, momentum=None, dtype=torch.float64)
    reference = nn.BatchNorm2d(CHANNELS, momentum=None).double().train(training)
    leaf = picture.clone().requires_grad_()
    expected = reference(leaf)
    (expected * weight).sum().backward()

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        lines = lines_of(group, {0: 2, 2: pixels})
        start, length = bounds[lines[0].rank]
        module = made().train(training)
        sync_batch_norm(module, [lines[0]])
        mine = picture.narrow(0, start, length).clone().requires_grad_()
        cuts = (ShardSpec(2, 5, lines[2]),) if pixels > 1 else ()
        result = module(distribute(mine, cuts, RULES))
        part = distribute(weight.narrow(0, start, length).clone(), cuts, RULES)
        (to_local(result) * to_local(part)).sum().backward()
        gradients = {
            name: group.all_reduce(one.grad) for name, one in module.named_parameters() if one.grad is not None
        }
        return full_tensor(result).detach(), lines[2].all_reduce(mine.grad), gradients, dict(module.state_dict())

    near = {"rtol": 1e-10, "atol": 1e-10}
    for rank, (result, gradient, gradients, state) in enumerate(run_threads(2 * pixels, work)):
        start, length = bounds[rank // pixels]
        torch.testing.assert_close(result, expected.detach().narrow(0, start, length), **near)
        torch.testing.assert_close(gradient, leaf.grad.narrow(0, start, length), **near)
        torch.testing.assert_close(gradients, {name: one.grad for name, one in reference.named_parameters()}, **near)
        torch.testing.assert_close(state, dict(reference.state_dict()), **near)
