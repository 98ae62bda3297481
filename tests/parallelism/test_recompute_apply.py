"""Recomputation: the same output and gradients, fewer tensors kept, matmuls not repeated where they are kept."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute, Role
from galvatron_lite.model.zoo import build
from galvatron_lite.model.zoo.gpt import GPTBlock, GPTConfig
from galvatron_lite.parallelism.recompute.apply import apply_recompute, recomputed
from galvatron_lite.parallelism.recompute.sums import row_product
from galvatron_lite.parallelism.tensor.apply import shard_layer
from galvatron_lite.parallelism.tensor.functions import reduce_from_group
from galvatron_lite.parallelism.tensor.group import ShapeOnlyGroup
from galvatron_lite.parallelism.tensor.infer import infer_block


class CountCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def run_block(recompute: Recompute, dropout: float) -> tuple[Tensor, dict[str, Tensor], Counter[str]]:
    torch.manual_seed(3)
    config = GPTConfig(vocab=16, layers=1, hidden=16, heads=2, sequence=8, dropout=dropout)
    block, hidden = GPTBlock(config), torch.randn(2, 8, 16, requires_grad=True)
    apply_recompute(block, recompute)
    torch.manual_seed(4)
    with CountCalls() as counter:
        output = block(hidden)
        output.square().mean().backward()
    gradients = {name: value.grad for name, value in block.named_parameters() if value.grad is not None}
    assert hidden.grad is not None
    return output.detach(), gradients | {"hidden": hidden.grad}, counter.calls


@pytest.mark.parametrize("recompute", [Recompute.FULL, Recompute.SELECTIVE])
def test_same_output_and_gradients_with_dropout(recompute: Recompute) -> None:
    output, gradients, _ = run_block(Recompute.NONE, dropout=0.3)
    again, same, _ = run_block(recompute, dropout=0.3)
    torch.testing.assert_close(again, output, rtol=0, atol=0)
    torch.testing.assert_close(same, gradients, rtol=0, atol=0)


def test_which_operators_run_again() -> None:
    choices = (Recompute.NONE, Recompute.FULL, Recompute.SELECTIVE)
    plain, full, selective = (run_block(choice, dropout=0.0)[2] for choice in choices)
    # the last matmul's output is not needed in backward: recomputation stops before it
    assert (plain["addmm"], full["addmm"], selective["addmm"]) == (6, 11, 6)
    assert full["gelu"] == selective["gelu"] == 2 * plain["gelu"] == 2
    attention = next(name for name in plain if "attention" in name and "backward" not in name)
    assert full[attention] == 2
    assert selective[attention] == plain[attention] == 1


def test_selective_keeps_what_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, tokens, hidden = 4, 32, 32
    model = build("gpt-tiny", vocab=64, layers=2, hidden=hidden, heads=2, sequence=tokens)
    graph = trace(model, model.example_batch(2))
    kind = graph.kinds[next(layer.kind for layer in graph.layers if layer.role is Role.BLOCK)]
    caches: list[Any] = []

    def spy(policy: Any) -> Any:
        caches.append(create_selective_checkpoint_contexts(policy))
        return caches[-1]

    monkeypatch.setattr("galvatron_lite.parallelism.recompute.apply.create_selective_checkpoint_contexts", spy)
    block = GPTBlock(GPTConfig(vocab=16, layers=1, hidden=hidden, heads=2, sequence=tokens))
    apply_recompute(block, Recompute.SELECTIVE)
    given = torch.randn(samples, tokens, hidden, requires_grad=True)
    block(given)
    ((first, _),) = caches
    # private: torch does not show what it keeps
    sizes = {one.data_ptr(): one.nbytes() for one in map(Tensor.untyped_storage, _tensors(first.storage))}
    assert given.nbytes + sum(sizes.values()) == samples * kind.kept[Recompute.SELECTIVE].total


class ScatteringGroup(ShapeOnlyGroup):
    """Two devices that compute the same: sums are twice what one has; counts the sums."""

    sums = 0

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        type(self).sums += 1
        return 2 * super().reduce_scatter(tensor, dim)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        type(self).sums += 1
        return 2 * tensor


def run_share(recompute: Recompute, *, shared: bool, precision: torch.dtype) -> tuple[Any, Counter[str], int]:
    torch.manual_seed(3)
    config = GPTConfig(vocab=16, layers=1, hidden=16, heads=2, sequence=8, dropout=0.2)
    block, hidden = GPTBlock(config), torch.randn(2, 4 if shared else 8, 16, requires_grad=True)
    plan = infer_block(block, (torch.randn(2, 8, 16),), {})
    shard_layer(block, plan, ScatteringGroup(2), shared)
    apply_recompute(block, recompute)
    torch.manual_seed(4)
    ScatteringGroup.sums = 0
    with CountCalls() as counter, torch.autocast("cpu", precision, enabled=precision is not torch.float32):
        output = block(hidden)
        forward_sums = ScatteringGroup.sums
        output.float().square().mean().backward()
    gradients = {name: value.grad for name, value in block.named_parameters()}
    return (output.detach(), gradients, hidden.grad), counter.calls, ScatteringGroup.sums - forward_sums


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True])
def test_sums_over_the_tensor_group_are_kept(shared: bool, precision: torch.dtype) -> None:
    plain, calls, backward = run_share(Recompute.NONE, shared=shared, precision=precision)
    again, more, repeated = run_share(Recompute.SELECTIVE, shared=shared, precision=precision)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    # neither the row-split matmuls nor their sums run twice; those run under another name
    assert repeated == backward
    assert more["addmm"] + more["mm"] == calls["addmm"] + calls["mm"]


def test_a_sum_that_is_changed_in_place_is_refused() -> None:
    def forward(hidden: Tensor) -> Tensor:
        with row_product():
            summed = reduce_from_group(hidden.exp(), ScatteringGroup(2))
        return summed.add_(1).sin()

    run: Callable[..., Any] = recomputed(forward, Recompute.SELECTIVE)
    output = run(torch.ones(3, requires_grad=True))
    with pytest.raises(InputError, match="full recomputation"):
        output.sum().backward()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)
    elif hasattr(value, "val"):
        yield from _tensors(value.val)


def test_keyword_arguments_and_no_grad() -> None:
    def forward(hidden: Tensor, *, use_reentrant: float) -> Tensor:
        return (hidden * use_reentrant).exp()

    run: Callable[..., Any] = recomputed(forward, Recompute.FULL)
    hidden = torch.ones(3, requires_grad=True)
    run(hidden, use_reentrant=2.0).sum().backward()
    torch.testing.assert_close(hidden.grad, 2 * torch.full((3,), 2.0).exp())
    with torch.no_grad():
        assert not run(hidden, use_reentrant=2.0).requires_grad


def test_a_list_that_grows_after_the_call_is_that_of_the_call() -> None:
    def gradient(recompute: Recompute) -> Tensor:
        torch.manual_seed(0)
        linear = nn.Linear(3, 3)
        layer = recomputed(lambda outputs: linear(torch.stack(outputs).sum(0)), recompute)
        outputs = [torch.randn(2, 3)]
        for _ in range(3):
            outputs.append(layer(outputs))
        outputs[-1].square().sum().backward()
        assert linear.weight.grad is not None
        return linear.weight.grad

    torch.testing.assert_close(gradient(Recompute.FULL), gradient(Recompute.NONE))


def test_no_recompute_leaves_forward_alone() -> None:
    module = nn.Linear(2, 2)
    apply_recompute(module, Recompute.NONE)
    assert "forward" not in vars(module)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("recompute", [Recompute.FULL, Recompute.SELECTIVE])
def test_norms_track_a_batch_once(recompute: Recompute, momentum: float | None) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, momentum=momentum), nn.ReLU(inplace=True))
    again = copy.deepcopy(plain)
    apply_recompute(again, recompute)
    for _ in range(2):
        picture = torch.randn(4, 2, 3, 3)
        for module in (plain, again):
            module(picture).square().sum().backward()
    for (name, value), other in zip(plain.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert again[1].momentum == momentum


class DecayNorm(nn.Module):
    """A norm by a running mean of its own: ``momentum`` weighs what it was, where torch's weighs what is new."""

    def __init__(self) -> None:
        super().__init__()
        self.momentum = 0.9
        self.register_buffer("running_mean", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running_mean.mul_(self.momentum).add_(x.detach().mean(0), alpha=1 - self.momentum)
        return (x - self.running_mean).sigmoid()


@pytest.mark.parametrize("recompute", [Recompute.FULL, Recompute.SELECTIVE])
def test_other_norms_track_a_batch_once(recompute: Recompute) -> None:
    layer = nn.Sequential(nn.Linear(4, 4), DecayNorm(), nn.Linear(4, 4))
    once, again = copy.deepcopy(layer), recomputed(layer.forward, recompute, layer)
    for _ in range(3):
        x = torch.randn(8, 4)
        once(x).square().sum().backward()
        again(x).square().sum().backward()
    for (_, one), (_, other) in zip(once.named_buffers(), layer.named_buffers(), strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(once.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_kept_results_survive_functions_in_place() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 1), nn.LeakyReLU(0.5, inplace=True), nn.Conv2d(3, 2, 1))
    again, picture = copy.deepcopy(plain), torch.randn(4, 2, 3, 3)
    apply_recompute(again, Recompute.SELECTIVE)
    for module in (plain, again):
        module(picture).square().sum().backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Remembering(nn.Module):
    """Keeps an average, a counter and a list of its own, and appends to, and attends over, a cache that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("replaced", torch.ones(3))
        self.calls, self.means, self.last = 0, [0.0], torch.zeros(3)
        self.returns = tuple[Tensor]  # as wrapped functions keep: it shows the attributes of its class

    def forward(self, hidden: Tensor, cache: Cache) -> Tensor:
        self.calls += 1
        self.average.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        self.replaced = self.replaced * 0.5 + hidden.detach().mean(0)
        self.means.append(self.means[-1] + float(hidden.detach().mean()))
        cache.append(self.linear(hidden))
        state = self.average * self.replaced * self.last + self.calls + self.means[-1]
        self.last = hidden.detach().mean(0)
        return torch.tanh(sum(cache.kept) * state).square() + hidden  # type: ignore[no-any-return]


class Cache:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.length, self.by_step, self.total = 0, {}, torch.zeros(3)

    def append(self, tensor: Tensor) -> None:
        self.kept.append(tensor)
        self.length += 1
        self.by_step[self.length] = tensor.shape
        self.total += tensor.detach().sum(0)


@pytest.mark.parametrize("recompute", [Recompute.FULL, Recompute.SELECTIVE])
def test_layers_with_a_memory_run_as_once(recompute: Recompute) -> None:
    """Two layers that share a cache, for three steps of two micro-batches whose backward passes come last."""
    torch.manual_seed(0)
    plain = [Remembering(), Remembering()]
    again = copy.deepcopy(plain)
    for layer in again:
        apply_recompute(layer, recompute)
    batches = [torch.randn(2, 4, 3) for _ in range(3)]
    assert _remembered(again, batches) == _remembered(plain, batches)


def _remembered(layers: list[Remembering], batches: list[Tensor]) -> list[Any]:
    seen: list[Any] = []
    for batch in batches:
        losses = []
        for part in batch:
            cache, hidden = Cache(), part
            for layer in layers:
                hidden = layer(hidden, cache)
            losses.append(hidden.mean())
            seen += [cache.length, cache.by_step, len(cache.kept), cache.total.tolist()]
        sum(losses).backward()  # type: ignore[attr-defined]
        for layer in layers:
            seen += [layer.calls, layer.means, layer.average.tolist(), layer.replaced.tolist(), layer.last.tolist()]
            seen += [one.grad.tolist() for one in layer.parameters() if one.grad is not None]
    return seen


def test_layers_that_overwrite_what_they_are_given_are_refused() -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2))
    apply_recompute(module, Recompute.FULL)
    with pytest.raises(InputError, match="without recompute"):
        module(torch.randn(2, 2, requires_grad=True) * 2)


def test_a_layer_with_statistics_runs_without_values() -> None:
    """As in a dry run: what is not there cannot be compared with what it was before the call."""
    with FakeTensorMode():
        block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        apply_recompute(block, Recompute.FULL)
        for _ in range(2):
            block(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())
