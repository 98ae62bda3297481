from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import gcd

import pytest

from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.verify.dry.repeat import UnlikeError, lengthened, shortened
from galvatron_lite.verify.dry.roles import _run_roles, roles_of, run_roles
from galvatron_lite.verify.dry.step import dry_run, subject_of
from galvatron_lite.verify.dry.world import Announced
from galvatron_lite.verify.match.places import moved_group
from galvatron_lite.verify.schema import NOBODY, During, Message, MessageType, RoleRun
from tests.equivalence.plans import write_plan
from tests.verify.worlds import NAMES, batch, in_stages, model


def test_ranks_that_do_the_same_share_a_role() -> None:
    strategies = dict.fromkeys(NAMES, Strategy(data=2, tensor=4))
    plan = write_plan([NAMES[:2], NAMES[2:]], strategies, devices=16, batch=8, microbatches=2)
    assert [(one.stage, one.ranks) for one in roles_of(plan)] == [(0, tuple(range(8))), (1, tuple(range(8, 16)))]
    assert [len(one.ranks) for one in roles_of(plan, even=False)] == [2] * 8


def test_ranks_whose_place_counts_have_roles_of_their_own() -> None:
    strategies = dict.fromkeys(NAMES, Strategy(data=2)) | {"blocks.1": Strategy(tensor=2)}
    plan = write_plan([NAMES], strategies, devices=2, batch=8)
    assert [one.ranks for one in roles_of(plan)] == [(0,), (1,)]


def test_places_repeat_where_layers_share_samples_unlike() -> None:
    strategies = dict.fromkeys(NAMES, Strategy(zero=16, zero_stage=3)) | {"after": Strategy(data=4, tensor=4)}
    found = roles_of(write_plan([NAMES], strategies, devices=16, batch=16))
    assert [(one.text, one.ranks) for one in found[1:2]] == [("place 1 of every 4", (1, 5, 9, 13))]
    assert len(found) == 4


EDGES = ("before", "after")
"""They share a parameter, so they are split alike."""
UNLIKE = {
    "edges": dict.fromkeys(EDGES, Strategy(data=2, tensor=4)),
    "tokens": {"blocks.1": Strategy(zero=4, zero_stage=3, context=2)}
    | dict.fromkeys(EDGES, Strategy(data=4, tensor=2)),
    "shared tokens and edges": dict.fromkeys(NAMES, Strategy(data=2, context=2, tensor=2, sequence_parallel=True))
    | dict.fromkeys(EDGES, Strategy(data=2, context=2, tensor=2)),
    "wider tensor groups": dict.fromkeys(NAMES, Strategy(data=2, context=2, tensor=2, sequence_parallel=True))
    | dict.fromkeys(EDGES, Strategy(zero=2, zero_stage=1, tensor=4)),
}


@pytest.mark.parametrize(("name", "stages"), list(zip(UNLIKE, (1, 1, 2, 1), strict=True)))
def test_every_rank_of_a_role_does_the_same(name: str, stages: int) -> None:
    """Each rank is run, and compared with the one that stands for it."""
    strategies = dict.fromkeys(NAMES, Strategy(zero=8, zero_stage=3)) | UNLIKE[name]
    plan = write_plan(in_stages(stages), strategies, devices=8 * stages, batch=8 * stages, microbatches=stages)
    subject, said = subject_of(model(), plan, batch(8 * stages)), dict[int, Announced]()
    runs = {}
    for rank in range(plan.devices):
        own: Announced = {}
        runs[rank], _ = dry_run(subject, plan, rank, lambda *at: said[at[0]][at[1], at[2]][at[3]], own)
        said[rank] = own
    roles = roles_of(plan, chained=True)
    assert len(roles) < plan.devices
    for role in roles:
        known = runs[role.rank]
        for rank in role.ranks[1:]:
            other = runs[rank]
            assert (other.peak, other.kept) == (known.peak, known.kept)
            inner = gcd(*(one.strategy.tensor for one in plan.stages[role.stage].runs))
            expected = [_shown(one, role.rank, rank, inner) for one in known.messages]
            assert [_shown(one, rank, rank, inner) for one in other.messages] == expected


