"""What would make a plan fit where none does: a pin to lift, a dimension to allow again, another backend, more devices.

Tried by quick searches, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.backends import ANY, backend_named
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Mode
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.best_first import ANY_TIME, plain, search
from galvatron_lite.search.pin_names import typed_name
from galvatron_lite.search.result import summary
from galvatron_lite.search.session import Session
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import Fixed

_EFFORT = 2_000_000
"""Labels after which a search gives up."""


def relief(request: Request, session: Session, backend: str) -> str:
    """Sentences on what alone makes a plan fit, each with such a plan; empty where nothing of it does.

    Args:
        request: that no plan fits.
        session: of the profile.
        backend: that the request is for.
    """
    found = []
    for said, asked in _wider(request, session, backend):
        plan = _fitting(asked, session.pricer)
        if plan:
            found.append(f"It fits {said}: {plan}.")
    for more in _larger(request, session):
        asked, own = _on(request, more, backend, session.mode)
        plan = _fitting(asked, own.pricer)
        if plan:
            found.append(f"It fits on {asked.devices} devices: {plan}.")
            break
    return " ".join(found)


def _larger(request: Request, session: Session) -> Iterator[Profile]:
    """The profile on a cluster of half as many nodes more, of twice and of four times as many."""
    profile, cluster = session.profile, session.profile.cluster
    outer = cluster.levels[-1]
    if not cluster.alike or len(cluster.levels) < 2 or request.devices < cluster.devices:
        return
    for size in (*([outer.size * 3 // 2] * (outer.size % 2 == 0)), 2 * outer.size, 4 * outer.size):
        group = replace(cluster.groups[0], count=cluster.devices // outer.size * size)
        levels = (*cluster.levels[:-1], replace(outer, size=size))
        yield profile.on(replace(cluster, levels=levels, groups=(group,)))


def _on(request: Request, profile: Profile, backend: str, mode: Mode) -> tuple[Request, Session]:
    session = Session(profile, mode)
    space, known = session.space(backend_named(backend))
    return replace(request, devices=profile.cluster.devices, space=space, known=known), session


def _wider(request: Request, session: Session, backend: str) -> Iterator[tuple[str, Request]]:
    for said, fixed in _lifted(request.fixed):
        yield said, replace(request, fixed=fixed)
    if backend != ANY.name:
        space, known = session.space(ANY)
        yield f"with --backend {ANY.name}", replace(request, schedules=ANY.schedules, space=space, known=known)


def _lifted(fixed: Fixed) -> Iterator[tuple[str, Fixed]]:
    """The pins with one of them lifted at a time."""
    pinned = (
        ("pp", fixed.pipeline, replace(fixed, pipeline=None)),
        ("microbatches", fixed.microbatches, replace(fixed, microbatches=None)),
        ("virtual", fixed.virtual, replace(fixed, virtual=None)),
        ("schedule", fixed.schedule, replace(fixed, schedule=None)),
    )
    for name, value, without in pinned:
        if value is not None:
            yield f"without --fix {name}", without
    for pin in fixed.strategy:
        yield (
            f"without --fix {typed_name(pin[0])}",
            replace(fixed, strategy=tuple(own for own in fixed.strategy if own != pin)),
        )
    for own in fixed.layers:
        layers, name, pinned_value = own
        plain = getattr(Strategy(), name)
        if pinned_value != plain:
            rest = tuple((layers, name, plain) if other == own else other for other in fixed.layers)
            said = getattr(plain, "value", plain)
            yield f"with --fix {layers}.{typed_name(name)}={said}", replace(fixed, layers=rest)
    for dimension in fixed.forbidden:
        rest_of = tuple(other for other in fixed.forbidden if other != dimension)
        yield f"without --forbid {dimension}", replace(fixed, forbidden=rest_of)


def _fitting(request: Request, pricer: LayerPricer) -> str:
    """A plan in a line, the first that a search meets; empty where none is met."""
    try:
        found = search(request, pricer, slack=1.0, effort=_EFFORT, below=ANY_TIME)
    except InputError:
        return ""
    return "" if found is None else summary(plain(request, found))
