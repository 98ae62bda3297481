"""Operations that are looked up return what torch returns: shapes, strides, types, and whose storage they are in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from galvatron_lite.model.batch import tensors_of
from galvatron_lite.model.trace.op_cache import OpCache

ATEN = torch.ops.aten


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty(4, 6, device="meta"), torch.empty(6, 4, device="meta").t(),
        torch.empty(4, 6, dtype=torch.int64, device="meta"),
    )  # fmt: skip


CALLS: dict[str, Any] = {
    "made of two": lambda run, one, other, _: run(ATEN.add.Tensor, one, other),
    "in place": lambda run, one, other, _: run(ATEN.add_.Tensor, one, other),
    "looked at": lambda run, one, *_: run(ATEN.view.default, one, [2, 12]),
    "parts": lambda run, one, *_: run(ATEN.split.Tensor, one, 2),
    "several": lambda run, one, *_: run(ATEN.native_layer_norm.default, one, [6], None, None, 1e-5),
    "by the default type": lambda run, _, __, whole: run(ATEN.div.Tensor, whole, whole),
    "of a whole number": lambda run, *_: run(ATEN.full.default, [3], 1, device=torch.device("meta")),
    "of a truth": lambda run, *_: run(ATEN.full.default, [3], True, device=torch.device("meta")),
    "put into one that grows": lambda run, one, other, _: run(
        ATEN.add.out, one, other, out=torch.empty(0, device="meta")
    ),
    "of itself": lambda run, one, *_: run(ATEN.mul.Tensor, one, one),
}


def shown(outputs: Any, given: tuple[Tensor, ...]) -> list[Any]:
    """All that is to be seen of outputs, with the place of the input that each is, or whose storage it is in."""
    storages = [one.untyped_storage()._cdata for one in given]
    return [
        (
            one.shape, one.stride(), one.dtype, one.storage_offset(), [one is other for other in given],
            [one.untyped_storage()._cdata == other for other in storages],
        )
        for one in tensors_of(outputs)
    ]  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_is_looked_up_is_what_torch_returns(name: str) -> None:
    cache = OpCache()
    for _ in range(2):
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                given, alike = tensors(), tensors()
                found = CALLS[name](lambda func, *args, **kwargs: cache.run(func, args, kwargs, func), *given)
                wanted = CALLS[name](lambda func, *args, **kwargs: func(*args, **kwargs), *alike)
            finally:
                torch.set_default_dtype(torch.float32)
            assert type(found) is type(wanted)
            assert shown(found, given) == shown(wanted, alike)


def test_torch_is_asked_once_and_every_answer_is_a_new_tensor() -> None:
    asked: list[Any] = []

    def compute(*args: Any) -> Tensor:
        asked.append(args)
        made: Tensor = ATEN.add.Tensor(*args)
        return made

    cache, (one, other, whole) = OpCache(), tensors()
    first, second = (cache.run(ATEN.add.Tensor, (one, other), {}, compute) for _ in range(2))
    assert len(asked) == 1
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    cache.run(ATEN.add.Tensor, (one, whole), {}, compute)
    assert len(asked) == 2
    real = cache.run(ATEN.add.Tensor, (torch.ones(2), torch.ones(2)), {}, compute)
    assert torch.equal(real, torch.full((2,), 2.0))
    again = cache.run(ATEN.add.Tensor, (torch.ones(2), torch.zeros(2)), {}, compute)
    assert torch.equal(again, torch.ones(2)), "values are never remembered"
