"""Activations that wait on the host: the same gradients, what travels, what stays, when it comes back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.zoo import build
from galvatron_lite.model.zoo.gpt import GPTBlock, GPTConfig
from galvatron_lite.parallelism.offload import apply as offload
from galvatron_lite.parallelism.offload.apply import HostTraveller, offload_activations
from galvatron_lite.parallelism.recompute.apply import apply_recompute

ROWS, TOKENS, HIDDEN = 4, 32, 32


def blocks(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    config = GPTConfig(vocab=16, layers=1, hidden=HIDDEN, heads=2, sequence=TOKENS, dropout=dropout)
    return nn.Sequential(*(GPTBlock(config) for _ in range(2)))


def trained(offloads: bool, recompute: Recompute, compute: torch.dtype | None) -> tuple[dict[str, Tensor], int]:
    model, traveller = blocks(dropout=0.2), HostTraveller()
    for block in model:
        apply_recompute(block, recompute)
        if offloads:
            offload_activations(block, traveller)
    torch.manual_seed(4)
    hidden = torch.randn(ROWS, TOKENS, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", compute, enabled=compute is not None):
        losses = [model(hidden).square().mean(), model(2 * hidden).square().mean()]
    for loss in losses:
        loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert hidden.grad is not None
    return found | {"hidden": hidden.grad}, traveller.bytes_down


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
    traveller, block = HostTraveller(), blocks()[0]
    offload_activations(block, traveller)
    block(torch.randn(ROWS, TOKENS, HIDDEN, requires_grad=True))
    priced = kind.kept[Recompute.NONE]
    assert traveller.bytes_down == pytest.approx(ROWS * priced.total, rel=0.02)


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

    module, traveller = Twice(), HostTraveller()
    offload_activations(module, traveller)
    module(torch.ones(2, 8, requires_grad=True)).backward()
    # the input in both precisions, and the product once for both of its halves
    assert traveller.bytes_down == 2 * 8 * (4 + 2 + 4)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_pieces_of_a_storage_that_are_written_one_by_one(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    cells, inputs = kind(16, 16, batch_first=True), torch.randn(16, 4, 16)
    gradients = []
    for forward in (cells.forward, HostTraveller().carrying(cells)):
        cells.zero_grad()
        forward(inputs)[0].square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in cells.parameters()])
    for expected, gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected)


def test_passes_that_are_never_differentiated_leave_nothing() -> None:
    block, traveller = blocks()[0], HostTraveller()
    hosts: list[weakref.ref[Any]] = []
    down = traveller._down

    def watched(data: Tensor) -> Any:
        item = down(data)
        hosts.append(weakref.ref(item))
        return item

    traveller._down = watched  # type: ignore[method-assign]
    offload_activations(block, traveller)
    hidden = torch.randn(ROWS, TOKENS, HIDDEN, requires_grad=True)
    block(hidden)
    with torch.no_grad():
        block(hidden)
    gc.collect()
    assert hosts
    assert all(one() is None for one in hosts)


def test_the_layer_before_comes_up_beside_a_layer() -> None:
    model, traveller = blocks(), HostTraveller()
    order: list[str] = []
    up = traveller._up
    names = {}

    def watched(item: Any) -> None:
        order.append(names[id(item)])
        up(item)

    down = traveller._down

    def named(data: Tensor) -> Any:
        item = down(data)
        names[id(item)] = "first" if len(running) == 1 else "second"
        return item

    running: list[int] = []
    traveller._up, traveller._down = watched, named  # type: ignore[method-assign]
    for block in model:
        offload_activations(block, traveller)
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
