"""Messages matched, and worlds of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from galvatron_lite.errors import LaunchError
from galvatron_lite.parallelism.process_groups import all_gather, reduce_scatter
from galvatron_lite.verify.dry.world import MessageLog, UnheardError, dry_world
from galvatron_lite.verify.match.meeting import FIT, PROGRESS, match
from galvatron_lite.verify.schema import NOBODY, Check, Message, MessageType, RoleRun, Verdict
from tests.verify.worlds import World, goes_well, message, plan_of, run_of

Own = list[Message]


def drop(own: Own, at: int, _: random.Random, __: int) -> Own:
    return own[:at] + own[at + 1 :]


def swap(own: Own, at: int, _: random.Random, __: int) -> Own:
    other = (at + 1) % len(own)
    own[at], own[other] = own[other], own[at]
    return own


def other_shape(own: Own, at: int, _: random.Random, __: int) -> Own:
    own[at] = replace(own[at], shape=(own[at].shape[0] + 1,), sent=tuple(one + 1 for one in own[at].sent))
    return own


def other_dtype(own: Own, at: int, _: random.Random, __: int) -> Own:
    own[at] = replace(own[at], dtype="bfloat16")
    return own


def other_kind(own: Own, at: int, draw: random.Random, __: int) -> Own:
    own[at] = replace(own[at], kind=draw.choice((MessageType.ALL_REDUCE, MessageType.ALL_GATHER)), peer=NOBODY)
    return own


def other_group(own: Own, at: int, draw: random.Random, size: int) -> Own:
    group = draw.choice([own[at].ranks, (0, 1), tuple(range(size))])
    common = set.intersection(*(set(one.ranks) for one in own))
    if own[at].peer in (*group, NOBODY) and not own[at].sent and common <= set(group):
        own[at] = replace(own[at], ranks=group)
    return own


def other_peer(own: Own, at: int, draw: random.Random, __: int) -> Own:
    common = set.intersection(*(set(one.ranks) for one in own))
    others = [rank for rank in own[at].ranks if rank not in common]
    if own[at].peer != NOBODY and others:
        own[at] = replace(own[at], peer=draw.choice(others))
    return own


FAULTS: list[Callable[[Own, int, random.Random, int], Own]] = [
    drop, swap, other_shape, other_dtype, other_kind, other_group, other_peer,
]  # fmt: skip


def passed(checks: list[Check]) -> bool:
    return all(check.verdict is Verdict.PASSED for check in checks)


def made(seed: int) -> World:
    draw = random.Random(seed)
    world = World(draw.randint(2, 5), draw)
    world.add(draw.randint(1, 9))
    return world


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6))
@example(seed=20000)
def test_correct_worlds_pass(seed: int) -> None:
    world = made(seed)
    assert goes_well(world.runs)
    checks = match(world.runs, plan_of(world.size))
    assert passed(checks), checks


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 10**6), fault=st.sampled_from(FAULTS))
def test_faults_are_judged_as_by_a_plain_simulator(
    seed: int, fault: Callable[[Own, int, random.Random, int], Own]
) -> None:
    world = made(seed)
    rank = world.draw.choice([rank for rank, own in enumerate(world.lists) if own])
    at = world.draw.randrange(len(world.lists[rank]))
    world.lists[rank] = fault(list(world.lists[rank]), at, world.draw, world.size)
    well = goes_well(world.runs)
    checks = match(world.runs, plan_of(world.size))
    assert passed(checks) == well, checks
    if fault in (drop, other_dtype):
        assert not well


def verdict(runs: list[RoleRun], devices: int, name: str) -> Check:
    return next(check for check in match(runs, plan_of(devices)) if check.name == name)


def test_a_deadlock_is_printed() -> None:
    """Three ranks that each receive before they send."""
    ranks = (0, 1, 2)
    runs = [
        run_of(rank, [message(MessageType.RECEIVE, ranks, (rank - 1) % 3, waited=1),
                      message(MessageType.SEND, ranks, (rank + 1) % 3, waited=2)], 3)
        for rank in ranks
    ]  # fmt: skip
    check = verdict(runs, 3, PROGRESS)
    assert check.verdict is Verdict.FAILED
    assert check.said == "Ranks wait for one another for ever: 0 → 2 → 1 → 0."
    assert check.details[0] == (
        "rank 0 (stage 0, forward): receive of (4,) float32 from rank 2 (made up), waits for rank 2"
    )


def test_a_missing_collective_is_named() -> None:
    """The rank that left one out, its layer, and what the others give there."""
    layers = [replace(message(MessageType.ALL_REDUCE, (0, 1, 2)), layer=f"h.{n}", waited=n + 1) for n in range(5)]
    short = [replace(one, waited=n + 1) for n, one in enumerate(layers[:1] + layers[2:])]
    runs = [run_of(0, layers, 3), run_of(1, short, 3), run_of(2, layers, 3)]
    check = verdict(runs, 3, FIT)
    assert check.verdict is Verdict.FAILED
    assert "rank 1" in check.said
    assert "h.1" in check.details[0]


def test_a_rank_that_ends_early_and_what_is_never_received() -> None:
    both = [message(MessageType.ALL_REDUCE, (0, 1), waited=1), message(MessageType.ALL_REDUCE, (0, 1), waited=2)]
    check = verdict([run_of(0, both, 2), run_of(1, both[:1], 2)], 2, PROGRESS)
    assert check.said == "Rank 0 waits for ever: rank 1 ends without it."
    sends = [both[0], message(MessageType.SEND, (0, 1), 1)]
    check = verdict([run_of(0, sends, 2), run_of(1, both[:1], 2)], 2, PROGRESS)
    assert check.said == "Rank 0 has a send left at the end of the step: rank 1 never receives it."


def test_a_group_of_other_ranks_is_named() -> None:
    runs = [run_of(rank, [message(MessageType.ALL_REDUCE, ranks, waited=1)], 4)
            for rank, ranks in enumerate([(0, 1), (1, 3), (2, 3), (2, 3)])]  # fmt: skip
    check = verdict(runs, 4, FIT)
    assert check.said == "Rank 0 uses the group of ranks 0, 1 (made up), which rank 1 does not use."
    assert check.details[1] == "rank 1's groups for made up: ranks 1, 3"


def grid(data: int, tensor: int, stages: int, layers: int) -> list[RoleRun]:
    """One role a stage, on a grid of ranks: sums over tensor ranks in each layer, then over data ranks; the tensor
    ranks pass something round, and the stages hand on to the next."""
    width = data * tensor
    runs = []
    for stage in range(stages):
        first = stage * width
        near = tuple(range(first, first + tensor))
        far = tuple(range(first, first + width, tensor))
        chain = tuple(range(0, stages * width, width))
        own: list[Message] = []

        def add(one: Message, wait: int = 1, own: list[Message] = own) -> None:
            own.append(replace(one, waited=len(own) + wait))

        if stage:
            add(replace(message(MessageType.RECEIVE, chain, chain[stage - 1]), purpose="pipeline"))
        for _ in range(layers):
            add(replace(message(MessageType.ALL_REDUCE, near), purpose="activations"))
            add(message(MessageType.SEND, near, near[1]), 2)
            add(message(MessageType.RECEIVE, near, near[-1]))
        if stage < stages - 1:
            add(replace(message(MessageType.SEND, chain, chain[stage + 1]), purpose="pipeline"))
        add(replace(message(MessageType.ALL_REDUCE, far), purpose="gradients"))
        runs.append(run_of(first, own, width, range(first, first + width)))
    return runs


def test_roles_stand_for_all_their_ranks() -> None:
    """512 ranks in 4 stages from 4 runs pass; a stage that leaves one sum out does not, told with its partners."""
    runs = grid(data=16, tensor=8, stages=4, layers=12)
    assert passed(match(runs, plan_of(512, 4)))
    bad = replace(runs[3], ranks=runs[3].ranks[1:])
    left = [one for one in runs[3].messages if one.number != 1]
    early = [replace(one, waited=one.waited - 1) for one in left]
    odd = run_of(384, early, 128)
    checks = match([*runs[:3], replace(bad, rank=384), odd], plan_of(512, 4))
    assert [check.verdict for check in checks] == [Verdict.PASSED, Verdict.FAILED]
    assert "384" in checks[1].said


def test_ranks_that_were_not_run_are_reported() -> None:
    checks = match(grid(2, 2, 2, 1)[:1], plan_of(8, 2))
    assert {check.verdict for check in checks} == {Verdict.SKIPPED}
    assert "ranks 4, 5, 6, 7" in checks[0].said


def test_a_rank_of_a_large_world_is_alone_and_knows_its_place() -> None:
    with dry_world(5, 64, MessageLog()):
        assert (dist.get_rank(), dist.get_world_size()) == (5, 64)
        own, other = dist.new_group([1, 5, 9]), dist.new_group([1, 2])
        assert dist.get_rank(own) == 1
        assert other is dist.GroupMember.NON_GROUP_MEMBER
    assert not dist.is_initialized()


def test_messages_say_what_is_given_to_whom() -> None:
    log = MessageLog()
    with dry_world(5, 64, log):
        group = dist.new_group([1, 5, 9], group_desc="states")
        part = torch.zeros(4, 2)
        work = dist.all_reduce(part, group=group, async_op=True)
        dist.broadcast(part, src=5, group=group)
        dist.all_to_all_single(torch.zeros(5), torch.zeros(6), [1, 2, 2], [3, 1, 2], group=group)
        dist.send(part, 9, group=group)
        work.wait()
        dist.barrier(group=group)
    kinds = [one.kind for one in log.messages]
    assert kinds == [
        MessageType.ALL_REDUCE,
        MessageType.BROADCAST,
        MessageType.ALL_TO_ALL,
        MessageType.SEND,
        MessageType.BARRIER,
    ]
    first, told, moved, sent, _ = log.messages
    assert (first.ranks, first.purpose, first.shape, first.dtype, first.bytes) == (
        (1, 5, 9), "states", (4, 2), "float32", 32
    )  # fmt: skip
    assert (first.operator, first.waited, told.peer, sent.peer) == ("sum", 4, 5, 9)
    assert (moved.sent, moved.taken, moved.bytes) == ((3, 1, 2), (1, 2, 2), 24)


def test_equal_parts_are_gathered_and_scattered() -> None:
    log = MessageLog()
    with dry_world(0, 4, log):
        all_gather(torch.zeros(8), torch.zeros(2), None)
        reduce_scatter(torch.zeros(2), torch.zeros(8), None)
    assert [(one.kind, one.bytes) for one in log.messages] == [
        (MessageType.ALL_GATHER, 8),
        (MessageType.REDUCE_SCATTER, 32),
    ]
    assert all(one.waited != NOBODY for one in log.messages)


def test_objects_come_back_as_they_were_given() -> None:
    with dry_world(3, 8, MessageLog()):
        box, everyone = [{"seed": 7}], [None] * 8
        dist.broadcast_object_list(box, src=3)
        dist.all_gather_object(everyone, "mine")
    assert box == [{"seed": 7}]
    assert everyone == ["mine"] * 8


def test_what_a_rank_announces_arrives_where_it_is_run_next() -> None:
    first = MessageLog()
    with dry_world(0, 2, first):
        dist.send(torch.tensor([7, 9]), 1)
    second = MessageLog(hear=lambda source, purpose, place, number: first.announced[purpose, place][number])
    with dry_world(1, 2, second):
        found = torch.zeros(2, dtype=torch.int64)
        dist.recv(found, 0)
    assert found.tolist() == [7, 9]


def test_missing_announcements_are_requested() -> None:
    with dry_world(1, 2, MessageLog()), pytest.raises(UnheardError, match="Rank 0 must be run before"):
        dist.recv(torch.zeros(1, dtype=torch.int64), 0)


def test_a_world_that_runs_is_left_alone() -> None:
    with (
        dry_world(0, 2, MessageLog()),
        pytest.raises(LaunchError, match="process of their own"),
        dry_world(0, 2, MessageLog()),
    ):
        pass


def test_the_next_world_has_meshes_of_its_own() -> None:
    """DTensor remembers what operations return, with the mesh; this rank's place must not be the last world's."""
    for rank in (0, 1):
        with dry_world(rank, 2, MessageLog()):
            mesh = init_device_mesh("cpu", (2,))
            part = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False)
            assert part.detach().device_mesh.get_coordinate() == (rank,)
