"""A plan as other software can express it: one strategy for all blocks, pipeline stages, and the batch."""

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
"""Names of the layers around the blocks: embedding; norm, head and loss."""
_BLOCK_FIELDS = ("recompute", "expert", "expert_tensor", "sequence_parallel")
"""Fields of ``Strategy`` that software sets for blocks alone."""


@dataclass(frozen=True, slots=True)
class StageBlocks:
    """The blocks of one pipeline stage, and whether it has the layers before and after them."""

    blocks: int
    before: bool
    after: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a settings file says of a plan."""

    devices: int
    precision: str
    batch: int  # samples a step
    samples: int  # of a micro-batch, on one device
    microbatches: int  # a step
    strategy: Strategy  # of the blocks
    recomputed: int = 0  # blocks of each stage with full recomputation; 0: all of them, if the strategy has it
    schedule: Schedule = Schedule.ONE_F_ONE_B
    virtual: int = 1  # stages of each group of devices
    stages: tuple[StageBlocks, ...] = ()
    deepspeed: bool = False  # whether DeepSpeed's engine trains, whatever the software

    @property
    def pipeline(self) -> int:
        """The pipeline degree."""
        return len(self.stages) // self.virtual

    @property
    def blocks(self) -> int:
        """Blocks of all stages."""
        return sum(stage.blocks for stage in self.stages)

    def choices(self) -> dict[str, object]:
        """Every choice by name."""
        others = ("devices", "strategy", "stages", "deepspeed")
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in others}
        stages = ", ".join(f"{stage.blocks}{' and edges' * (stage.before or stage.after)}" for stage in self.stages)
        strategy = {field.name: getattr(self.strategy, field.name) for field in fields(Strategy)}
        return {**values, "pipeline": self.pipeline, "blocks of stages": stages, **strategy}


def settings_of(plan: Plan) -> Settings:
    """The settings that come nearest to a plan; ``simplified`` lists the differences."""
    main, recompute = _main_strategy(plan), _recompute_by_stage(plan)
    counts = Counter(option for stage in recompute for option in stage)
    most = next((option for option in (Recompute.FULL, Recompute.SELECTIVE) if counts[option]), Recompute.NONE)
    partial = most is Recompute.FULL and counts[most] < counts.total()
    return Settings(
        devices=plan.devices, precision=plan.precision, batch=plan.global_batch,
        samples=plan.microbatch // main.batch_degree, microbatches=plan.microbatches,
        strategy=replace(main, recompute=most) if counts else main,
        recomputed=max(stage.count(Recompute.FULL) for stage in recompute) if partial else 0,
        schedule=plan.schedule if len(plan.stages) > 1 and plan.cyclic is None else Schedule.ONE_F_ONE_B,
        virtual=plan.virtual_stages, stages=stage_blocks(plan), deepspeed=plan.backend is TrainedBy.DEEPSPEED,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _RunPart:
    """The blocks of a run, or one layer around them; a run has both if their strategies are equal."""

    run: LayerRun
    count: int
    edge: str = ""  # name of the layer; empty for blocks


def _run_parts(plan: Plan) -> list[list[_RunPart]]:
    """The parts of all runs, by stage."""
    stages = []
    for stage in plan.stages:
        parts = list[_RunPart]()
        for run in stage.runs:
            edges = [name for name in EDGES if name in (run.first, run.last)]
            parts += [_RunPart(run, 1, EDGES[0])] * (EDGES[0] in edges)
            parts += [_RunPart(run, run.count - len(edges))] * (run.count > len(edges))
            parts += [_RunPart(run, 1, EDGES[1])] * (EDGES[1] in edges)
        stages.append(parts)
    return stages


def _main_strategy(plan: Plan) -> Strategy:
    """The strategy of most blocks, or of most layers if there are no blocks; the first of equal ones."""
    counts: Counter[Strategy] = Counter()
    parts = [part for stage in _run_parts(plan) for part in stage]
    for part in [part for part in parts if not part.edge] or parts:
        counts[part.run.strategy] += part.count
    return counts.most_common(1)[0][0] if counts else Strategy()


def stage_blocks(plan: Plan) -> tuple[StageBlocks, ...]:
    """The pipeline stages in the order of the model; a single one for delayed gradients."""
    stages = []
    for parts in _run_parts(plan):
        edges = {part.edge for part in parts}
        blocks = sum(part.count for part in parts if not part.edge)
        stages.append(StageBlocks(blocks, *(name in edges for name in EDGES)))
    if plan.cyclic is not None:
        return (StageBlocks(sum(stage.blocks for stage in stages), before=True, after=True),)
    return tuple(stages)


def _recompute_by_stage(plan: Plan) -> list[list[Recompute]]:
    """The recomputation of each block of each stage."""
    return [
        [part.run.strategy.recompute for part in stage if not part.edge for _ in range(part.count)]
        for stage in _run_parts(plan)
    ]


def simplified(plan: Plan, settings: Settings) -> Iterator[str]:
    """What of a plan its settings do not express, a line each."""
    if plan.mode is not Mode.TRAINING:
        yield "inference: the file is of a training run"
    if plan.branches:
        yield f"branches on devices of their own: {', '.join(branch.name for branch in plan.branches)}"
    if plan.cyclic is not None:
        yield f"delayed gradients ({plan.cyclic.rule.value}, {plan.cyclic.setting.value}), and its stages"
    main = settings.strategy
    yield from (f"{dimension.means} ({dimension.name} {degree})" for dimension, degree in added_degrees(main))
    for part in (part for stage in _run_parts(plan) for part in stage):
        run = part.run
        ignored = _BLOCK_FIELDS if part.edge else ("recompute",)
        strategy = replace(run.strategy, **{name: getattr(main, name) for name in ignored})
        if strategy != main:
            layers = part.edge or (run.first if run.first == run.last else f"{run.first} … {run.last}")
            yield f"{layers}: {strategy}, instead of {main}"
    yield from _simplified_recompute(plan, settings)


def _simplified_recompute(plan: Plan, settings: Settings) -> Iterator[str]:
    recompute, blocks = settings.strategy.recompute, _recompute_by_stage(plan)
    full = [[option is Recompute.FULL for option in stage] for stage in blocks]
    counts = Counter(option for stage in blocks for option in stage)
    if settings.recomputed and len({sum(stage) for stage in full}) > 1:
        by_stage = ", ".join(str(sum(stage)) for stage in full)
        instead = f"these settings: {settings.recomputed} of each"
        yield f"full recomputation of unlike numbers of blocks by stage ({by_stage}; {instead})"
    elif settings.recomputed and any(stage != sorted(stage, reverse=True) for stage in full):
        yield "which blocks of a stage compute all again: here the first ones, or all"
    if recompute is Recompute.SELECTIVE and counts[recompute] < settings.blocks:
        yield f"selective recomputation of {counts[recompute]} of {settings.blocks} blocks: here of all"
    if recompute is Recompute.FULL and (selective := counts[Recompute.SELECTIVE]):
        yield f"selective recomputation of {selective} blocks beside full: here of none"


def plan_from(settings: Settings, graph: ModelGraph) -> Plan:
    """The plan by which software trains a model under its settings.

    Only blocks are recomputed, and only kinds with experts spread them.

    Raises:
        InputError: the stages do not have the model's blocks.
    """
    is_block = [layer.role is Role.BLOCK for layer in graph.layers]
    if settings.blocks != sum(is_block):
        raise InputError("blocks of all stages", settings.blocks, f"{graph.name} has {sum(is_block)}.")
    stages, start = [], 0
    first_block = is_block.index(True) if any(is_block) else len(is_block)
    for number, stage in enumerate(settings.stages):
        end = start + stage.blocks + (max(first_block - start, 0) if stage.before else 0)
        end = len(graph.layers) if number == len(settings.stages) - 1 else end
        runs, blocks = list[LayerRun](), 0
        for _, group in groupby(graph.layers[start:end], key=lambda layer: layer.role):
            layers, strategies = list(group), list[Strategy]()
            for layer in layers:
                enough = settings.strategy.recompute is Recompute.FULL and 0 < settings.recomputed <= blocks
                recomputes = layer.role is Role.BLOCK and not enough
                strategies.append(_layer_strategy(settings.strategy, graph.kind_of(layer), recomputes=recomputes))
                blocks += layer.role is Role.BLOCK
            runs += layer_runs(layers, strategies)
        stages.append(Stage(tuple(runs)))
        start = end
    return Plan(
        PLAN_VERSION, graph.name, settings.devices, settings.batch, settings.microbatches, settings.schedule,
        settings.precision or graph.precision, tuple(stages), virtual_stages=settings.virtual,
    )  # fmt: skip


def _layer_strategy(main: Strategy, kind: LayerKind, *, recomputes: bool) -> Strategy:
    """The strategy of a layer; ``recomputes``: whether it is a block that is to be recomputed."""
    changes: dict[str, object] = {}
    if not kind.expert_parameters:
        changes |= {"expert": 1, "expert_tensor": 0}
    if not kind.sequence_parallel or kind.dims.sequence % main.tensor:
        changes |= {"sequence_parallel": False}
    if not recomputes or main.recompute not in kind.kept:
        changes |= {"recompute": Recompute.NONE}
    return replace(main, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class World:
    """What a settings file is read for."""

    file: str  # its name
    devices: int  # of the cluster
    blocks: int  # of the model
    batch: int = 0  # samples a step, for files that do not say; 0: unknown


def filled(stated: Mapping[str, object], world: World, stages: Sequence[StageBlocks] = ()) -> Settings:
    """Complete the settings of a file as its software does.

    ZeRO and replicas take the devices that are left. Two of batch, samples and micro-batches determine the third.

    Args:
        stated: values by the names of ``Settings`` and ``Strategy``, and ``pipeline``.
        world: devices, blocks and batch.
        stages: the layers of each stage; by default blocks are distributed evenly.

    Raises:
        InputError: degrees that do not multiply to the devices, or a batch that does not divide.
    """

    def number(name: str, default: int = 1) -> int:
        value = stated.get(name, default)
        assert isinstance(value, int)
        return value

    devices, stage, context = number("devices", world.devices), number("zero_stage", 0), number("context")
    pipeline, virtual, tensor = number("pipeline"), number("virtual"), number("tensor")
    left, remainder = divmod(devices, pipeline * tensor * context)
    data = number("data") if stage else left
    if remainder or left % data:
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
    recomputed = number("recomputed", 0)
    most_blocks = max((stage.blocks for stage in stages), default=world.blocks // (pipeline * virtual))
    usual = Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B
    schedule = schedule_named(str(stated.get("schedule", usual))) if pipeline > 1 else Schedule.ONE_F_ONE_B
    return Settings(
        devices=devices, precision=str(stated.get("precision", "")), batch=batch, samples=samples, microbatches=count,
        strategy=strategy, recomputed=0 if recomputed >= most_blocks else recomputed, schedule=schedule,
        virtual=virtual, stages=tuple(stages) or even_stages(world, pipeline * virtual),
        deepspeed=bool(stated.get("deepspeed")),
    )  # fmt: skip


def _batch(stated: Mapping[str, object], world: World, replicas: int) -> tuple[int, int, int]:
    """Samples a step, samples of a micro-batch on one device, and micro-batches."""
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
    """Distribute blocks evenly over stages; the first stages take the remainder.

    Args:
        world: for the number of blocks.
        count: number of stages.
        first: number of blocks that the first stage has less than others.
        last: the same of the last stage.

    Raises:
        InputError: more stages than blocks.
    """
    size, remainder = divmod(world.blocks + first + last, count)
    sizes = [size + (number < remainder) for number in range(count)]
    sizes[0] -= first
    sizes[-1] -= last
    if count > 1 and min(sizes) < 0:
        raise InputError(f"{world.file}, stages", count, f"The model has {world.blocks} blocks.")
    return tuple(StageBlocks(blocks, number == 0, number == count - 1) for number, blocks in enumerate(sizes))
