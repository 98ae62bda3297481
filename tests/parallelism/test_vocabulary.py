"""Losses on shares of the vocabulary, threads standing in for devices, against the same code on whole logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.apply import shard_layer
from galvatron_lite.parallelism.tensor.infer import infer_edge
from galvatron_lite.parallelism.vocabulary.logits import FIGURES, full_logits, is_shared, shared_logits
from tests.parallelism.sharded_compare import gather_full
from tests.parallelism.thread_group import ThreadGroup, run_threads

SAMPLES, TOKENS, HIDDEN, VOCAB = 2, 6, 4, 37
"""A vocabulary that no degree divides."""

Loss = Callable[[Tensor, Tensor], Tensor]


def _labels() -> Tensor:
    """Some are ignored; one sample has the first rank's classes alone."""
    labels = torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    labels[0] = torch.arange(TOKENS)
    labels[1, ::2] = -100
    return labels


def _causal(logits: Tensor, labels: Tensor) -> Tensor:
    """As transformers' ``ForCausalLMLoss`` does."""
    logits = logits.float()
    shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return functional.cross_entropy(logits.view(-1, VOCAB), shifted.view(-1), ignore_index=-100)


def _shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.CrossEntropyLoss()(logits[..., :-1, :].contiguous().view(-1, logits.size(-1)), labels[..., 1:].flatten())


def _capped(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy((logits / 3).tanh_().mul(3).flatten(0, 1), labels.flatten())


def _by_token(logits: Tensor, labels: Tensor) -> Tensor:
    each = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", label_smoothing=0.2)
    return (each * torch.linspace(0, 1, TOKENS)).sum()


def _weighted_z(logits: Tensor, labels: Tensor) -> Tensor:
    own = functional.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), reduction="sum")
    return own + logits.logsumexp(-1).square().mean()


def _likely(logits: Tensor, labels: Tensor) -> Tensor:
    """A log-softmax read twice: the gradients of both uses meet on the way back."""
    likely = functional.log_softmax(logits, dim=-1)
    chosen = likely.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return functional.nll_loss(likely.permute(0, 2, 1), labels) + 0.1 * chosen.square().mean()


def _masked(logits: Tensor, labels: Tensor) -> Tensor:
    at = labels != -100
    return functional.cross_entropy(logits[at], labels[at])


def _last(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, 1, :], labels[:, 1]) + functional.cross_entropy(
        logits[0, 1], labels[0, 1]
    )


FAST = {one.__name__: one for one in (_causal, _shifted, _capped, _by_token, _weighted_z, _likely, _masked, _last)}
"""Losses that never need whole logits."""


def _weights(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.view(-1, VOCAB), labels.view(-1), weight=torch.arange(1.0, VOCAB + 1).to(logits)
    )


def _greatest(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.amax(-1).mean() + logits.std()


def _likelihoods(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1), functional.one_hot(labels.clamp(min=0), VOCAB).flatten(0, 1).to(logits)
    )


def _columns(logits: Tensor, labels: Tensor) -> Tensor:
    return logits[..., :3].square().sum() + functional.cross_entropy(
        logits[..., :30].flatten(0, 1), labels.flatten() % 7
    )


SLOW = {one.__name__: one for one in (_weights, _greatest, _likelihoods, _columns)}
"""Losses that look at whole logits."""


@dataclass
class Found:
    loss: Tensor
    gradients: list[Tensor]
    calls: dict[str, int]
    widest: int


class Head(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=bias)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.lift = nn.Parameter(torch.linspace(0, 1, VOCAB))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).sin()) * self.scale + self.lift


class Watching(ThreadGroup):
    """Knows the most items that one message brought."""

    widest = 0

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self.widest = max(self.widest, tensor.numel() * self.size)
        return super().all_gather(tensor, dim)


