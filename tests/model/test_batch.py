from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import (
    batch_size,
    call_model,
    check_entries,
    loss_of,
    map_tensors,
    move_batch,
    resize_batch,
    sequence_length,
    slice_batch,
    tensors_of,
)


class Echo(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return x, y


def test_a_batch_is_passed_as_it_is_built() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    assert call_model(Echo(), {"y": y, "x": x}) == (x, y)
    assert call_model(Echo(), (x, y)) == (x, y)
    assert call_model(Echo(), x) == (x, None)


def test_what_forward_does_not_take_is_for_the_loss_alone() -> None:
    x, y, labels = torch.zeros(2), torch.ones(2), torch.ones(2)
    for batch in ({"x": x, "y": y, "labels": labels}, (x, y, labels)):
        assert call_model(Echo(), batch) == (x, y)
        check_entries(Echo(), batch, lambda output, batch: output[0].sum())
        with pytest.raises(InputError, match=r"batch: '(labels|2)' cannot be used. Echo.forward takes no such entry"):
            check_entries(Echo(), batch, None)


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: SimpleNamespace(loss=t), lambda t: {"loss": t}])
def test_the_loss_is_found(wrap: object) -> None:
    loss = torch.tensor([1.5])
    assert loss_of(wrap(loss), None).shape == ()
    assert loss_of(wrap(loss), None) == 1.5


@pytest.mark.parametrize("output", [torch.ones(3), {"logits": torch.ones(2)}, None, SimpleNamespace(loss=None)])
def test_no_loss_is_an_error_that_names_the_remedy(output: object) -> None:
    with pytest.raises(InputError, match="loss_fn"):
        loss_of(output, None)


@given(st.integers(1, 9), st.data())
def test_slices_put_together_are_the_batch(samples: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, samples))
    batch = {"x": torch.randn(samples, 3), "rest": (torch.arange(samples), "text", torch.tensor(7.0), torch.eye(11))}
    parts = [slice_batch(batch, 0, cut), slice_batch(batch, cut, samples)]
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(torch.cat([part["rest"][0] for part in parts]), batch["rest"][0])
    assert all(part["rest"][1:3] == ("text", torch.tensor(7.0)) for part in parts)
    assert all(torch.equal(part["rest"][3], torch.eye(11)) for part in parts)


def test_a_slice_may_be_written_into_before_the_backward_of_another() -> None:
    batch, weight = torch.ones(4), torch.ones(2, requires_grad=True)
    first, other = (slice_batch(batch, number, number + 2) for number in (0, 2))
    loss = (first * weight).sum()
    other.mul_(2)
    loss.backward()
    assert weight.grad.tolist() == [1, 1]


def test_a_slice_is_a_view() -> None:
    batch = torch.zeros(4, 2)
    slice_batch(batch, 1, 3).fill_(1)
    assert batch.sum() == 4


@pytest.mark.parametrize("bounds", [(-1, 2), (0, 5), (3, 2)])
def test_a_slice_outside_the_batch_is_an_error(bounds: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="4 samples"):
        slice_batch(torch.zeros(4), *bounds)


def test_a_batch_without_tensors_is_an_error() -> None:
    with pytest.raises(InputError, match="dim 0"):
        batch_size({"x": torch.tensor(1.0), "y": "text"})


def test_resizing_keeps_everything_but_the_samples() -> None:
    batch = {"ids": torch.zeros(2, 5, dtype=torch.long), "table": torch.zeros(7, 5)}
    resized = resize_batch(batch, 6)
    assert resized["ids"].shape == (6, 5)
    assert resized["ids"].dtype is torch.long
    assert resized["table"].shape == (7, 5)
    assert all(tensor.is_meta for tensor in tensors_of(resized))
    assert move_batch(batch, "meta")["ids"].is_meta


def test_nests_keep_their_types() -> None:
    nest = {"a": [torch.zeros(1), (torch.ones(1), None)]}
    assert map_tensors(nest, lambda tensor: tensor.item()) == {"a": [0.0, (1.0, None)]}


def test_outputs_of_transformers_keep_their_type() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    mapped = map_tensors(BaseModelOutput(last_hidden_state=torch.zeros(2)), torch.ones_like)
    assert isinstance(mapped, BaseModelOutput)
    assert mapped.last_hidden_state.sum() == 2


def test_tokens_per_sample() -> None:
    assert sequence_length({"pixels": torch.zeros(2, 3, 4, 4), "ids": torch.zeros(2, 9, dtype=torch.long)}) == 9
    assert sequence_length(torch.zeros(2, 9)) == 1
