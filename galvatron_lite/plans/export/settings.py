"""A plan as other software can be told it: one strategy for all layers, and how stages and samples are shared out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, ModelGraph, Recompute, Role
from galvatron_lite.parallelism.pipeline.schedule import Schedule, schedule_named
from galvatron_lite.parallelism.registry import added_degrees
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Mode, Plan, Stage, TrainedBy, layer_runs

EDGES = ("before", "after")
"""Layers around the blocks (embedding; norm, head and loss), by the names that plans give them."""
_OF_BLOCKS = ("recompute", "expert", "expert_tensor", "sequence_parallel")
"""Fields that tools set for blocks; what they do with embedding and head follows."""


@dataclass(frozen=True, slots=True)
class StageBlocks:
    """One pipeline stage: how many blocks it has, and whether the layers before and after them are in it."""

    blocks: int
    before: bool
    after: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one file says of a plan."""

    devices: int
    precision: str
    batch: int  # samples a step
    samples: int  # of a micro-batch, on one device
    microbatches: int  # a step
    strategy: Strategy  # of the blocks
    recomputed: int = 0  # blocks of each stage that compute all again; 0: all of them, where the strategy says so
    schedule: Schedule = Schedule.ONE_F_ONE_B
    virtual: int = 1  # stages of each group of devices
    stages: tuple[StageBlocks, ...] = ()
    deepspeed: bool = False  # whether DeepSpeed's engine trains, whatever the tool

    @property
    def pipeline(self) -> int:
        """Groups of devices that the stages are spread over."""
        return len(self.stages) // self.virtual

    @property
    def blocks(self) -> int:
        """Of all stages."""
        return sum(stage.blocks for stage in self.stages)

    def says(self) -> dict[str, object]:
        """Every choice by its name."""
        apart = ("devices", "strategy", "stages", "deepspeed")
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in apart}
        cut = ", ".join(f"{stage.blocks}{' and edges' * (stage.before or stage.after)}" for stage in self.stages)
        of = {one.name: getattr(self.strategy, one.name) for one in fields(Strategy)}
        return {**values, "pipeline": self.pipeline, "blocks of stages": cut, **of}


