"""Where measured and predicted part ways: causes, each with what it costs and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median, median_low

from galvatron_lite.diagnose.expected import Expected, GroupExpected, LayersExpected, RankTimes, Where

_SHARE = 0.02  # of the predicted step: what a cause must cost to be named
_CONCENTRATED = 0.8
"""Share of what a rank is slower by, from which one run of layers is the cause rather than the rank."""
_OF_LAYERS = (
    "If nothing of your own runs in these layers (hooks, .item(), prints), the profile is not of this machine as "
    "it runs now: correct it with --update and plan anew."
)

NCCL, GLOO = "nccl", "gloo"
_LINKS = {
    NCCL: "the network (another job on it, a cable at half speed, NCCL_DEBUG=INFO for the transport)",
    GLOO: "what else wants this machine's cores and network (threads of the CPU carry gloo's messages: no more "
    "processes, each with its OMP_NUM_THREADS, than cores; GLOO_SOCKET_IFNAME for another interface)",
}


class Cause(StrEnum):
    """What is slower, or quicker, than predicted."""

    LAYERS = "layers"
    RANK = "rank"
    COLLECTIVE = "collective"
    BUBBLE = "bubble"
    OPTIMIZER = "optimizer"
    HOST = "host"
    BETWEEN = "between steps"


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause."""

    cause: Cause  # what kind of one
    where: str  # which layers, collective, or part, in words
    seconds: float  # a step, that it takes longer than predicted; negative: shorter
    measured: float  # measured, predicted: seconds a step
    predicted: float
    advice: str  # what to do; empty where it is quicker than predicted
    ranks: tuple[int, ...] = ()  # where; empty: on all
    stage: int = -1  # of a pipeline; -1: all, or there is one only


def findings(times: Sequence[RankTimes], expected: Expected, backend: str = NCCL) -> list[Finding]:
    """All causes that cost or save at least a fiftieth of a step, those that cost most first."""
    found = list(_between(times))
    least = _SHARE * expected.seconds
    for group in expected.groups:
        own = [one for one in times if one.rank in group.ranks]
        if own:
            slow = _slow_ranks(own, group, least)
            found += slow
            found += _layers(own, group, expected)
            found += _collectives(own, group, expected, backend)
            found += _rest(own, group, expected)
    found += _bubble(times, expected)
    named = (one if one.seconds > 0 else replace(one, advice="") for one in found if abs(one.seconds) >= least)
    return sorted(named, key=lambda one: -one.seconds)


def rank_words(first: int, last: int) -> str:
    """``rank 3``, or ``ranks 0..3``."""
    return f"rank {first}" if first == last else f"ranks {first}..{last}"


def runs_measured(one: RankTimes, group: GroupExpected) -> Iterator[tuple[LayersExpected, str, float, float]]:
    """Runs of layers, forward or backward, measured and predicted seconds, as far as a rank's times tell them apart.

    Times of a log have the communication inside layers; so has then what is predicted.
    """
    for run in group.layers:
        if one.forward.keys() >= set(run.names):
            more = 0.0 if one.traced else run.forward_communication
            yield run, "forward", sum(one.forward[name] for name in run.names), run.forward + more
        if one.backward.keys() >= set(run.names):
            yield run, "backward", sum(one.backward[name] for name in run.names), run.backward


def _slow_ranks(times: Sequence[RankTimes], group: GroupExpected, least: float) -> list[Finding]:
    """Ranks that are slower than those that do the same."""
    if len(times) < 2:
        return []
    table = {one.rank: {(run.run.first, way): now for run, way, now, _ in runs_measured(one, group)} for one in times}
    for one in times:
        if not one.traced:
            table[one.rank]["", "backward"] = sum(one.backward.values())
            table[one.rank]["", "forward"] = one.forward.get("", 0.0)
        table[one.rank]["", "other"] = one.other
    common = {key: median_low(row.get(key, 0.0) for row in table.values()) for key in next(iter(table.values()))}
    found = []
    for rank, row in table.items():
        more = {key: max(seconds - common.get(key, 0.0), 0.0) for key, seconds in row.items()}
        lost = sum(more.values())
        if lost < max(least, 0.1 * sum(common.values())):
            continue
        base = sum(common.values())
        found.append(_slow_rank(rank, lost, base, more, group))
    return found