def _found(model: Head, loss: Loss, group: ThreadGroup | None, dtype: torch.dtype = torch.float64) -> Found:
    model = copy.deepcopy(model).to(dtype)
    ids, labels = torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS) * 7 % VOCAB, _labels()
    watching, shards = None, {}
    if group is not None:
        watching = Watching(group.size, group.rank, group.meeting)
        parts = {"table": model.table, "head": model.head}
        shards = shard_layer(parts, infer_edge(parts, model), watching)
    logits = model(ids)
    assert is_shared(logits) == (group is not None)
    value = loss(logits, labels)
    assert type(value) is Tensor
    value.backward()
    gradients = []
    for name, one in model.named_parameters():
        assert one.grad is not None
        gradients.append(
            one.grad if watching is None or name not in shards else gather_full(one.grad, shards[name], group)
        )
    return Found(
        value.detach(),
        gradients,
        {} if watching is None else dict(watching.calls),
        0 if watching is None else watching.widest,
    )


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_a_loss_of_shares_is_that_of_whole_logits(name: str, degree: int) -> None:
    torch.manual_seed(2)
    model, loss = Head(), (FAST | SLOW)[name]
    whole = _found(model, loss, None)
    for found in run_threads(degree, lambda group: _found(model, loss, group)):
        torch.testing.assert_close(found.loss, whole.loss, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found.gradients, whole.gradients, rtol=1e-5, atol=1e-7)
        assert (found.widest < SAMPLES * TOKENS * VOCAB) == (name in FAST)


def test_none_of_the_labels_counts() -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return _shifted(logits, torch.full_like(labels, -100))

    whole = _found(Head(), loss, None)
    for found in run_threads(2, lambda group: _found(Head(), loss, group)):
        torch.testing.assert_close([found.loss, *found.gradients], [whole.loss, *whole.gradients], equal_nan=True)


def _shares(group: ThreadGroup, logits: Tensor) -> Tensor:
    start, length = share(VOCAB, group.size, group.rank)
    return shared_logits(logits.narrow(-1, start, length), group, VOCAB)


def test_code_sees_whole_logits() -> None:
    """What it asks, and what it computes; they are gathered once."""
    logits = torch.arange(2.0 * VOCAB).view(2, VOCAB).sin()

    def work(group: ThreadGroup) -> None:
        shares = _shares(group, logits)
        assert (shares.shape, shares.size(-1), len(shares), shares.dtype) == ((2, VOCAB), VOCAB, 2, torch.float32)
        assert shares.argmax(-1).tolist() == logits.argmax(-1).tolist()
        torch.testing.assert_close(shares.softmax(-1).sort().values, logits.softmax(-1).sort().values)
        torch.testing.assert_close(
            [shares[0, 5], shares[:, -1], *shares.unbind(1)[:1]], [logits[0, 5], logits[:, -1], logits[:, 0]]
        )
        torch.testing.assert_close((shares + 1)[:, :3].tolist(), (logits + 1)[:, :3].tolist())
        assert shares.view(VOCAB, 2).shape == (VOCAB, 2)
        assert not is_shared(full_logits(shares))
        with pytest.raises(InputError, match=r"--fix LAYER\.tensor=1"):
            shares[:, 0] = 0
        with pytest.raises(IndexError):
            functional.cross_entropy(shares, torch.tensor([0, VOCAB]))
        before = group.calls["all_gather"]
        assert len(shares.topk(2)) == 2
        assert group.calls["all_gather"] == before

    run_threads(2, work)


def test_columns_without_a_chance() -> None:
    """A rank whose columns are all minus infinity."""
    logits = torch.zeros(2, VOCAB).index_fill(1, torch.arange(20), float("-inf"))
    labels = torch.tensor([30, 36])
    expected = functional.cross_entropy(logits, labels)
    for loss in run_threads(2, lambda group: functional.cross_entropy(_shares(group, logits), labels)):
        torch.testing.assert_close(loss, expected)


def test_half_precision_is_summed_in_float32() -> None:
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    labels = torch.arange(64) % VOCAB
    functional.cross_entropy(logits.float(), labels).backward()
    assert logits.grad is not None

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        own = logits.detach().clone().requires_grad_()
        loss = functional.cross_entropy(_shares(group, own), labels)
        loss.backward()
        assert own.grad is not None
        return loss, own.grad

    found = run_threads(4, work)
    assert all(loss.dtype == torch.bfloat16 for loss, _ in found)
    assert torch.equal(sum(gradient for _, gradient in found), logits.grad)


def test_messages_of_one_loss() -> None:
    """One gather of three figures a token, and what makes the head's input complete."""
    shares = run_threads(2, lambda group: _found(Head(), _shifted, group))
    assert all(found.calls["all_gather"] == 1 for found in shares)
    assert all(found.widest == 2 * FIGURES * SAMPLES * (TOKENS - 1) for found in shares)
