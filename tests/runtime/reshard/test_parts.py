"""What a change of plan is made of: routes, checksums, and undoing a split."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.activations.layout import Box, Everyone, all_of, first_only, route_boxes
from galvatron_lite.runtime.parameters.pieces import LocalShard
from galvatron_lite.runtime.reshard.checksums import checksum
from galvatron_lite.runtime.reshard.original import Structure
from galvatron_lite.runtime.reshard.transfer import allocate, check_fits, covers, nbytes, release

RANKS, ROWS, COLUMNS = 4, 7, 5


def cut(rows: list[int], columns: list[int], owners: list[int]) -> Everyone:
    """A grid of boxes of a tensor, and who has them; every box has an owner, ranks may have several or none."""
    bounds = [sorted({0, *inner, extent}) for inner, extent in ((rows, ROWS), (columns, COLUMNS))]
    spans = [list(pairwise(one)) for one in bounds]
    boxes = [Box((row, column)) for row in spans[0] for column in spans[1]]
    held: list[list[Box]] = [[] for _ in range(RANKS)]
    for place, box in enumerate(boxes):
        held[owners[place % len(owners)] % RANKS].append(box)
    return tuple(tuple(boxes) for boxes in held)


grids = st.builds(
    cut,
    st.lists(st.integers(1, ROWS - 1), max_size=3),
    st.lists(st.integers(1, COLUMNS - 1), max_size=2),
    st.lists(st.integers(0, RANKS - 1), min_size=1, max_size=12),
)


@settings(max_examples=60, deadline=None)
@given(grids, grids, st.booleans(), st.booleans())
def test_every_wanted_item_arrives_once(before: Everyone, after: Everyone, copied: bool, wanted: bool) -> None:
    """By a simulation of all ranks; items may be held, and wanted, by two ranks."""
    before = _doubled(before) if copied else before
    after = _doubled(after) if wanted else after
    assert covers(before, (ROWS, COLUMNS))
    counts = [torch.zeros(ROWS, COLUMNS) for _ in range(RANKS)]
    for rank in range(RANKS):
        for peer, boxes in enumerate(route_boxes(before, after, rank).receives):
            assert boxes == route_boxes(before, after, peer).sends[rank]
            for box in boxes:
                counts[rank][_slices(box)] += 1
                assert any(box.meet(one) == box for one in before[peer])
    for rank, boxes in enumerate(after):
        expected = torch.zeros(ROWS, COLUMNS)
        for box in boxes:
            expected[_slices(box)] += 1
        assert torch.equal(counts[rank], expected)


def _doubled(everyone: Everyone) -> Everyone:
    """Rank 0's boxes on rank 1 as well."""
    extra = tuple(box for box in everyone[0] if box not in everyone[1])
    return (everyone[0], everyone[1] + extra, *everyone[2:])


def _sum(*parts: tuple[Tensor, Box]) -> int:
    return checksum([LocalShard("", tuple(tensor.shape), tensor, all_of(tensor.shape), box) for tensor, box in parts])


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*pair) for pair in box.ranges)