def settings_of(plan: Plan) -> Settings:
    """What of a plan one strategy for all layers can say."""
    main, again = _main_strategy(plan), _recompute(plan)
    counts = Counter(recompute for stage in again for recompute in stage)
    which = next((one for one in (Recompute.FULL, Recompute.SELECTIVE) if counts[one]), Recompute.NONE)
    partial = which is Recompute.FULL and counts[which] < counts.total()
    return Settings(
        devices=plan.devices, precision=plan.precision, batch=plan.global_batch,
        samples=plan.microbatch // main.batch_degree, microbatches=plan.microbatches,
        strategy=replace(main, recompute=which) if counts else main,
        recomputed=max(stage.count(Recompute.FULL) for stage in again) if partial else 0,
        schedule=plan.schedule if len(plan.stages) > 1 and plan.cyclic is None else Schedule.ONE_F_ONE_B,
        virtual=plan.virtual_stages, stages=cuts(plan), deepspeed=plan.backend is TrainedBy.DEEPSPEED,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Part:
    """Layers of a run that are all blocks, or one layer around them: equal strategies make one run of both."""

    run: LayerRun
    count: int
    edge: str = ""  # its name


def _parts(plan: Plan) -> list[list[_Part]]:
    """Of every stage."""
    stages = []
    for stage in plan.stages:
        parts = list[_Part]()
        for run in stage.runs:
            names = dict.fromkeys(name for name in (run.first, run.last) if name in EDGES)
            inner = [_Part(run, run.count - len(names))] if run.count > len(names) else []
            ends = {name: _Part(run, 1, name) for name in names}
            parts += [*(ends[name] for name in ends if name == EDGES[0]), *inner]
            parts += [ends[name] for name in ends if name != EDGES[0]]
        stages.append(parts)
    return stages


def _main_strategy(plan: Plan) -> Strategy:
    """The strategy of the most blocks; of the most layers where there are none. The first of equal ones."""
    counts: Counter[Strategy] = Counter()
    parts = [part for stage in _parts(plan) for part in stage]
    for part in [part for part in parts if not part.edge] or parts:
        counts[part.run.strategy] += part.count
    return counts.most_common(1)[0][0] if counts else Strategy()


def cuts(plan: Plan) -> tuple[StageBlocks, ...]:
    """The pipeline's stages in the order of the model; one for delayed gradients."""
    stages = []
    for parts in _parts(plan):
        names = {part.edge for part in parts}
        stages.append(
            StageBlocks(sum(part.count for part in parts if not part.edge), *(name in names for name in EDGES))
        )
    if plan.cyclic is not None:
        return (StageBlocks(sum(stage.blocks for stage in stages), before=True, after=True),)
    return tuple(stages)


def _recompute(plan: Plan) -> list[list[Recompute]]:
    """What each block of each stage computes again."""
    return [
        [part.run.strategy.recompute for part in stage if not part.edge for _ in range(part.count)]
        for stage in _parts(plan)
    ]


def simplified(plan: Plan, settings: Settings) -> Iterator[str]:
    """What of a plan is lost where all layers do the same, a line each."""
    if plan.mode is not Mode.TRAINING:
        yield "inference: the file is of a training run"
    if plan.branches:
        yield f"branches on devices of their own: {', '.join(branch.name for branch in plan.branches)}"
    if plan.cyclic is not None:
        yield f"delayed gradients ({plan.cyclic.rule.value}, {plan.cyclic.setting.value}), and its stages"
    main = settings.strategy
    yield from (f"{one.means} ({one.name} {degree})" for one, degree in added_degrees(main))
    for part in (part for stage in _parts(plan) for part in stage):
        run = part.run
        apart = _OF_BLOCKS if part.edge else ("recompute",)
        strategy = replace(run.strategy, **{name: getattr(main, name) for name in apart})
        if strategy != main:
            layers = part.edge or (run.first if run.first == run.last else f"{run.first} … {run.last}")
            yield f"{layers}: {strategy}, instead of {main}"
    yield from _recompute_lost(plan, settings)


def _recompute_lost(plan: Plan, settings: Settings) -> Iterator[str]:
    which, blocks = settings.strategy.recompute, _recompute(plan)
    full = [[recompute is Recompute.FULL for recompute in stage] for stage in blocks]
    counts = Counter(recompute for stage in blocks for recompute in stage)
    if settings.recomputed and len({sum(stage) for stage in full}) > 1:
        by_stage = ", ".join(str(sum(stage)) for stage in full)
        instead = f"these settings: {settings.recomputed} of each"
        yield f"full recomputation of unlike numbers of blocks by stage ({by_stage}; {instead})"
    elif settings.recomputed and any(stage != sorted(stage, reverse=True) for stage in full):
        yield "which blocks of a stage compute all again: here the first ones, or all"
    if which is Recompute.SELECTIVE and counts[which] < settings.blocks:
        yield f"selective recomputation of {counts[which]} of {settings.blocks} blocks: here of all"
    if which is Recompute.FULL and (some := counts[Recompute.SELECTIVE]):
        yield f"selective recomputation of {some} blocks beside full: here of none"


def plan_from(settings: Settings, graph: ModelGraph) -> Plan:
    """The plan that software makes of its settings: blocks alone compute again, kinds without experts spread none.

    Raises:
        InputError: the stages do not have the model's blocks.
    """
    blocks = sum(layer.role is Role.BLOCK for layer in graph.layers)
    if settings.blocks != blocks:
        raise InputError("blocks of all stages", settings.blocks, f"{graph.name} has {blocks}.")
    stages, place = [], 0
    first = next((at for at, layer in enumerate(graph.layers) if layer.role is Role.BLOCK), len(graph.layers))
    for number, stage in enumerate(settings.stages):
        end = place + stage.blocks + (max(first - place, 0) if stage.before else 0)
        end = len(graph.layers) if number == len(settings.stages) - 1 else end
        layers = graph.layers[place:end]
        done = [0]
        runs = list[LayerRun]()
        for role, alike in groupby(layers, key=lambda layer: layer.role):
            group = list(alike)
            runs += layer_runs(group, [_of_layer(settings, graph.kind_of(layer), role, done) for layer in group])
        stages.append(Stage(tuple(runs)))
        place = end
    return Plan(
        PLAN_VERSION, graph.name, settings.devices, settings.batch, settings.microbatches, settings.schedule,
        settings.precision or graph.precision, tuple(stages), virtual_stages=settings.virtual,
    )  # fmt: skip


def _of_layer(settings: Settings, kind: LayerKind, role: Role, done: list[int]) -> Strategy:
    """The strategy of the next layer of a stage, ``done[0]`` blocks of which compute all again so far."""
    main = settings.strategy
    changes: dict[str, object] = {}
    if not kind.expert_parameters:
        changes |= {"expert": 1, "expert_tensor": 0}
    if not kind.sequence_parallel or kind.dims.sequence % main.tensor:
        changes |= {"sequence_parallel": False}
    enough = main.recompute is Recompute.FULL and 0 < settings.recomputed <= done[0]
    if role is not Role.BLOCK or main.recompute not in kind.kept or enough:
        changes |= {"recompute": Recompute.NONE}
    done[0] += role is Role.BLOCK
    return replace(main, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class World:
    """What a file is read for."""

    file: str  # its name
    devices: int  # of the cluster
    blocks: int  # of the model
    batch: int = 0  # samples a step, for files that do not say; 0: unknown


def filled(stated: Mapping[str, object], world: World, stages: Sequence[StageBlocks] = ()) -> Settings:
    """Settings from what a file says, the rest as the software derives it: ZeRO and replicas take the devices that are
    left, and of batch, samples and micro-batches the third follows from two.

    Args:
        said: of ``Settings`` and ``Strategy`` by name, ``pipeline`` and ``virtual`` among them.
        world: devices, blocks and batch.
        stages: where the layers are; shared out evenly if not given.

    Raises:
        InputError: degrees that do not multiply to the devices, or a batch that does not divide.
    """

    def number(name: str, default: int = 1) -> int:
        value = stated.get(name, default)
        assert isinstance(value, int)
        return value

    devices, stage, context = number("devices", world.devices), number("zero_stage", 0), number("context")
    pipeline, virtual, tensor = number("pipeline"), number("virtual"), number("tensor")
    left, more = divmod(devices, pipeline * tensor * context)
    data = number("data") if stage else left
    if more or left % data:
        sizes = f"pipeline {pipeline}, tensor {tensor}, context {context}, replicas {data}"
        raise InputError(f"{world.file}, degrees", sizes, f"Their product must divide the {devices} devices.")
    zero = left // data
    if number("zero", -1) not in (-1, zero):
        remedy = f"{devices} devices leave {zero} for it: give --gpus of the run."
        raise InputError(f"{world.file}, shards", stated["zero"], remedy)
    sliced_experts = number("expert") > 1 and tensor > 1 and number("expert_tensor", 0) == 1
    strategy = Strategy(
        data=data, zero=zero, zero_stage=stage if zero * context > 1 else 0, tensor=tensor, context=context,
        sequence_parallel=bool(stated.get("sequence_parallel")) and tensor > 1, expert=number("expert"),
        expert_tensor=int(sliced_experts), ulysses=bool(stated.get("ulysses")) and context > 1,
        recompute=Recompute(str(stated.get("recompute", "none"))), offload=Offload(str(stated.get("offload", "none"))),
    )  # fmt: skip
    batch, samples, count = _batch(stated, world, data * zero)
    again = number("recomputed", 0)
    each = max((stage.blocks for stage in stages), default=world.blocks // (pipeline * virtual))
    return Settings(
        devices=devices, precision=str(stated.get("precision", "")), batch=batch, samples=samples, microbatches=count,
        strategy=strategy, recomputed=0 if again >= each else again, deepspeed=bool(stated.get("deepspeed")),
        schedule=_schedule(stated, pipeline, virtual), virtual=virtual,
        stages=tuple(stages) or even_stages(world, pipeline * virtual),
    )  # fmt: skip


def _schedule(stated: Mapping[str, object], pipeline: int, virtual: int) -> Schedule:
    if pipeline == 1:
        return Schedule.ONE_F_ONE_B
    usual = Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B
    return schedule_named(str(stated.get("schedule", usual)))


def _batch(stated: Mapping[str, object], world: World, replicas: int) -> tuple[int, int, int]:
    batch, samples, count = (int(str(stated.get(name) or 0)) for name in ("batch", "samples", "microbatches"))
    batch = batch or samples * count * replicas or world.batch
    if not batch:
        raise InputError(f"{world.file}, batch", None, "The file does not say how many samples a step has: --batch.")
    samples = samples or batch // (replicas * (count or 1))
    count = count or batch // max(replicas * samples, 1)
    if samples * replicas * count != batch:
        value = f"{batch} samples, {samples} on each of {replicas} replicas in {count} micro-batches"
        raise InputError(f"{world.file}, batch", value, "They do not multiply to the batch; give --gpus of the run.")
    return batch, samples, count


def even_stages(world: World, count: int, first: int = 0, last: int = 0) -> tuple[StageBlocks, ...]:
    """Blocks in so many stages, the ends smaller by ``first`` and ``last``, the first stages with one more.

    Raises:
        InputError: more stages than blocks.
    """
    each, more = divmod(world.blocks + first + last, count)
    sizes = [each + (place < more) for place in range(count)]
    sizes[0] -= first
    sizes[-1] -= last
    if count > 1 and min(sizes) < 0:
        raise InputError(f"{world.file}, stages", count, f"The model has {world.blocks} blocks.")
    return tuple(StageBlocks(size, place == 0, place == count - 1) for place, size in enumerate(sizes))
