"""Causes of differences between measured and predicted steps, each with its cost and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median, median_low

from galvatron_lite.diagnose.expected import Expected, GroupExpected, LayersExpected, RankTimes, Where

_SHARE = 0.02
"""Part of the predicted step that a cause must cost or save to be reported."""
_CONCENTRATED = 0.8
"""Share of a rank's delay from which one run of layers is the cause rather than the rank."""

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


_ADVICE = {
    Cause.LAYERS: "If nothing of your own runs in these layers (hooks, .item(), prints), the profile is not of this "
    "machine as it runs now: correct it with --update and plan anew.",
    Cause.RANK: "The others wait for it. Look at its machine: another process, a throttled device (nvidia-smi -q -d "
    "PERFORMANCE), a slower card; plan for unlike devices with --update, or take it out.",
    Cause.OPTIMIZER: "Take a fused or foreach optimizer (torch.optim.AdamW(fused=True)), look at what hooks run in "
    "step(), or correct the profile with --update.",
    Cause.HOST: "Time in no layer, collective or update: Python between operations, .item(), printing, a garbage "
    "collection, the loss outside the model; on a GPU, kernels too short for the host to keep up (compile=True).",
    Cause.BUBBLE: "Stages take unlike times, or sends are slow: look at the stage with the slowest layers above; more "
    "micro-batches or another schedule make the bubble smaller (plan anew after --update).",
    Cause.BETWEEN: "It is not part of a step: load data in workers (DataLoader(num_workers=...)), save with "
    "asynchronous=True.",
}
_ONE_RANK = "Look at what these layers do on that rank only (data that differs, a hook, a device that throttles)."
_LOG_ALONE = "A log does not tell layers' backward passes apart: profile a few steps (profile_steps=range(10, 13))."


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause."""

    cause: Cause
    where: str  # which layers, collective, or part, in words
    seconds: float  # a step, that it takes longer than predicted; negative: shorter
    measured: float  # seconds a step
    predicted: float  # seconds a step
    advice: str  # empty where it is quicker than predicted
    ranks: tuple[int, ...] = ()  # empty: on all
    stage: int = -1  # of a pipeline; -1: all, or the only one


def findings(times: Sequence[RankTimes], expected: Expected, backend: str = NCCL) -> list[Finding]:
    """All causes that cost or save at least a fiftieth of a step, the most expensive first."""
    between = min((time_.between for time_ in times), default=0.0)
    results = [_finding(Cause.BETWEEN, "data, printing, saving", between, 0.0)]
    least = _SHARE * expected.seconds
    for group in expected.groups:
        members = [time_ for time_ in times if time_.rank in group.ranks]
        if members:
            stage = group.layers[0].stage if len(expected.plan.stages) > 1 else -1
            results += _slow_ranks(members, group, least)
            results += _layers(members, group, stage)
            results += _collectives(members, group, stage, backend)
            if all(member.parted for member in members):
                update = median_low(member.optimizer for member in members)
                other = median_low(member.other for member in members)
                results.append(_finding(Cause.OPTIMIZER, "the update", update, group.optimizer, stage))
                results.append(_finding(Cause.HOST, "in no layer, message or update", other, group.other, stage))
    results += _bubble(times, expected)
    reported = (
        result if result.seconds > 0 else replace(result, advice="")
        for result in results
        if abs(result.seconds) >= least
    )
    return sorted(reported, key=lambda one: -one.seconds)


def rank_words(first: int, last: int) -> str:
    """``rank 3``, or ``ranks 0..3``."""
    return f"rank {first}" if first == last else f"ranks {first}..{last}"


def runs_measured(times: RankTimes, group: GroupExpected) -> Iterator[tuple[LayersExpected, str, float, float]]:
    """Runs of layers, forward or backward, measured and predicted seconds, as far as a rank's times tell them apart.

    Times of a log include the communication inside layers; so does then the prediction.
    """
    for run in group.layers:
        names = [layer.name for layer in run.layers]
        if times.forward.keys() >= set(names):
            more = 0.0 if times.traced else run.forward_communication
            yield run, "forward", sum(times.forward[name] for name in names), run.forward + more
        if times.backward.keys() >= set(names):
            yield run, "backward", sum(times.backward[name] for name in names), run.backward


def _finding(cause: Cause, where: str, measured: float, predicted: float, stage: int = -1, advice: str = "") -> Finding:
    return Finding(
        cause, where, measured - predicted, measured, predicted, advice or _ADVICE.get(cause, ""), stage=stage
    )


def _slow_ranks(times: Sequence[RankTimes], group: GroupExpected, least: float) -> Iterator[Finding]:
    """Ranks that are slower than those that do the same."""
    if len(times) < 2:
        return
    table = {
        time_.rank: {(run.run.first, direction): now for run, direction, now, _ in runs_measured(time_, group)}
        for time_ in times
    }
    for time_ in times:
        if not time_.traced:
            table[time_.rank]["", "backward"] = sum(time_.backward.values())
            table[time_.rank]["", "forward"] = time_.forward.get("", 0.0)
        table[time_.rank]["", "other"] = time_.other
    common = {key: median_low(row.get(key, 0.0) for row in table.values()) for key in next(iter(table.values()))}
    base = sum(common.values())
    for rank, row in table.items():
        more = {key: max(seconds - common.get(key, 0.0), 0.0) for key, seconds in row.items()}
        if sum(more.values()) >= max(least, 0.1 * base):
            yield _slow_rank(rank, base, more, group)


def _slow_rank(rank: int, base: float, more: Mapping[tuple[str, str], float], group: GroupExpected) -> Finding:
    lost, by_run = sum(more.values()), dict[str, float]()
    for (first, _), seconds in more.items():
        by_run[first] = by_run.get(first, 0.0) + seconds
    layers = {first: seconds for first, seconds in by_run.items() if first} or by_run
    worst = max(layers, key=lambda first: layers[first])
    run = next((run for run in group.layers if run.run.first == worst), None)
    if run is not None and layers[worst] >= _CONCENTRATED * sum(layers.values()) and len(group.layers) > 1:
        where = f"{_words(run)} on rank {rank} alone"
        return Finding(Cause.LAYERS, where, lost, base + lost, base, _ONE_RANK, (rank,), run.stage)
    return Finding(Cause.RANK, f"rank {rank}", lost, base + lost, base, _ADVICE[Cause.RANK], (rank,))


def _layers(times: Sequence[RankTimes], group: GroupExpected, stage: int) -> Iterator[Finding]:
    """Runs of layers that differ from their prediction on all ranks.

    Forward and backward of a run are one cause where both are slower, or both quicker.
    """
    rows: dict[LayersExpected, dict[str, tuple[list[float], float]]] = {}
    for time_ in times:
        for run, direction, now, then in runs_measured(time_, group):
            rows.setdefault(run, {}).setdefault(direction, ([], then))[0].append(now)
    for run, directions in rows.items():
        figures = {direction: (median_low(seconds), then) for direction, (seconds, then) in directions.items()}
        more = {direction: now - then for direction, (now, then) in figures.items()}
        number = run.stage if stage >= 0 else -1
        if len(more) == 2 and len({seconds > 0 for seconds in more.values()}) == 1:
            most = max(more, key=lambda direction: abs(more[direction]))
            share = more[most] / (sum(more.values()) or 1.0)
            now, then = (sum(values) for values in zip(*figures.values(), strict=True))
            yield _finding(Cause.LAYERS, f"{_words(run)} ({share:.0%} of it in {most})", now, then, number)
        else:
            for direction, (now, then) in figures.items():
                yield _finding(Cause.LAYERS, f"{direction} of {_words(run)}", now, then, number)
    if any(not time_.traced for time_ in times):
        now = median_low(sum(time_.backward.values()) for time_ in times)
        then = sum(run.backward + run.backward_communication for run in group.layers)
        yield _finding(Cause.LAYERS, "backward of all layers", now, then, stage, _LOG_ALONE)


def _collectives(times: Sequence[RankTimes], group: GroupExpected, stage: int, backend: str) -> Iterator[Finding]:
    """Exposed communication of the rank that waits least, as the others also wait for the slowest."""
    predicted = {Where.LAYERS: group.inside, Where.GRADIENTS: group.gradients, Where.CHECK: 0.0, Where.OPTIMIZER: 0.0}
    for where, then in predicted.items():
        if where is Where.LAYERS and not all(time_.traced for time_ in times):
            continue
        least = min(times, key=lambda one: one.exposed(where))
        seconds = least.exposed(where)
        if seconds or then:
            kinds = [kind for kind in least.kinds(where) if kind]
            groups = [least.groups[kind] for kind in kinds if kind in least.groups]
            label = f"{' and '.join(kinds[:2]) or 'collectives'}, {where.value}" + _over(where, group, groups)
            yield _finding(Cause.COLLECTIVE, label, seconds, then, stage, _of_links(where, backend))


def _over(where: Where, group: GroupExpected, groups: Sequence[str]) -> str:
    """The ranks of a collective, as the trace names them, or by the plan."""
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


def _bubble(times: Sequence[RankTimes], expected: Expected) -> Iterator[Finding]:
    """Waiting for other stages, where the busiest one waits longer than predicted: others only wait for it."""
    waits = []
    for group in expected.groups:
        own = [time_.waiting for time_ in times if time_.rank in group.ranks and time_.parted]
        if own:
            waits.append((median(own), group))
    if len(expected.groups) > 1 and len(waits) == len(expected.groups):
        seconds, group = min(waits, key=lambda one: one[0])
        where = f"waiting for other stages on {rank_words(group.ranks[0], group.ranks[-1])}"
        yield _finding(Cause.BUBBLE, where, seconds, min(group.waiting for group in expected.groups))


def _words(run: LayersExpected) -> str:
    names = run.run.first if run.run.count == 1 else f"{run.run.first} .. {run.run.last}"
    return f"{names} ({run.run.strategy})"
