"""Carrying all tensors from one plan's ranks to the other's, checked, and back if need be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch

from galvatron_lite.errors import SwitchError
from galvatron_lite.runtime.switch.agree import gathered, together
from galvatron_lite.runtime.switch.cargo import MESSAGE_BYTES, Hold, MovedTensor, message_bytes, move, turns
from galvatron_lite.runtime.switch.memory import check_fits
from galvatron_lite.runtime.switch.routes import covers, first_only
from galvatron_lite.runtime.switch.storages import Sized, allocate, nbytes, release
from galvatron_lite.runtime.switch.verify import agree, differing, sums_after, sums_before

MEMORY, ALLOCATE, VERIFY = "carry: memory", "carry: allocate", "carry: verify"
SHARE = 4
"""Of the free memory, the part that a turn's tensors take: they are there in messages, too, sent and received."""


@dataclass(slots=True)
class Carrying:
    """Tensors that change hands."""

    items: Sequence[MovedTensor]  # all of them, alike on every rank
    before: Hold  # this rank's tensors under the plan that is left
    after: Hold  # those under the other
    blank: dict[str, Sized]  # memory of the latter that is to be taken first, by name
    lasting: Collection[str]  # names of tensors that are not given up (buffers)
    device: torch.device  # of this rank
    observe: Callable[[str], None]  # told of phases
    moved: int = 0  # bytes this rank sent to others
    worst: int = 0  # bytes of tensors and messages at the worst moment (computed from their sizes)
    by_turns: bool = False  # whether old tensors are given up as new ones arrive, because both do not fit
    given: list[tuple[list[MovedTensor], Sized]] = field(default_factory=list)  # what was given up so far, turn by turn

    def run(self, free: int | None) -> None:
        """Carry everything; all ranks call it.

        Args:
            free: bytes that this rank may still take; None: any.

        Raises:
            InputError: not enough memory, even by turns.
            SwitchError: a rank failed, or something arrived that is not what left.
        """
        self._check_whole()
        sums = sums_before(self.items, self.before, self.device)
        # copies that differ (of running statistics, or by kernels that are not deterministic) become the first one's
        items = [_settled(one, sums[one.name]) for one in self.items]
        loads = self._loads(items, free)
        if not self.by_turns:
            self._take(items)
        for load in loads:
            if self.by_turns:
                self._take(load)
            self.worst = max(self.worst, self._held() + message_bytes(load))
            self.moved += move(load, self.before, self.after, self.device)
            if self.by_turns:
                self._verify(load, sums)
                self.given.append((load, self._release(load)))
        if not self.by_turns:
            self._verify(items, sums)

    def undo(self) -> None:
        """Bring back what was given up; all ranks call it."""
        for load, sized in reversed(self.given):
            allocate(sized)
            originals = {one.name: one for one in self.items}
            move([originals[one.name].back() for one in load], self.after, self.before, self.device)
        self.given = []

    def give_up(self) -> None:
        """Give up what is left of the old tensors."""
        self._release(self.items)

    def _check_whole(self) -> None:
        for item in self.items:
            if not covers(item.before, item.shape):
                raise SwitchError("carry", 0, f"the ranks do not hold all of {item.name}")

    def _loads(self, items: Sequence[MovedTensor], free: int | None) -> list[list[MovedTensor]]:
        """What travels together: all at once if every rank has the memory, else smaller loads by turns."""
        loads = list(turns(items))
        spare = gathered(MEMORY, self.device, lambda: None if free is None else (free, free - self._at_once(loads)))
        self.by_turns = any(one is not None and one[1] < 0 for one in spare)
        if not self.by_turns:
            return loads
        loads = list(turns(items, min(MESSAGE_BYTES, *(one[0] // SHARE for one in spare if one is not None))))
        together(MEMORY, self.device, lambda: check_fits(free, self._in_turns(loads)))
        return loads

    def _at_once(self, loads: Sequence[Sequence[MovedTensor]]) -> int:
        """Bytes that carrying takes more where nothing is given up before all has arrived."""
        return self._blank_bytes(self.blank) + max((message_bytes(load) for load in loads), default=0)

    def _in_turns(self, loads: Sequence[Sequence[MovedTensor]]) -> int:
        """The same where each turn's old tensors are given up after it."""
        now = peak = 0
        for load in loads:
            names = [one.name for one in load]
            now += self._blank_bytes(names)
            peak = max(peak, now + message_bytes(load))
            now -= nbytes(self.before.tensors(name for name in names if name not in self.lasting))
        return peak

    def _blank_bytes(self, names: Collection[str]) -> int:
        return sum(size for name in names for _, size in self.blank.get(name, ()))

    def _held(self) -> int:
        return nbytes([*self.before.tensors(self.before.parts), *self.after.tensors(self.after.parts)])

    def _take(self, items: Sequence[MovedTensor]) -> None:
        def take() -> None:
            self.observe(ALLOCATE)
            for item in items:
                allocate(self.blank.get(item.name, []))

        together(ALLOCATE, self.device, take)

    def _release(self, items: Sequence[MovedTensor]) -> Sized:
        return release(self.before.tensors(one.name for one in items if one.name not in self.lasting))

    def _verify(self, items: Sequence[MovedTensor], sums: dict[str, tuple[int, int]]) -> None:
        def add() -> list[int]:
            self.observe(VERIFY)
            return sums_after(items, self.after)

        arrived = together(VERIFY, self.device, add)
        wrong = differing(items, sums, arrived, self.device)
        if wrong:
            raise SwitchError(VERIFY, 0, f"{', '.join(wrong[:5])} arrived other than sent ({len(wrong)} tensors)")


def _settled(item: MovedTensor, sums: tuple[int, int]) -> MovedTensor:
    """The item; the first rank's copies alone where copies are not equal."""
    return item if agree(item, sums) else replace(item, before=first_only(item.before))
