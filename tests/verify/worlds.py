"""A tiny model to run dry; made-up runs of small worlds, and a plain simulator of them that shares nothing with what it
checks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from galvatron_lite.model.zoo.gpt import GPT, GPTConfig, random_tokens
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import MemoryBreakdown, Plan, Schedule
from galvatron_lite.verify.schema import NOBODY, During, Message, MessageType, RoleRun
from tests.equivalence.plans import write_plan

CONFIG = GPTConfig(vocab=64, layers=2, hidden=32, heads=4, sequence=16)
NAMES = ["before", "blocks.0", "blocks.1", "after"]


@cache
def model(vocab: int = CONFIG.vocab) -> GPT:
    with torch.device("meta"):
        return GPT(replace(CONFIG, vocab=vocab))


def batch(samples: int = 8) -> dict[str, torch.Tensor]:
    return random_tokens(samples, CONFIG.sequence, CONFIG.vocab)


def in_stages(count: int) -> list[list[str]]:
    """The model's layers in so many stages of equal length."""
    size = len(NAMES) // count
    return [NAMES[start : start + size] for start in range(0, len(NAMES), size)]


COLLECTIVES = (
    MessageType.ALL_REDUCE,
    MessageType.ALL_GATHER,
    MessageType.REDUCE_SCATTER,
    MessageType.ALL_TO_ALL,
    MessageType.BROADCAST,
    MessageType.BARRIER,
)


