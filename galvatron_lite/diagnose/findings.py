"""Finds causes of differences between measured and predicted steps, each with its cost and a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median, median_low

from galvatron_lite.diagnose.expected import ExpectedGroup, ExpectedLayers, ExpectedStep, RankTimes, WaitPlace

_SHARE = 0.02
"""Least share of the predicted step that a reported cause costs or saves."""
_CONCENTRATED = 0.8
"""Least share of a rank's delay for which a run of layers, rather than the rank, is the cause."""

NCCL, GLOO = "nccl", "gloo"
_LINKS = {
    NCCL: "the network (another job on it, a cable at half speed, NCCL_DEBUG=INFO for the transport)",
    GLOO: "what else wants this machine's cores and network (threads of the CPU carry gloo's messages: no more "
    "processes, each with its OMP_NUM_THREADS, than cores; GLOO_SOCKET_IFNAME for another interface)",
}


class Cause(StrEnum):
    """The part of a step that is slower, or quicker, than predicted."""

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
    """A cause of a difference."""

    cause: Cause
    where: str  # the layers, collective, or part, in words
    seconds: float  # seconds of a step longer than predicted; negative: shorter
    measured: float  # seconds of a step
    predicted: float  # seconds of a step
    advice: str  # empty if it is quicker than predicted
    ranks: tuple[int, ...] = ()  # empty: all
    stage: int = -1  # of a pipeline; -1: all, or the only one


def findings(times: Sequence[RankTimes], expected: ExpectedStep, backend: str = NCCL) -> list[Finding]:
    """Return the causes that cost or save at least ``_SHARE`` of a step, the most expensive first."""
    between = min((rank_times.between for rank_times in times), default=0.0)
    results = [_finding(Cause.BETWEEN, "data, printing, saving", between, 0.0)]
    least = _SHARE * expected.seconds
    for group in expected.groups:
        members = [rank_times for rank_times in times if rank_times.rank in group.ranks]
        if members:
            stage = group.layers[0].stage if len(expected.plan.stages) > 1 else -1
            results += _slow_rank_findings(members, group, least)
            results += _layer_findings(members, group, stage)
            results += _collective_findings(members, group, stage, backend)
            if all(member.has_parts for member in members):
                update = median_low(member.optimizer for member in members)
                other = median_low(member.other for member in members)
                results.append(_finding(Cause.OPTIMIZER, "the update", update, group.optimizer, stage))
                results.append(_finding(Cause.HOST, "in no layer, message or update", other, group.other, stage))
    results += _bubble_findings(times, expected)
    reported = (
        result if result.seconds > 0 else replace(result, advice="")
        for result in results
        if abs(result.seconds) >= least
    )
    return sorted(reported, key=lambda finding: -finding.seconds)


def rank_words(first: int, last: int) -> str:
    """Return ``rank 3``, or ``ranks 0..3``."""
    return f"rank {first}" if first == last else f"ranks {first}..{last}"