def _slow_rank(
    rank: int, lost: float, base: float, more: Mapping[tuple[str, str], float], group: GroupExpected
) -> Finding:
    by_run: dict[str, float] = {}
    for (first, _), seconds in more.items():
        by_run[first] = by_run.get(first, 0.0) + seconds
    named = {first: seconds for first, seconds in by_run.items() if first} or by_run
    worst = max(named, key=lambda first: named[first])
    run = next((one for one in group.layers if one.run.first == worst), None)
    if run is not None and named[worst] >= _CONCENTRATED * sum(named.values()) and len(group.layers) > 1:
        where = f"{_named(run)} on rank {rank} alone"
        advice = "Look at what these layers do on that rank only (data that differs, a hook, a device that throttles)."
        return Finding(Cause.LAYERS, where, lost, base + lost, base, advice, (rank,), run.stage)
    advice = (
        "The others wait for it. Look at its machine: another process, a throttled device (nvidia-smi -q -d "
        "PERFORMANCE), a slower card; plan for unlike devices with --update, or take it out."
    )
    return Finding(Cause.RANK, f"rank {rank}", lost, base + lost, base, advice, (rank,))


def _layers(times: Sequence[RankTimes], group: GroupExpected, expected: Expected) -> list[Finding]:
    """Runs of layers that differ from their prediction on all ranks."""
    rows: dict[tuple[LayersExpected, str], list[float]] = {}
    wanted: dict[tuple[LayersExpected, str], float] = {}
    for one in times:
        for run, way, now, then in runs_measured(one, group):
            rows.setdefault((run, way), []).append(now)
            wanted[run, way] = then
    found = []
    for (run, way), own_seconds in rows.items():
        seconds, then = median_low(own_seconds), wanted[run, way]
        found.append(
            Finding(
                Cause.LAYERS, f"{way} of {_named(run)}", seconds - then, seconds, then, _OF_LAYERS,
                stage=_stage(run.stage, expected),
            )
        )  # fmt: skip
    if any(not one.traced for one in times):
        found.append(_backward_total(times, group, expected))
    return _joined(found)


def _backward_total(times: Sequence[RankTimes], group: GroupExpected, expected: Expected) -> Finding:
    """Backward of all layers, where a log does not tell them apart."""
    seconds = median_low(sum(one.backward.values()) for one in times)
    then = sum(run.backward + run.backward_communication for run in group.layers)
    advice = "A log does not tell layers' backward passes apart: profile a few steps (profile_steps=range(10, 13))."
    stage = _stage(group.layers[0].stage, expected)
    return Finding(Cause.LAYERS, "backward of all layers", seconds - then, seconds, then, advice, stage=stage)


def _joined(causes: Sequence[Finding]) -> list[Finding]:
    """Both ways of a run of layers as one cause where both are slower."""
    left = list(causes)
    for one in causes:
        if not one.where.startswith("forward of "):
            continue
        name = one.where.removeprefix("forward of ")
        other = next((two for two in causes if two.where == f"backward of {name}" and two.stage == one.stage), None)
        if other is None or (one.seconds > 0) != (other.seconds > 0):
            continue
        measured, predicted = one.measured + other.measured, one.predicted + other.predicted
        left = [two for two in left if two is not one and two is not other]
        most = "forward" if abs(one.seconds) > abs(other.seconds) else "backward"
        share = max(one.seconds / (one.seconds + other.seconds), other.seconds / (one.seconds + other.seconds))
        where = f"{name} ({share:.0%} of it in {most})"
        joined = Finding(
            Cause.LAYERS, where, measured - predicted, measured, predicted, _OF_LAYERS,
            stage=one.stage,
        )  # fmt: skip
        left.append(joined)
    return left