def plan_of(devices: int, stages: int = 1) -> Plan:
    names = [[f"layer{stage}"] for stage in range(stages)]
    strategies = {name: Strategy(data=devices // stages) for own in names for name in own}
    return write_plan(names, strategies, devices=devices, batch=devices, schedule=Schedule.ONE_F_ONE_B)


def run_of(rank: int, messages: Sequence[Message], width: int = 1, ranks: Iterable[int] | None = None) -> RoleRun:
    numbered = tuple(replace(one, number=number) for number, one in enumerate(messages))
    played = (rank,) if ranks is None else tuple(ranks)
    return RoleRun(rank, rank // width, f"rank {rank}", played, numbered, (), MemoryBreakdown())


def message(
    kind: MessageType, ranks: tuple[int, ...], peer: int = NOBODY, shape: tuple[int, ...] = (4,), waited: int = NOBODY
) -> Message:
    return Message(0, kind, ranks, "made up", peer, 0, shape, "float32", 16, During.FORWARD, waited=waited)


@dataclass
class World:
    """What every rank does, put together in one order of all, so that it goes well."""

    size: int
    draw: random.Random
    lists: list[list[Message]] = field(default_factory=list)
    ringed: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ringed = [set() for _ in range(self.size)]
        self.lists = [[] for _ in range(self.size)]

    def some(self) -> tuple[int, ...]:
        """A group: one of few, so that several messages share it."""
        groups = [tuple(range(self.size)), tuple(range(0, self.size, 2)), (0, 1), (1, self.size - 1)]
        return self.draw.choice([group for group in groups if len(set(group)) > 1])

    def add(self, events: int) -> None:
        for _ in range(events):
            self.draw.choice([self.collective, self.collective, self.pair, self.ring])()
        for own, ringed in zip(self.lists, self.ringed, strict=True):
            self.start_early(own, ringed)

    def collective(self) -> None:
        ranks, kind = self.some(), self.draw.choice(COLLECTIVES)
        shape = (len(ranks) * self.draw.choice((1, 2, 3)),)
        root = self.draw.choice(ranks) if kind is MessageType.BROADCAST else NOBODY
        parts = [[self.draw.randrange(3) for _ in ranks] for _ in ranks]
        for place, rank in enumerate(ranks):
            one = replace(message(kind, ranks, root, shape), layer=self.draw.choice(("", "a")))
            if kind is MessageType.ALL_TO_ALL:
                one = replace(one, sent=tuple(parts[place]), taken=tuple(row[place] for row in parts))
            self.lists[rank].append(one)

    def pair(self) -> None:
        ranks = self.some()
        sender, receiver = self.draw.sample(ranks, 2)
        shape = (self.draw.choice((4, 8)),)
        purpose = self.draw.choice(("pipeline", "made up"))
        self.lists[sender].append(replace(message(MessageType.SEND, ranks, receiver, shape), purpose=purpose))
        self.lists[receiver].append(replace(message(MessageType.RECEIVE, ranks, sender, shape), purpose=purpose))

    def ring(self) -> None:
        """Every rank of a group sends to the next, all at once."""
        ranks = self.some()
        for place, rank in enumerate(ranks):
            following, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]
            self.ringed[rank].add(len(self.lists[rank]))
            self.lists[rank] += [
                message(MessageType.SEND, ranks, following),
                message(MessageType.RECEIVE, ranks, before),
            ]

    def start_early(self, own: list[Message], ringed: set[int]) -> None:
        """Most messages are waited for at once, some later, some never."""
        for number, one in enumerate(own):
            alone = number + 1 + (number in ringed)
            wait = self.draw.choice((alone, alone, alone, self.draw.randint(alone, len(own)), NOBODY))
            # nobody waits between the two messages of a ring, which start together
            own[number] = replace(one, number=number, waited=wait + (wait - 1 in ringed))

    @property
    def runs(self) -> list[RoleRun]:
        return [run_of(rank, own, self.size) for rank, own in enumerate(self.lists)]


def goes_well(runs: Sequence[RoleRun]) -> bool:
    """Plain simulation, one message at a time: whether all messages meet, fit, and every rank comes to its end."""
    started = {run.rank: 0 for run in runs}
    lists = {run.rank: run.messages for run in runs}
    done: set[tuple[int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank, own in lists.items():
            number = started[rank]
            owed = [n for n in range(number) if NOBODY != own[n].waited <= number and (rank, n) not in done]
            if number < len(own) and not owed:
                started[rank] += 1
                moved = True
        for rank, own in lists.items():
            for number in range(started[rank]):
                if (rank, number) in done or not _active(own, number, rank, done):
                    continue
                partners = _partners(rank, number, lists)
                if partners is None:
                    return False
                there = [number < started[rank] and _active(lists[rank], number, rank, done)
                         for rank, number in partners]  # fmt: skip
                if all(there):
                    if not _fits([lists[rank][number] for rank, number in partners], partners):
                        return False
                    done.update(partners)
                    moved = True
    return len(done) == sum(len(own) for own in lists.values())


def _batch(own: Sequence[Message], number: int) -> set[int]:
    """Messages that start at once with one, itself included: neighbours from rank to rank of its group, of which none
    was waited for before all had started; as many as there can be, from the first on."""
    pairs = (MessageType.SEND, MessageType.RECEIVE)
    start, found = 0, set[int]()
    for n, one in enumerate(own):
        before = own[start:n]
        joins = (
            one.kind in pairs
            and n > start
            and all((b.kind in pairs, b.purpose, b.ranks) == (True, one.purpose, one.ranks) for b in before)
            and all(b.waited == NOBODY or b.waited > n for b in before)
        )
        if not joins:
            start, found = n, set()
        found.add(n)
        following = n + 1 == len(own)
        if number in found and (following or not _goes_on(own, start, n + 1)):
            return found
    return {number}


def _goes_on(own: Sequence[Message], start: int, n: int) -> bool:
    one, pairs = own[n], (MessageType.SEND, MessageType.RECEIVE)
    return one.kind in pairs and all(
        (b.kind in pairs, b.purpose, b.ranks) == (True, one.purpose, one.ranks) and (b.waited == NOBODY or b.waited > n)
        for b in own[start:n]
    )


def _lane(own: Sequence[Message], number: int) -> tuple[object, ...]:
    one = own[number]
    alone = one.kind in (MessageType.SEND, MessageType.RECEIVE) and one.purpose == "pipeline"
    return one.purpose, one.ranks, one.peer if alone else None


def _active(own: Sequence[Message], number: int, rank: int, done: set[tuple[int, int]]) -> bool:
    before = [n for n in range(number) if _lane(own, n) == _lane(own, number)]
    batch = set() if own[number].purpose == "pipeline" else _batch(own, number)
    return all((rank, n) in done for n in before if n not in batch)


def _partners(rank: int, number: int, lists: dict[int, tuple[Message, ...]]) -> list[tuple[int, int]] | None:
    """Who and what meets a message: the same count of its sort; None: somebody has none."""
    one = lists[rank][number]
    group = one.purpose, one.ranks
    if one.kind in (MessageType.SEND, MessageType.RECEIVE):
        other = MessageType.RECEIVE if one.kind is MessageType.SEND else MessageType.SEND
        wanted = {rank: (one.kind, one.peer, one.tag), one.peer: (other, rank, one.tag)}
        alike = {
            r: [n for n, m in enumerate(lists[r]) if (m.purpose, m.ranks) == group and (m.kind, m.peer, m.tag) == key]
            for r, key in wanted.items()
        }
    else:
        pairs = (MessageType.SEND, MessageType.RECEIVE)
        alike = {
            r: [n for n, m in enumerate(lists[r]) if (m.purpose, m.ranks) == group and m.kind not in pairs]
            for r in one.ranks
        }
    count = alike[rank].index(number)
    if any(len(own) <= count for own in alike.values()):
        return None
    return [(r, own[count]) for r, own in alike.items()]


def _fits(messages: Sequence[Message], partners: Sequence[tuple[int, int]]) -> bool:
    if messages[0].kind in (MessageType.SEND, MessageType.RECEIVE):
        return len({(one.shape, one.dtype) for one in messages}) == 1
    if len({(one.kind, one.dtype) for one in messages}) > 1:
        return False
    if messages[0].kind is MessageType.ALL_TO_ALL:
        size = range(len(messages))
        fits = all(messages[i].sent[j] == messages[j].taken[i] for i in size for j in size)
        return fits and _same_layer(messages)
    if messages[0].kind is MessageType.BARRIER:
        return _same_layer(messages)
    root = {one.peer for one in messages} if messages[0].kind is MessageType.BROADCAST else {0}
    return len(root) == 1 and len({one.shape for one in messages}) == 1 and _same_layer(messages)


def _same_layer(messages: Sequence[Message]) -> bool:
    layers = {one.layer for one in messages}
    return "" in layers or len(layers) == 1