def measured_runs(times: RankTimes, group: ExpectedGroup) -> Iterator[tuple[ExpectedLayers, str, float, float]]:
    """Yield runs of layers, ``forward`` or ``backward``, measured and predicted seconds, if a rank has them by layer.

    Times of a log include the communication inside layers, and so does the prediction for them.
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


def _slow_rank_findings(times: Sequence[RankTimes], group: ExpectedGroup, least: float) -> Iterator[Finding]:
    """Find ranks that are slower than the others of their group."""
    if len(times) < 2:
        return
    table = {
        rank_times.rank: {
            (run.run.first, direction): seconds for run, direction, seconds, _ in measured_runs(rank_times, group)
        }
        for rank_times in times
    }
    for rank_times in times:
        if not rank_times.traced:
            table[rank_times.rank]["", "backward"] = sum(rank_times.backward.values())
            table[rank_times.rank]["", "forward"] = rank_times.forward.get("", 0.0)
        table[rank_times.rank]["", "other"] = rank_times.other
    common = {key: median_low(row.get(key, 0.0) for row in table.values()) for key in next(iter(table.values()))}
    base = sum(common.values())
    for rank, row in table.items():
        delays = {key: max(seconds - common.get(key, 0.0), 0.0) for key, seconds in row.items()}
        if sum(delays.values()) >= max(least, 0.1 * base):
            yield _slow_rank(rank, base, delays, group)


def _slow_rank(rank: int, base: float, delays: Mapping[tuple[str, str], float], group: ExpectedGroup) -> Finding:
    total, by_run = sum(delays.values()), dict[str, float]()
    for (first, _), seconds in delays.items():
        by_run[first] = by_run.get(first, 0.0) + seconds
    layers = {first: seconds for first, seconds in by_run.items() if first} or by_run
    worst = max(layers, key=lambda first: layers[first])
    run = next((run for run in group.layers if run.run.first == worst), None)
    if run is not None and layers[worst] >= _CONCENTRATED * sum(layers.values()) and len(group.layers) > 1:
        where = f"{_describe_run(run)} on rank {rank} alone"
        return Finding(Cause.LAYERS, where, total, base + total, base, _ONE_RANK, (rank,), run.stage)
    return Finding(Cause.RANK, f"rank {rank}", total, base + total, base, _ADVICE[Cause.RANK], (rank,))


def _layer_findings(times: Sequence[RankTimes], group: ExpectedGroup, stage: int) -> Iterator[Finding]:
    """Compare runs of layers with their predictions, by the median rank.

    Forward and backward of a run are a single cause if both are slower, or both quicker.
    """
    rows: dict[ExpectedLayers, dict[str, tuple[list[float], float]]] = {}
    for rank_times in times:
        for run, direction, measured, predicted in measured_runs(rank_times, group):
            rows.setdefault(run, {}).setdefault(direction, ([], predicted))[0].append(measured)
    for run, directions in rows.items():
        figures = {name: (median_low(seconds), predicted) for name, (seconds, predicted) in directions.items()}
        excess = {name: measured - predicted for name, (measured, predicted) in figures.items()}
        number = run.stage if stage >= 0 else -1
        if len(excess) == 2 and len({seconds > 0 for seconds in excess.values()}) == 1:
            most = max(excess, key=lambda name: abs(excess[name]))
            share = excess[most] / (sum(excess.values()) or 1.0)
            measured, predicted = (sum(values) for values in zip(*figures.values(), strict=True))
            label = f"{_describe_run(run)} ({share:.0%} of it in {most})"
            yield _finding(Cause.LAYERS, label, measured, predicted, number)
        else:
            for name, (measured, predicted) in figures.items():
                yield _finding(Cause.LAYERS, f"{name} of {_describe_run(run)}", measured, predicted, number)
    if any(not rank_times.traced for rank_times in times):
        measured = median_low(sum(rank_times.backward.values()) for rank_times in times)
        predicted = sum(run.backward + run.backward_communication for run in group.layers)
        yield _finding(Cause.LAYERS, "backward of all layers", measured, predicted, stage, _LOG_ALONE)


def _collective_findings(
    times: Sequence[RankTimes], group: ExpectedGroup, stage: int, backend: str
) -> Iterator[Finding]:
    """Compare exposed communication of the rank that waits least, as the others also wait for the slowest rank."""
    predictions = {WaitPlace.LAYERS: group.inside, WaitPlace.GRADIENTS: group.gradients}
    for where in WaitPlace:
        predicted = predictions.get(where, 0.0)
        if where is WaitPlace.LAYERS and not all(rank_times.traced for rank_times in times):
            continue
        least = min(times, key=lambda rank_times: rank_times.exposed(where))
        seconds = least.exposed(where)
        if seconds or predicted:
            kinds = [kind for kind in least.kinds(where) if kind]
            groups = [least.groups[kind] for kind in kinds if kind in least.groups]
            label = f"{' and '.join(kinds[:2]) or 'collectives'}, {where.value}" + _group_words(where, group, groups)
            yield _finding(Cause.COLLECTIVE, label, seconds, predicted, stage, _link_advice(where, backend))


def _group_words(where: WaitPlace, group: ExpectedGroup, groups: Sequence[str]) -> str:
    """Return the group of a collective in words, by its name in the trace or by the plan."""
    if groups:
        return f", group {', '.join(groups)}"
    if where is WaitPlace.CHECK:
        return ", group of all ranks"
    strategy = group.layers[0].run.strategy
    if len(group.ranks) == 1:
        return ", between stages that share parameters"
    size = len(group.ranks)
    if where is WaitPlace.GRADIENTS:
        size = strategy.batch_degree * strategy.context * strategy.spatial
    return f", groups of {max(size, 1)} of {rank_words(group.ranks[0], group.ranks[-1])}"


def _link_advice(where: WaitPlace, backend: str) -> str:
    if where is WaitPlace.CHECK:
        return "One small message behind every step: it waits for whoever is last, so look at slow ranks first."
    return f"Look at {_LINKS[backend]}; if it is as it will stay, correct the profile with --update and plan anew."


def _bubble_findings(times: Sequence[RankTimes], expected: ExpectedStep) -> Iterator[Finding]:
    """Compare the waiting of the busiest stages, for which the others wait."""
    waits = []
    for group in expected.groups:
        seconds = [part.waiting for part in times if part.rank in group.ranks and part.has_parts]
        if seconds:
            waits.append((median(seconds), group))
    if len(expected.groups) > 1 and len(waits) == len(expected.groups):
        waiting, group = min(waits, key=lambda wait: wait[0])
        where = f"waiting for other stages on {rank_words(group.ranks[0], group.ranks[-1])}"
        yield _finding(Cause.BUBBLE, where, waiting, min(group.waiting for group in expected.groups))


def _describe_run(run: ExpectedLayers) -> str:
    names = run.run.first if run.run.count == 1 else f"{run.run.first} .. {run.run.last}"
    return f"{names} ({run.run.strategy})"
