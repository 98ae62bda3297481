"""What keeps a plan from being faster: memory, links, the batch, stages that are not even; the dearest first. No torch.

What is told in seconds was found by planning anew (``price``, ``what_ifs``); where nothing was planned anew, the line
says what is known without: what lies exposed, which is the most that could be had, and which neighbours would be
quicker and do not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from galvatron_lite.explainer.priced import Priced
from galvatron_lite.explainer.schema import (
    Bound,
    Constraint,
    MemoryPrice,
    Neighbour,
    RunChoice,
    StageMemory,
    TimeAccount,
    TimeClass,
    WhatIf,
)
from galvatron_lite.explainer.time import BUBBLE
from galvatron_lite.search.result import summary
from galvatron_lite.units import format_budget, format_bytes, format_seconds

WORTH = 0.01
"""Share of a step that a constraint must cost to be called one."""


def bounds(
    priced: Priced,
    time: TimeAccount,
    runs: Sequence[RunChoice],
    memory: Sequence[StageMemory],
    price: MemoryPrice | None,
    what_ifs: Sequence[WhatIf],
) -> tuple[Bound, ...]:
    """Every constraint that is known of, those that bind first, the dearest of them first."""
    found = [
        _memory(memory, price, runs),
        *_links(time, what_ifs, summary(priced.plan)),
        *_batch(time, what_ifs),
        *_balance(priced),
    ]
    if not any(bound.binds for bound in found):
        found.append(_compute(time, price, what_ifs))
    return tuple(sorted(found, key=lambda bound: (not bound.binds, -(bound.seconds or 0.0))))


def _compute(time: TimeAccount, price: MemoryPrice | None, what_ifs: Sequence[WhatIf]) -> Bound:
    """What is left where nothing else binds; not known to bind where something else was not tried."""
    share = f"compute: {time.seconds_of(TimeClass.COMPUTE) / time.step_seconds:.0%} of the step"
    names = [one.change for one in what_ifs if one.gain is None and _asked_of(one)]
    open_ones = ["more memory"] * (price is None) + (names if what_ifs else ["quicker links", "a larger batch"])
    if not open_ones:
        return Bound(Constraint.COMPUTE, f"{share}, and nothing above binds", None, True)
    return Bound(
        Constraint.COMPUTE, f"{share}; whether anything binds is not known: {_not_tried(open_ones)}", None, False
    )


def _asked_of(one: WhatIf) -> bool:
    """Whether a constraint is told by it."""
    return one.name.startswith("links_") or one.name == "batch_twice"


def fullest(memory: Sequence[StageMemory], price: MemoryPrice | None = None) -> StageMemory:
    """The group whose memory binds: of those that a quicker plan needs more in, else of all, that which is fullest."""
    wanted = [own for own in memory if price is not None and own.group in price.wanted_groups]
    return max(wanted or memory, key=lambda own: own.used_bytes / max(own.budget_bytes, 1))


def _memory(memory: Sequence[StageMemory], price: MemoryPrice | None, runs: Sequence[RunChoice]) -> Bound:
    full = fullest(memory, price)
    where = f"stage {', '.join(map(str, full.stages))}" if len(memory) > 1 else "every device"
    when = f", at its worst in {full.moment}" if full.moment else ""
    told = f"memory of {where}: {format_bytes(full.used_bytes)} of {format_bytes(full.budget_bytes)}{when}"
    if price is None:
        quicker = _quicker(runs)
        worth = "" if quicker is None else f"; {quicker.strategy} would be quicker there and does not fit"
        return Bound(Constraint.MEMORY, told + worth, None, quicker is not None)
    saved = price.step_seconds - price.then_step_seconds
    among = " with this pipeline and these micro-batches" if price.same_shape else ""
    worth = f"; {format_budget(price.added_bytes)} more on every device saves {format_seconds(saved)} a step{among}"
    if saved <= 0:
        worth = f"; {format_budget(price.added_bytes)} more on every device saves nothing{among}"
    return Bound(Constraint.MEMORY, told + worth, saved, saved > 0)


def _quicker(runs: Sequence[RunChoice]) -> Neighbour | None:
    """The quickest neighbour that is quicker than what was chosen, and does not fit."""
    every = [one for run in runs for one in run.neighbours if one.added_step_seconds < 0 and not one.fits]
    return min(every, key=lambda one: one.added_step_seconds, default=None)


def _not_tried(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'were' if len(names) > 1 else 'was'} not tried"


def _links(time: TimeAccount, what_ifs: Sequence[WhatIf], now: str) -> Iterator[Bound]:
    """``now``: the plan in words."""
    parts = [part for part in time.parts if part.what is TimeClass.COMMUNICATION]
    exposed = sum(part.seconds for part in parts)
    kinds = ", ".join(f"{part.name} {format_seconds(part.seconds)}" for part in parts if part.seconds > 0)
    told = f"communication that is not hidden: {format_seconds(exposed)} of the step" + (f" ({kinds})" if kinds else "")
    asked = [one for one in what_ifs if one.name.startswith("links_")]
    tried = [one for one in asked if one.gain is not None]
    if not tried:
        yield _at_most(Constraint.LINK, told, exposed, time, [one.change for one in asked])
    for place, one in enumerate(tried):
        seconds = _saved(time, one)
        text = f"{one.change}: {_gained(seconds, one, now)}"
        binds = seconds > WORTH * time.step_seconds
        yield Bound(Constraint.LINK, f"{told}; {text}" if place == 0 else text, seconds, binds)


def _batch(time: TimeAccount, what_ifs: Sequence[WhatIf]) -> Iterator[Bound]:
    bubble = sum(part.seconds for part in time.parts if part.name == BUBBLE)
    waits = f"waiting for other stages takes {format_seconds(bubble)} of the step" if bubble else ""
    asked = [one for one in what_ifs if one.name == "batch_twice"]
    for one in asked:
        if one.gain is not None:
            seconds = _saved(time, one)
            text = "; ".join(filter(None, (f"the batch: {one.change} gives {one.gain:+.1%} samples/s", waits)))
            yield Bound(Constraint.BATCH, text, seconds, seconds > WORTH * time.step_seconds)
            return
    if waits:
        yield _at_most(Constraint.BATCH, f"the batch: {waits}", bubble, time, [one.change for one in asked])


def _at_most(what: Constraint, told: str, seconds: float, time: TimeAccount, asked: Sequence[str]) -> Bound:
    """A constraint of which only what it costs at most is known, as nothing was planned anew without it."""
    binds = seconds > WORTH * time.step_seconds
    tried = f"; {_not_tried(asked)}" if asked else ""
    return Bound(what, f"{told}{', the most that could be saved' if binds else ''}{tried}", seconds, binds)


def _saved(time: TimeAccount, one: WhatIf) -> float:
    """Seconds of a step of the same samples."""
    return time.step_seconds * (1.0 - 1.0 / (1.0 + one.gain)) if one.gain is not None else 0.0


def _gained(seconds: float, one: WhatIf, now: str) -> str:
    if seconds <= 0:
        return "saves nothing"
    other = ", by going over to another plan" if one.summary != now else ""
    return f"saves {format_seconds(seconds)} a step ({one.gain:+.1%} samples/s){other}"


def _balance(priced: Priced) -> Iterator[Bound]:
    """How much longer the busiest group works than all do on average: layers are whole, and stages are of them."""
    if priced.shape.stages == 1:
        return
    work = [
        priced.shape.microbatches * sum(cost.times.total for cost in own) + sum(cost.step for cost in own)
        for own in priced.groups
    ]
    longer = max(work) - sum(work) / len(work)
    text = (
        f"layers do not divide evenly: the devices of stage {', '.join(map(str, priced.stages_of(priced.busiest)))} "
        f"work {format_seconds(longer)} a step longer than those of all stages on average"
    )
    yield Bound(Constraint.BALANCE, text, longer, longer > WORTH * priced.prediction.step_seconds)