def _collectives(times: Sequence[RankTimes], group: GroupExpected, expected: Expected, backend: str) -> list[Finding]:
    """Communication that is waited for: of the rank that waits least, as the others wait for the slowest too."""
    found = []
    stage = _stage(group.layers[0].stage, expected)
    predicted = {Where.LAYERS: group.inside, Where.GRADIENTS: group.gradients, Where.CHECK: 0.0, Where.OPTIMIZER: 0.0}
    for where, then in predicted.items():
        if where is Where.LAYERS and not all(one.traced for one in times):
            continue
        least = min(times, key=lambda one: one.exposed(where))
        seconds = least.exposed(where)
        if not seconds and not then:
            continue
        kinds = [kind for kind in least.kinds(where) if kind]
        groups = [least.groups[kind] for kind in kinds if kind in least.groups]
        label = f"{' and '.join(kinds[:2]) or 'collectives'}, {where.value}" + _over(where, group, groups)
        found.append(
            Finding(Cause.COLLECTIVE, label, seconds - then, seconds, then, _of_links(where, backend), stage=stage)
        )
    return found


def _over(where: Where, group: GroupExpected, groups: Sequence[str]) -> str:
    """Which ranks it joins, as the trace says, or as the plan does."""
    if groups:
        return f", group {', '.join(groups)}"
    if where is Where.CHECK:
        return ", group of all ranks"
    strategy = group.layers[0].run.strategy
    if len(group.ranks) == 1:
        return ", between stages that share parameters"
    size = strategy.batch_degree * strategy.context * strategy.spatial if where is Where.GRADIENTS else len(group.ranks)
    return f", groups of {max(size, 1)} of {rank_words(group.ranks[0], group.ranks[-1])}"


def _of_links(where: Where, backend: str) -> str:
    if where is Where.CHECK:
        return "One small message behind every step: it waits for whoever is last, so look at slow ranks first."
    return f"Look at {_LINKS[backend]}; if it is as it will stay, correct the profile with --update and plan anew."


def _rest(times: Sequence[RankTimes], group: GroupExpected, expected: Expected) -> list[Finding]:
    """The optimizer, and the host."""
    stage = _stage(group.layers[0].stage, expected)
    if not all(one.parted for one in times):
        return []
    update, other = median_low(one.optimizer for one in times), median_low(one.other for one in times)
    slower = (
        "Take a fused or foreach optimizer (torch.optim.AdamW(fused=True)), look at what hooks run in step(), or "
        "correct the profile with --update."
    )
    hosted = (
        "Time in no layer, collective or update: Python between operations, .item(), printing, a garbage collection, "
        "the loss outside the model; on a GPU, kernels too short for the host to keep up (compile=True)."
    )
    return [
        Finding(Cause.OPTIMIZER, "the update", update - group.optimizer, update, group.optimizer, slower, stage=stage),
        Finding(
            Cause.HOST, "in no layer, message or update", other - group.other, other, group.other, hosted, stage=stage
        ),
    ]


def _bubble(times: Sequence[RankTimes], expected: Expected) -> list[Finding]:
    """Waiting for other stages, where the busiest one waits longer than predicted: others only wait for it."""
    if len(expected.groups) < 2:
        return []
    waits = []
    for group in expected.groups:
        own = [one.waiting for one in times if one.rank in group.ranks and one.parted]
        if own:
            waits.append((median(own), group))
    if len(waits) < len(expected.groups):
        return []
    seconds, group = min(waits, key=lambda one: one[0])
    then = min(one.waiting for one in expected.groups)
    advice = (
        "Stages take unlike times, or sends are slow: look at the stage with the slowest layers above; more "
        "micro-batches or another schedule make the bubble smaller (plan anew after --update)."
    )
    where = f"waiting for other stages on {rank_words(group.ranks[0], group.ranks[-1])}"
    return [Finding(Cause.BUBBLE, where, seconds - then, seconds, then, advice)]


def _between(times: Sequence[RankTimes]) -> Iterator[Finding]:
    seconds = min((one.between for one in times), default=0.0)
    advice = (
        "It is not part of a step: load data in workers (DataLoader(num_workers=...)), save with asynchronous=True."
    )
    yield Finding(Cause.BETWEEN, "data, printing, saving", seconds, seconds, 0.0, advice)


def _named(run: LayersExpected) -> str:
    names = run.run.first if run.run.count == 1 else f"{run.run.first} .. {run.run.last}"
    return f"{names} ({run.run.strategy})"


def _stage(stage: int, expected: Expected) -> int:
    return stage if len(expected.plan.stages) > 1 else -1
