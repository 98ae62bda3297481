"""Activations that wait on the host: the same gradients, what travels, what stays, when it comes back."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.catalog import device_named
from galvatron_lite.cluster.cluster import Device
from galvatron_lite.cost.layer import LayerCost, LayerPricer
from galvatron_lite.cost.memory import stage_memory, terms
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.zoo import build
from galvatron_lite.model.zoo.gpt import GPTBlock, GPTConfig
from galvatron_lite.parallelism.base import LayerWork
from galvatron_lite.parallelism.offload import apply as offload
from galvatron_lite.parallelism.offload.apply import ActivationOffloader, offload_activations
from galvatron_lite.parallelism.offload.cost import REACHED, HostItem, host_traffic
from galvatron_lite.parallelism.recompute.apply import apply_recompute
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import MemoryBreakdown
from galvatron_lite.profiler.schema import LayerPoint, OptimizerCost, Profile
from tests.factories import make_cluster, make_graph, make_kind, make_profile

ROWS, TOKENS, HIDDEN = 4, 32, 32


def blocks(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    config = GPTConfig(vocab=16, layers=1, hidden=HIDDEN, heads=2, sequence=TOKENS, dropout=dropout)
    return nn.Sequential(*(GPTBlock(config) for _ in range(2)))


def trained(offloads: bool, recompute: Recompute, compute: torch.dtype | None) -> tuple[dict[str, Tensor], int]:
    model, offloader = blocks(dropout=0.2), ActivationOffloader()
    for block in model:
        apply_recompute(block, recompute)
        if offloads:
            offload_activations(block, offloader)
    torch.manual_seed(4)
    hidden = torch.randn(ROWS, TOKENS, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", compute, enabled=compute is not None):
        losses = [model(hidden).square().mean(), model(2 * hidden).square().mean()]
    for loss in losses:
        loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert hidden.grad is not None
    return found | {"hidden": hidden.grad}, offloader.bytes_down


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.parametrize("recompute", list(Recompute))
def test_same_gradients_and_what_travels(recompute: Recompute, compute: torch.dtype | None) -> None:
    plain, nothing = trained(False, recompute, compute)
    found, moved = trained(True, recompute, compute)
    torch.testing.assert_close(found, plain, rtol=0, atol=0)
    inputs = 2 * 2 * ROWS * TOKENS * HIDDEN * 4
    assert nothing == 0
    assert moved > inputs if recompute is Recompute.NONE else moved in (inputs, inputs * 3 // 4)


def test_what_travels_is_what_is_priced() -> None:
    model = build("gpt-tiny", vocab=64, layers=2, hidden=HIDDEN, heads=2, sequence=TOKENS)
    graph = trace(model, model.example_batch(2))
    kind = graph.kinds[next(layer.kind for layer in graph.layers if layer.role.value == "block")]
    offloader, block = ActivationOffloader(), blocks()[0]
    offload_activations(block, offloader)
    block(torch.randn(ROWS, TOKENS, HIDDEN, requires_grad=True))
    priced = kind.kept[Recompute.NONE]
    assert offloader.bytes_down == pytest.approx(ROWS * priced.total, rel=0.02)


def test_weights_stay_and_views_travel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 1)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))

        def forward(self, hidden: Tensor) -> Tensor:
            cast = self.weight.bfloat16().t()
            left, right = (hidden @ self.weight).split(4, dim=1)
            return (left * right).sum() + (hidden.bfloat16() @ cast).sum()

    module, offloader = Twice(), ActivationOffloader()
    offload_activations(module, offloader)
    module(torch.ones(2, 8, requires_grad=True)).backward()
    # the input in both precisions, and the product once for both of its halves
    assert offloader.bytes_down == 2 * 8 * (4 + 2 + 4)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_pieces_of_a_storage_that_are_written_one_by_one(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    cells, inputs = kind(16, 16, batch_first=True), torch.randn(16, 4, 16)
    gradients = []
    for forward in (cells.forward, ActivationOffloader().carrying(cells)):
        cells.zero_grad()
        forward(inputs)[0].square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in cells.parameters()])
    for expected, gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected)


def test_passes_that_are_never_differentiated_leave_nothing() -> None:
    block, offloader = blocks()[0], ActivationOffloader()
    hosts: list[weakref.ref[Any]] = []
    down = offloader._down

    def watched(data: Tensor) -> Any:
        item = down(data)
        hosts.append(weakref.ref(item))
        return item

    offloader._down = watched  # type: ignore[method-assign]
    offload_activations(block, offloader)
    hidden = torch.randn(ROWS, TOKENS, HIDDEN, requires_grad=True)
    block(hidden)
    with torch.no_grad():
        block(hidden)
    gc.collect()
    assert hosts
    assert all(one() is None for one in hosts)


def test_the_layer_before_comes_up_beside_a_layer() -> None:
    model, offloader = blocks(), ActivationOffloader()
    order: list[str] = []
    up = offloader._up
    names = {}

    def watched(item: Any) -> None:
        order.append(names[id(item)])
        up(item)

    down = offloader._down

    def named(data: Tensor) -> Any:
        item = down(data)
        names[id(item)] = "first" if len(running) == 1 else "second"
        return item

    running: list[int] = []
    offloader._up, offloader._down = watched, named  # type: ignore[method-assign]
    for block in model:
        offload_activations(block, offloader)
        block.register_forward_pre_hook(lambda *_: running.append(1))
    seen: list[int] = []
    hidden = torch.randn(ROWS, TOKENS, HIDDEN, requires_grad=True)
    middle = model[0](hidden)
    middle.register_hook(lambda _: seen.append(len(order)))
    model[1](middle).sum().backward()
    # when the second block's backward ends, all is up, its own first
    assert seen == [len(order)]
    assert order == sorted(order, reverse=True)
    assert set(order) == {"first", "second"}


# Offload against hand-computed bytes and seconds, and against ZeRO-Offload's own figures.


ITEMS, LINK, HOST = 1_000_000, 1e9, 4e9
KEPT, FORWARD, BACKWARD = 3_000_000, 2e-3, 4e-3


def profile(host: float = LINK) -> Profile:
    """A layer of a million items whose point is known; one byte of the host link takes a nanosecond."""
    kind = replace(make_kind("block", ITEMS), kept={Recompute.NONE: make_kind("x", 1).parameters})
    point = LayerPoint("block", 1, 1, False, Recompute.NONE, FORWARD, BACKWARD, KEPT, KEPT + 500, KEPT + 200)
    cluster = make_cluster(8)
    device = replace(cluster.device, host_bandwidth=host, host_memory_bandwidth=HOST)
    cluster = replace(cluster, groups=(replace(cluster.groups[0], device=device),))
    return make_profile(make_graph([kind], ["block"] * 3), [point], cluster, optimizer=OptimizerCost("adamw", 8, 1e-9))


def price(strategy: Strategy, microbatch: int = 1) -> LayerCost:
    cost = LayerPricer(profile()).price("block", strategy, microbatch, 1)
    assert cost is not None
    return cost


def test_states_leave_the_device_and_are_updated_on_the_host() -> None:
    here, away = price(Strategy()), price(Strategy(offload=Offload.STATES))
    assert (here.states, away.states) == (8 * ITEMS, 0)
    assert (away.parameters, away.gradients, away.kept) == (here.parameters, here.gradients, here.kept)
    # The host reads and writes 8 bytes of states, reads a gradient and writes a parameter of 4 each.
    assert away.update == pytest.approx(max(ITEMS * 24 / (REACHED * HOST), ITEMS * 4 / LINK))
    # Gradients of 4 bytes an item go down in 4 ms, all behind the last backward.
    assert away.step_exposed == pytest.approx(ITEMS * 4 / LINK - BACKWARD, abs=1e-12)
    assert away.forward_seconds == here.forward_seconds


def test_only_what_a_device_owns_goes_down() -> None:
    sharded = price(Strategy(zero=4, zero_stage=2, offload=Offload.STATES), microbatch=4)
    assert sharded.states == 0
    assert sharded.update == pytest.approx(ITEMS / 4 * 24 / (REACHED * HOST))
    assert sharded.step_exposed == pytest.approx(price(Strategy(zero=4, zero_stage=2), microbatch=4).step_exposed)


def test_activations_wait_on_the_host() -> None:
    here, away = price(Strategy()), price(Strategy(offload=Offload.ACTIVATIONS))
    assert (away.kept, away.offloaded) == (0, KEPT)
    assert away.states == here.states
    # 3 MB take 3 ms each way: 1 ms more than forward, and backward hides them all.
    assert away.forward_exposed == pytest.approx(KEPT / LINK - FORWARD)
    assert away.backward_exposed == here.backward_exposed == 0


def test_offloading_all_is_states_and_activations() -> None:
    both = price(Strategy(offload=Offload.ALL))
    assert (both.states, both.kept, both.offloaded) == (0, 0, KEPT)
    states, kept = price(Strategy(offload=Offload.STATES)), price(Strategy(offload=Offload.ACTIVATIONS))
    assert (both.update, both.forward_exposed) == (states.update, kept.forward_exposed)


def test_many_layers_hold_two_layers_activations() -> None:
    here, away = price(Strategy()), price(Strategy(offload=Offload.ACTIVATIONS))
    peak = lambda cost, flight: stage_memory([cost] * 10, flight, 8, 0, 0, optimizer=False)  # noqa: E731
    resting = 10 * (here.parameters + here.gradients + here.states)
    # Of ten layers and four micro-batches in flight one layer makes a gradient and its neighbour's kept bytes are on
    # their way.
    assert peak(away, 4).total == resting + (KEPT + 4 * ITEMS) + KEPT
    assert peak(here, 4).total == resting + (3 * 10 + 9) * KEPT + KEPT + 4 * ITEMS
    assert isinstance(peak(away, 4), MemoryBreakdown)
    assert terms(away, 4, 8).rest == terms(away, 1, 8).rest


def test_nothing_is_offloaded_over_an_unknown_link() -> None:
    pricer = LayerPricer(profile(host=0.0))
    assert pricer.price("block", Strategy(offload=Offload.STATES), 1, 1) is None
    assert pricer.price("block", Strategy(), 1, 1) is not None


def test_zero_offload_s_cpu_adam() -> None:
    """Ren et al. 2021, table 4: about a quarter of a second for a billion items on a DGX-2 (256 GB/s)."""
    dgx2 = Device("V100", 1, 1.0, {}, host_bandwidth=1e15, host_memory_bandwidth=256e9)
    item = HostItem(gradient=4, parameter=4, state=8)
    work = LayerWork(1.0, 1, False, Recompute.NONE, 1e9, 1e9, 1e9, 1e9, host_items=1e9)
    assert host_traffic(dgx2, work, (1.0, 1.0), 0, item).update == pytest.approx(0.25, rel=0.2)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("V100-SXM2-32GB", 10e9, 15.75e9), ("A100-SXM4-80GB", 20e9, 31.5e9), ("H100-SXM5-80GB", 45e9, 63e9),
     ("GH200-96GB", 300e9, 450e9), ("GB200-186GB", 150e9, 225e9)],
)  # fmt: skip
def test_host_links_are_as_fast_as_published(name: str, least: float, most: float) -> None:
    device = device_named(name)
    assert least <= device.host_bandwidth <= most
    assert device.host_memory_bandwidth > 0