def test_what_stays_is_not_sent_and_copies_take_turns() -> None:
    left, right = Box(((0, 2),)), Box(((2, 4),))
    whole = Box(((0, 4),))
    everywhere, halves = ((whole,),) * 4, ((left,), (right,), (left,), (right,))
    for rank in range(4):
        ways = route_boxes(everywhere, halves, rank).sends
        assert [peer for peer, boxes in enumerate(ways) if boxes] == [rank]
    assert route_boxes(halves, everywhere, 2).receives == ((), (right,), (left,), ())
    assert route_boxes(halves, everywhere, 3).receives == ((), (), (left,), (right,))
    assert first_only(halves) == ((left,), (right,), (), ())
    assert first_only(((left, left), (left, right))) == ((left,), (right,))  # parts of a rank that share a tensor


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksums_do_not_depend_on_the_cut(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = _sum((tensor, Box(((0, 6), (0, 5), (0, 4)))))
    parts = [Box(((0, 3), (0, 5), (0, 4))), Box(((3, 6), (0, 2), (0, 4))), Box(((3, 6), (2, 5), (0, 4)))]
    assert _sum(*((tensor[_slices(box)], box) for box in reversed(parts))) == whole


def test_checksums_see_bits_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, box = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)), Box(((0, 40), (0, 30)))
    whole = _sum((tensor, box))
    seen = {whole}
    for change in (_flipped, _swapped_rows, _swapped_columns, lambda one: one.flip(0), torch.zeros_like):
        seen.add(_sum((change(tensor.clone()), box)))
    assert len(seen) == 6
    assert _sum((torch.tensor(-0.0), Box(()))) != _sum((torch.tensor(0.0), Box(())))
    monkeypatch.setattr("galvatron_lite.runtime.reshard.checksums.ITEMS", 7 * 30)
    assert _sum((tensor, box)) == whole


def _flipped(tensor: Tensor) -> Tensor:
    tensor.view(torch.int32)[3, 4] ^= 1
    return tensor


def _swapped_rows(tensor: Tensor) -> Tensor:
    tensor[[1, 20]] = tensor[[20, 1]]
    return tensor


def _swapped_columns(tensor: Tensor) -> Tensor:
    tensor[:, [2, 9]] = tensor[:, [9, 2]]
    return tensor


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.two.weight = self.one.weight
        self.register_buffer("seen", torch.zeros(1))
        self.rate, self.cache = 0.5, None
        self.calls: list[int] = []

    def forward(self, tensor: Tensor) -> Tensor:
        return self.two(self.one(tensor))


def test_what_the_user_changed_is_kept() -> None:
    model = SmallModel()
    gone = model.one.register_forward_hook(lambda *_: None)
    was, split = Structure(model.modules()), Structure(model.modules())
    model.one.out_features = 1
    split = Structure(model.modules())
    model.rate = 0.1
    model.two.eval()
    model.one.cache, model.one.length = torch.ones(1), 3
    gone.remove()
    model.two.register_forward_pre_hook(lambda *_: model.calls.append(2), with_kwargs=False)
    changes = split.changes()
    was.restore()
    changes.apply()
    assert model.rate == 0.1
    assert not model.two.training
    assert model.one.out_features == 2
    # a cache, and the length of what is in it
    assert not hasattr(model.one, "cache")
    assert not hasattr(model.one, "length")
    assert not model.one._forward_hooks
    assert len(model.two._forward_pre_hooks) == 1
    was.take_in(changes)
    was.restore()
    assert model.rate == 0.1
    assert len(model.two._forward_pre_hooks) == 1


def test_memory_is_given_back_and_taken_again() -> None:
    tensor = torch.ones(8)[:6]
    released = release([tensor, tensor.view(3, 2)])
    assert nbytes([tensor]) == 0
    allocate(released)
    tensor.fill_(2.0)
    assert nbytes([tensor, tensor.view(-1)]) == 32
    assert tensor.untyped_storage().tolist()[24:] == [0] * 8


def test_too_little_memory_is_refused() -> None:
    check_fits(None, 10**15)
    check_fits(100, 100)
    with pytest.raises(InputError, match=r"memory: .*for a moment"):
        check_fits(99, 100)


def test_fsdp_can_be_applied_again_to_a_restored_module() -> None:
    """Torch keeps what FSDP knows of a module by its identity, and refuses a second time otherwise."""
    from torch.distributed import _composable_state as kept

    class State(kept._State):
        pass

    model, first, second = nn.Linear(1, 1), State(), State()
    was = Structure([model])
    kept._insert_module_state(model, first)
    split = Structure([model])
    was.restore()
    assert kept._get_module_state(model) is None
    kept._insert_module_state(model, second)
    split.restore()
    assert kept._get_module_state(model) is first
    unused: Any = second
    assert unused is not first