def _shown(one: Message, rank: int, target: int, inner: int) -> tuple[object, ...]:
    """What a message of one rank is to another; parts by how many tensor groups, and places in one, further on."""

    def further(other: int) -> tuple[int, int]:
        return (other // inner - rank // inner) % (8 // inner), (other - rank) % inner

    parts = [
        sorted((further(other), part) for other, part in zip(one.ranks, own, strict=False))
        for own in (one.sent, one.taken)
    ]
    group = moved_group(one.ranks, rank, target, 8)
    given = 0 if one.kind is MessageType.BROADCAST else one.bytes  # its root alone gives any
    return one.kind, group, one.purpose, one.tag, one.shape, one.dtype, given, one.phase, one.layer, *parts


def test_where_shards_are_not_all_alike_each_rank_is_run() -> None:
    """A vocabulary of 66 rows has shards of 17 and of 15."""
    strategies = dict.fromkeys(NAMES, Strategy(zero=4, zero_stage=3)) | {"blocks.0": Strategy(data=2, tensor=2)}
    plan = write_plan([NAMES], strategies, devices=4, batch=8)
    assert len(run_roles(subject_of(model(66), plan, batch()), plan)) == 4
    assert len(run_roles(subject_of(model(), plan, batch()), plan)) == 2


def test_interleaved_stages_exchange_messages() -> None:
    strategies = dict.fromkeys(NAMES, Strategy())
    plan = write_plan(
        in_stages(4), strategies, devices=2, batch=8, microbatches=2, schedule=Schedule.INTERLEAVED, virtual=2
    )  # fmt: skip
    told: list[int] = []
    runs = run_roles(subject_of(model(), plan, batch()), plan, lambda done, *_: told.append(done))
    assert [run.rank for run in runs] == [0, 1]
    assert told == [1, 2]
    for source, target in ((0, 1), (1, 0)):
        sent = [one.shape for one in runs[source].messages if one.kind is MessageType.SEND and one.peer == target]
        got = [one.shape for one in runs[target].messages if one.kind is MessageType.RECEIVE and one.peer == source]
        assert sent == got
        assert sent


@pytest.mark.parametrize(
    ("stages", "strategy"),
    [(1, Strategy(zero=2, zero_stage=3)), (4, Strategy())],
    ids=str,
)
def test_micro_batches_that_repeat_are_not_run_and_nothing_is_missed(stages: int, strategy: Strategy) -> None:
    strategies = dict.fromkeys(NAMES, strategy)
    plan = write_plan(in_stages(stages), strategies, devices=strategy.devices * stages, batch=26, microbatches=13)
    short, tokens = shortened(plan), batch(26)
    subjects = [(one, subject_of(model(), one, tokens)) for one in (plan, short)]
    said: dict[tuple[int, int], Announced] = {}

    def run_whole(number: int, rank: int) -> RoleRun:
        one, subject = subjects[number]
        run, said[number, rank] = dry_run(subject, one, rank, lambda *at: said[number, at[0]][at[1], at[2]][at[3]])
        return run

    for run in run_roles(subjects[0][1], plan):
        long, brief = run_whole(0, run.rank), run_whole(1, run.rank)
        assert any(f"{stages + (2 if stages > 1 else 3)} of 13 micro-batches" in note for note in run.notes)
        assert tuple(replace(one, times=1) for one in run.messages) == brief.messages
        assert counted(run) == counted(long)
        assert (run.peak, run.kept, run.splits) == (long.peak, long.kept, long.splits)


@pytest.mark.parametrize(
    ("schedule", "virtual", "run"),
    [(Schedule.ZERO_BUBBLE_1P, 1, 6), (Schedule.ZERO_BUBBLE_V, 2, 6), (Schedule.INTERLEAVED, 2, 6)],
    ids=str,
)
def test_one_micro_batch_stands_for_others_where_the_order_does_not_repeat(
    schedule: Schedule, virtual: int, run: int
) -> None:
    strategies = dict.fromkeys(NAMES, Strategy(data=2))
    plan = write_plan(
        in_stages(2 * virtual), strategies, devices=4, batch=28, microbatches=14, schedule=schedule, virtual=virtual
    )
    subject = subject_of(model(), plan, batch(28))
    every = {one.rank: one for one in _run_roles(subject, plan, roles_of(plan), lambda *_: None, brief=False)}
    for brief in run_roles(subject, plan):
        whole = every[brief.rank]
        assert any(f"{run} of 14 micro-batches" in note for note in brief.notes)
        assert counted(brief) == counted(whole)
        assert (brief.peak, brief.kept, brief.splits) == (whole.peak, whole.kept, whole.splits)


def counted(run: RoleRun) -> dict[object, int]:
    """How many messages of each sort there are in a step."""
    found = Counter[object]()
    for one in run.messages:
        # which pass a message arrives in depends on the order of passes
        phase = "" if one.kind is MessageType.RECEIVE else one.phase
        found[one.kind, one.ranks, one.purpose, one.shape, phase, one.layer, one.peer] += one.times
    return found


def test_what_holds_more_with_more_micro_batches_is_run_whole() -> None:
    strategies = dict.fromkeys(NAMES, Strategy())
    plan = write_plan([NAMES[:2], NAMES[2:]], strategies, devices=2, batch=20, microbatches=10)
    assert shortened(plan).microbatches == 4
    assert shortened(replace(plan, schedule=Schedule.GPIPE)).microbatches == 10
    alike = [
        Message(n, MessageType.BARRIER, (0,), "", NOBODY, 0, (), "", 0, During.FORWARD, n // 10) for n in range(60)
    ]
    assert [sum(one.times for one in lengthened(alike[: 10 * n], n, 10)) for n in (5, 6)] == [100, 100]
    alike[30] = replace(alike[30], shape=(3,))
    with pytest.raises(UnlikeError, match="unlike"):
        lengthened(alike, 6, 10)
