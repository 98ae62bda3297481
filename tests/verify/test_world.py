from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from galvatron_lite.errors import LaunchError
from galvatron_lite.parallelism.process_groups import all_gather, reduce_scatter
from galvatron_lite.verify.dry.world import MessageLog, UnheardError, dry_world
from galvatron_lite.verify.schema import NOBODY, MessageType


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
    second = MessageLog(hear=lambda source, purpose, place, number: first.said[purpose, place][number])
    with dry_world(1, 2, second):
        found = torch.zeros(2, dtype=torch.int64)
        dist.recv(found, 0)
    assert found.tolist() == [7, 9]


def test_what_nobody_announced_is_asked_for() -> None:
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
