"""From a user's model to one that runs in parallel: capture, profile (or read what was profiled), plan, apply."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn

from galvatron_lite.analysis.uncaptured import check_uncaptured, uncaptured_plan
from galvatron_lite.errors import InputError, TraceError
from galvatron_lite.launch.commands import PLAN_VARIABLE
from galvatron_lite.launch.error_reports import listen
from galvatron_lite.model.batch import batch_size
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.example import example_batch
from galvatron_lite.model.graph import ModelGraph, dead_note
from galvatron_lite.model.trace_meta import check_model, precision_of
from galvatron_lite.model.trace_record import ValuesReadError
from galvatron_lite.model.trace_run import gives_loss, mean_of_outputs
from galvatron_lite.parallelism.cyclic.rules import CyclicRule
from galvatron_lite.plans.describe import plan_line
from galvatron_lite.plans.execution import check_runs
from galvatron_lite.plans.io import check_plan, file_named, read_plan
from galvatron_lite.plans.notes import other_size
from galvatron_lite.plans.schema import Mode, Plan, TrainedBy
from galvatron_lite.request import mode_named, texts
from galvatron_lite.runtime.adapt.door import learnt, opened, planned_from, settings_of, steer
from galvatron_lite.runtime.batch_checks import GlobalBatches
from galvatron_lite.runtime.live.options import seen_of
from galvatron_lite.runtime.live.watching import watch_training
from galvatron_lite.runtime.switch.randomness import RandomStates
from galvatron_lite.saying import say
from galvatron_lite.world import join, pick_device, world_size

if TYPE_CHECKING:
    from galvatron_lite.model.graph import Layer
    from galvatron_lite.plans.phases import PhasedPlan
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.request import PlanArguments
    from galvatron_lite.runtime.adapt.schema import Adapt
    from galvatron_lite.runtime.cyclic.model import CyclicModel
    from galvatron_lite.runtime.deepspeed.engine import DeepSpeedModel
    from galvatron_lite.runtime.engine import ParallelModel
    from galvatron_lite.runtime.inference import InferenceModel
    from galvatron_lite.runtime.loss_weight import LossWeight
    from galvatron_lite.verify.launched import Verifier
    from galvatron_lite.verify.trial.check import Findings

LossFn = Callable[[Any, Any], torch.Tensor]


def auto_parallelize(
    model: nn.Module,
    batch: Any = None,
    *,
    plan: Plan | PhasedPlan | str | Path | None = None,
    profile: Profile | str | Path | None = None,
    mem: str | int = "95%",
    fix: str | Sequence[str] | Mapping[str, object] = (),
    forbid: str | Sequence[str] = (),
    tolerance: float | None = None,
    global_batch: int | None = None,
    local_batch: bool = False,
    loss_fn: LossFn | None = None,
    blocks: Any = None,
    precision: str | None = None,
    init_fn: Callable[[nn.Module], None] | None = None,
    seed: int = 0,
    device: str = "auto",
    folder: Path = Path("profiles"),
    mode: Mode | str | None = None,
    delay: str | None = None,
    backend: str | None = None,
    adapt: Adapt | bool = False,
    expert_capacity: float | None = None,
    compile: bool | str = False,  # noqa: A002 - torch's word
    randomness: str = "own",
    timeout: float | None = None,
    log: Path | str | None = None,
    live: bool = False,
    profile_steps: range | None = None,
    verify: bool = False,
    loss_weight: LossWeight | None = None,
    loss_reduction: str = "mean",
    check: bool = True,
) -> ParallelModel | CyclicModel | InferenceModel | DeepSpeedModel:
    """The model, split over the launched world.

    With nothing but the model: captures it on an example batch, measures a profile on this world (or reads the one
    measured here before), plans for this world and applies the plan. Every rank calls it alike.

    Args:
        model: an unchanged ``nn.Module``; on the meta device if it is too big for one device.
        batch: an example batch of global size; a zoo or transformers model can make its own.
        plan: a plan, or its file, or those of a plan in phases (``galvatron plan --phases``), under which the model
            switches by itself; that of ``galvatron launch --plan`` if not given, else found here.
        profile: a profile, or its file; read from ``folder`` or measured if not given.
        mem: budget a device, as for ``galvatron plan``.
        fix: what is not left to the search (``"pp=2"``, ``{"tp": 2}``), as for ``galvatron_lite.plan``.
        forbid: dimensions that no layer may use (``"tp"``), as for ``galvatron_lite.plan``.
        tolerance: share of the step time by which the plan may be slower than the fastest, as for
            ``galvatron_lite.plan``; its own if not given.
        global_batch: samples a step; those of ``batch`` (of all ranks' with ``local_batch``) if not given.
        local_batch: whether each rank gives batches of its own, of equal shapes, as a ``DistributedSampler`` draws
            them: a step's batch is theirs in the order of ranks. If not, every rank gives the same global batch.
        loss_fn: ``loss_fn(output, batch)``, for a model whose output is not or does not hold its loss.
        blocks: where the repeated blocks are, if they are not found.
        precision: ``fp32``, ``bf16`` or ``fp16`` compute; that of the parameters if not given.
        init_fn: initialises one module of a model on the meta device.
        seed: of that initialisation.
        device: ``auto``, ``cpu`` or ``cuda``.
        folder: where profiles are kept; one process alone, which can choose little, measures only briefly.
        mode: ``training`` or ``inference``; that of the plan, or training, if not given.
        delay: whether a plan that is found here may delay gradients, which changes the training rule: ``cyclic`` allows
            it where it is faster; ``cdp-v1`` or ``cdp-v2`` asks for cyclic data parallelism by that rule. Not if not
            given.
        backend: what trains: ``galvatron``, or ``deepspeed`` with one ZeRO stage for all layers; that of the plan, or
            ``galvatron``, if not given.
        adapt: whether training is watched, and goes over to another plan where links, devices or memory turn out to be
            others than profiled (docs/adapting.md); or how.
        expert_capacity: experts of a mixture drop what is beyond, see ``ParallelModel``; nothing if not given.
        compile: whether ``torch.compile`` compiles the forward of every block: ``auto`` measures a block of each kind
            both ways in the first step, and keeps what is faster; a name is that of another backend of its than
            inductor. A block that does not compile runs as it is, which a warning tells.
        randomness: ``own``: every rank draws dropout and other random numbers for its own share. ``same``: all plans
            draw what one process does (``galvatron_lite.same_randomness``), from ``seed``: each number is
            decided by its step, module and sample. It takes more time, and memory where attention drops weights.
        timeout: seconds after which a step that waits for another rank is an error that names it; if not given, those
            of torch's process groups (1800 with gloo, 600 with NCCL), under plans with cyclic data parallelism or
            branches 600.
        log: folder that the run is written to, for ``galvatron diagnose`` and TensorBoard (docs/watch.md); a run that
            is started again goes on in it. Not written if not given.
        live: whether rank 0 shows, on standard error, how the run goes beside what was predicted.
        verify: whether a fork of rank 0 first does a step of the plan without data, and matches what all ranks send
            (docs/verify.md); it takes seconds to minutes, and rank 0 says what came of it.
        profile_steps: steps of which ``torch.profiler`` makes a trace, into ``log``: ``range(10, 13)``.
        loss_weight: ``loss_weight(batch)`` of some samples: what their mean loss is a mean over, such as the number of
            labels that count; found by itself for mean cross-entropies over an entry of the batch
            (docs/training-loops.md).
        loss_reduction: ``mean``, or ``sum`` for a loss that is a sum over samples.
        check: whether rank 0 first tries, on a small copy of the model and in seconds, that the loss and the gradients
            of the example batch are those of its shares; ``verify`` does so, too.

    Returns:
        An object used like the model, with ``train_step(batch, optimizer)``. For inference one that is called like the
        model and gives its own outputs on every rank, without gradients.

    Raises:
        LaunchError: the world's size is not the plan's, or there is no GPU.
        InputError: the model, batch or a file cannot be used, or the delay is none of these; or the plan would not
            train the model as one process does: its loss, parameters read outside of their layers, or buffers.
        InfeasibleError: no plan fits the budget.
        VerificationError: ``verify``, and a check failed; on every rank.
    """
    check_model(model)
    listen()
    verifier = launched_verifier(model, batch, loss_fn) if verify else None  # it forks: before the world is joined
    place, seen = pick_device(device), seen_of(log, live, profile_steps)
    randomness_before = RandomStates(place)
    join(place)
    example = batch if batch is not None else example_batch(model)
    if local_batch and batch is not None:
        example = GlobalBatches(place, local=True)(batch)
    uncaptured: TraceError | None = None
    try:
        layers = discover_layers(model, example, blocks)
    except ValuesReadError as error:
        layers, uncaptured = discover_layers(model, None, blocks), error
    plan = os.environ.get(PLAN_VARIABLE) if plan is None else plan
    settings, (phased, first) = settings_of(adapt, mem), opened(plan)
    chosen = _given_plan(first, backend)
    if chosen is not None:
        _check_unplanned({"fix": fix, "forbid": forbid, "tolerance": tolerance})
    _check_delay(chosen, delay)
    wanted = mode_named(mode or (Mode.TRAINING if chosen is None else chosen.mode))
    if wanted is Mode.TRAINING and not any(parameter.requires_grad for parameter in model.parameters()):
        remedy = "Let at least one train (model.requires_grad_()), or give mode='inference'."
        raise InputError("model", "no parameter that requires a gradient", remedy)
    findings = None
    if wanted is Mode.TRAINING and (check or verify):
        findings = _tried_out(model, example, layers, loss_fn, loss_weight, loss_reduction, init_fn)
    known = None
    if uncaptured is not None and (wanted is Mode.INFERENCE or settings is not None):
        raise uncaptured
    if uncaptured is None and (chosen is None or settings is not None):
        known = _profile(profile, model, example, _goal(loss_fn, wanted, model, example), blocks, precision, folder)
    if chosen is None and known is not None:
        _warn(_on_dead(known.graph) if dist.get_rank() == 0 else ())
        source, budget = planned_from(known, learnt(settings, known), mem)
        asked: PlanArguments = {"mem": budget, "batch": global_batch or batch_size(example), "gpus": world_size()}
        if backend is not None:
            asked["backend"] = backend
        pinned: Any = {"fix": texts("fix", fix), "forbid": texts("forbid", forbid)}
        for name, words in ({} if findings is None else findings.pins()).items():
            pinned[name] = (*words, *pinned[name])
        if settings is not None:
            kept = (*settings.fix, *pinned["fix"]), (*settings.forbid, *pinned["forbid"])
            settings = replace(settings, fix=kept[0], forbid=kept[1])
        pinned |= {} if tolerance is None else {"tolerance": tolerance}
        try:
            chosen = _found_plan(source, {**asked, **pinned, **_plan_arguments(wanted, delay, pinned["fix"])}, delay)
        except InputError as error:
            why = "; ".join(() if findings is None else findings.notes())
            if not why or (not fix and not forbid):
                raise
            remedy = f"{why[:1].upper()}{why[1:]}. {error.remedy}"
            raise InputError(error.field, error.value, remedy) from error
        if dist.get_rank() == 0:
            say(f"plan: {plan_line(chosen)}")
            notes = () if chosen.provenance is None else chosen.provenance.notes
            for note in (*notes, *(() if findings is None else findings.notes())):
                say(f"note: {note}")
    if chosen is None and uncaptured is not None:
        pinned = {"fix": texts("fix", fix), "forbid": texts("forbid", forbid)}
        samples = global_batch or batch_size(example)
        chosen = _agreed(lambda: _without_graph(model, layers, samples, mem, precision, **pinned))
        if dist.get_rank() == 0:
            say(f"plan: {plan_line(chosen)}")
            what = f"{uncaptured.field} ({uncaptured.value})"
            say(f"note: values of tensors decide what {what} runs: costs are not known, and only plans of data "
                "parallelism, ZeRO 1 and full recomputation run it")  # fmt: skip
    assert chosen is not None
    if uncaptured is not None:
        check_uncaptured(chosen, uncaptured)
    if findings is not None:
        for each in (chosen,) if phased is None else (phase.plan for phase in phased.phases):
            findings.check(each)
    _warn(_on_size(chosen, model))
    if verifier is not None:
        verifier.check(chosen)
    asks: dict[str, Any] = {"precision": precision, "init_fn": init_fn, "seed": seed, **_compiling(chosen, compile)}
    weight = loss_weight if findings is None or loss_weight is not None else findings.weight
    asks |= {"loss_weight": weight, "loss_reduction": loss_reduction} if wanted is Mode.TRAINING else {}
    if findings is not None and findings.synced:
        asks |= _syncing(chosen, findings.synced)
    asks |= {} if expert_capacity is None else _with_capacity(chosen, expert_capacity)
    asks |= _randomness(chosen, randomness)
    asks |= {} if timeout is None else _with_timeout(chosen, timeout)
    asks |= _local_batch(chosen) if local_batch else {}
    randomness_before.restore()  # as if nothing had been measured or traced
    with file_named(plan):
        made = _kind_of(chosen)(model, chosen, layers, example, loss_fn=loss_fn, device=place, **asks)
    if findings is not None:
        made.plan_check = findings.check
    steer(made, phased, settings, known)
    watch_training(made if wanted is Mode.TRAINING else None, seen, known)
    return made if wanted is Mode.TRAINING else _for_inference(made)


def _without_graph(
    model: nn.Module, layers: Sequence[Layer], batch: int, mem: str | int, precision: str | None, **pins: Sequence[str]
) -> Plan:
    """A plan of a model whose values decide what it runs."""
    from galvatron_lite.cluster.budget import budget_on
    from galvatron_lite.cluster.probe import probe

    return uncaptured_plan(
        type(model).__name__, layers, size=sum(one.nbytes for one in model.parameters()), devices=world_size(),
        batch=batch, budget=budget_on(probe(), mem).least, precision=precision or precision_of(model), **pins,
    )  # fmt: skip


def _tried_out(
    model: nn.Module,
    batch: Any,
    layers: Sequence[Layer],
    loss_fn: LossFn | None,
    weight: LossWeight | None,
    reduction: str,
    init_fn: Callable[[nn.Module], None] | None,
) -> Findings:
    """What rank 0 finds out of the loss, on every rank."""
    from galvatron_lite.runtime.loss_weight import check_reduction
    from galvatron_lite.verify.trial.check import try_model

    check_reduction(reduction, weight)
    options: dict[str, Any] = {"loss_fn": loss_fn, "weight": weight, "reduction": reduction, "init_fn": init_fn}
    findings: Findings = _agreed(lambda: try_model(model, batch, layers, **options))
    if dist.get_rank() == 0:
        _warn(findings.warnings())
    return findings


def launched_verifier(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> Verifier:
    """What verifies the plan at launch: the checks that need no values."""
    from galvatron_lite.verify.checks import launch_checks
    from galvatron_lite.verify.launched import Verifier

    return Verifier(model, batch, loss_fn, launch_checks)


def _with_capacity(plan: Plan, capacity: float) -> dict[str, Any]:
    """The option that has experts drop tokens."""
    if plan.cyclic is not None or plan.backend is not TrainedBy.GALVATRON:
        raise InputError("expert_capacity", capacity, "Only plans of synchronous training with galvatron drop tokens.")
    return {"expert_capacity": capacity}


def _randomness(plan: Plan, wanted: str) -> dict[str, Any]:
    """The option that decides random numbers."""
    if wanted != "own" and (plan.cyclic is not None or plan.backend is not TrainedBy.GALVATRON):
        raise InputError("randomness", wanted, "Under such a plan every rank draws for itself: take 'own'.")
    return {} if wanted == "own" else {"randomness": wanted}


def _with_timeout(plan: Plan, timeout: float) -> dict[str, Any]:
    """How long a step waits for another rank."""
    if not timeout > 0:
        raise InputError("timeout", timeout, "It is in seconds, and more than 0.")
    if plan.backend is TrainedBy.DEEPSPEED:
        raise InputError(
            "timeout", timeout, "DeepSpeed has its own: give it to deepspeed.init_distributed(timeout=...)."
        )
    return {"timeout": timeout}


def _local_batch(plan: Plan) -> dict[str, Any]:
    """The option that puts the ranks' batches together."""
    if plan.cyclic is not None or plan.backend is not TrainedBy.GALVATRON:
        raise InputError("local_batch", True, "Under such a plan every rank gives the same global batch: leave it out.")
    return {"local_batch": True}


def _check_unplanned(arguments: Mapping[str, Any]) -> None:
    """Refuse what only a search can keep, where the plan is given."""
    for name, value in arguments.items():
        if value not in (None, (), {}, []):
            raise InputError(name, str(value), "The plan is given: leave one of the two out.")


def _syncing(plan: Plan, rules: Mapping[str, str]) -> dict[str, Any]:
    """The option that keeps buffers alike that forward passes update; where what trains has none, a warning."""
    if plan.cyclic is None and plan.backend is TrainedBy.GALVATRON and not plan.branches:
        return {"synced_buffers": rules}
    if dist.get_rank() == 0:
        _warn([f"Forward passes update {', '.join(rules)} from the samples: under this plan each rank keeps its own."])
    return {}


def _compiling(plan: Plan, wanted: bool | str) -> dict[str, Any]:
    """What compiles blocks, where something is to."""
    if wanted is False:
        return {}
    if plan.cyclic is not None or plan.backend is TrainedBy.DEEPSPEED:
        raise InputError("compile", wanted, "Leave it out: blocks are not compiled under such a plan.")
    return {"compile": wanted}


def _for_inference(model: ParallelModel | CyclicModel | DeepSpeedModel) -> InferenceModel:
    from galvatron_lite.runtime.engine import ParallelModel
    from galvatron_lite.runtime.inference import InferenceModel

    if not isinstance(model, ParallelModel):
        what = "of cyclic data parallelism" if model.plan.cyclic else f"for {model.plan.backend.value}"
        raise InputError("mode", "inference", f"The plan is one {what}, which only trains.")
    return InferenceModel(model)


def _kind_of(plan: Plan) -> type[ParallelModel] | type[CyclicModel] | type[DeepSpeedModel]:
    """What runs a plan."""
    if plan.backend is TrainedBy.DEEPSPEED:
        from galvatron_lite.runtime.deepspeed.engine import DeepSpeedModel

        return DeepSpeedModel
    if plan.cyclic is not None:
        from galvatron_lite.runtime.cyclic.model import CyclicModel

        return CyclicModel
    if plan.branches:
        from galvatron_lite.runtime.branches.engine import BranchedModel

        return BranchedModel
    from galvatron_lite.runtime.engine import ParallelModel

    return ParallelModel


def _given_plan(plan: Plan | str | Path | None, backend: str | None) -> Plan | None:
    """The plan that was given, for the backend that was."""
    known = [one.value for one in TrainedBy]
    if backend not in (None, *known):
        raise InputError("backend", str(backend), f"Give {' or '.join(known)}, or leave it out.")
    plan = os.environ.get(PLAN_VARIABLE) if plan is None else plan
    if plan is None:
        return None
    given = check_plan(plan) if isinstance(plan, Plan) else read_plan(Path(plan))
    return check_runs(given if backend is None else replace(given, backend=TrainedBy(backend)))


def _plan_arguments(mode: Mode, delay: str | None, fix: Sequence[str]) -> PlanArguments:
    """What the planner is told of the mode and of delayed gradients, beside other pins."""
    rules = [rule.value for rule in CyclicRule]
    if mode is Mode.INFERENCE:
        if delay is not None:
            raise InputError("delay", delay, "Inference has no gradients: leave it out.")
        return {"mode": mode, "fix": fix}
    rule = (f"rule={delay}",) if delay in rules else ()
    return {"mode": mode, "fix": (*fix, *rule), "allow_delay": delay is not None}


def _check_delay(plan: Plan | None, delay: str | None) -> None:
    """Refuse a delay that is none of the known values, or that is not a given plan's."""
    rules = [rule.value for rule in CyclicRule]
    if delay not in (None, "cyclic", *rules):
        raise InputError("delay", str(delay), f"Give 'cyclic', {' or '.join(map(repr, rules))}, or leave it out.")
    if plan is None or delay is None:
        return
    own = None if plan.cyclic is None else plan.cyclic.rule.value
    if own is None or delay not in ("cyclic", own):
        said = "delays no gradients" if own is None else f"is one of {own}"
        raise InputError(
            "delay", delay, f"The plan that was given {said}. Leave the plan out to find one, or the delay."
        )


def _found_plan(profile: Profile, arguments: PlanArguments, delay: str | None) -> Plan:
    """Rank 0's plan. Where the delay that is wanted is why there is none, the error speaks of it."""
    try:
        return _agreed_plan(profile, arguments)
    except InputError as error:
        if delay is None or error.field != "--fix schedule":
            raise
        shared = next((tie for tie in profile.graph.ties if tie.parameters), None)
        if shared is None or "share parameters" not in error.remedy:
            raise InputError("delay", delay, f"There is no such plan: {error.remedy}") from error
        remedy = (
            f"{shared.first} and {shared.second} share parameters, which stages would use at different versions. Untie "
            "them (give each parameters of its own), or leave the delay out."
        )
        raise InputError("delay", delay, remedy) from error


def _agreed_plan(profile: Profile, arguments: PlanArguments) -> Plan:
    from galvatron_lite.api import plan as find

    plan: Plan = _agreed(lambda: find(profile, **arguments))
    return plan


def _agreed(call: Callable[[], Any]) -> Any:
    """What the call gives on rank 0, or its error, on every rank, so that no rank can differ."""
    box: list[Any] = _tried(call) if dist.get_rank() == 0 else [None, None]
    dist.broadcast_object_list(box)
    if box[1] is not None:
        raise box[1]
    return box[0]


def _tried(call: Callable[[], Any]) -> list[Any]:
    try:
        return [call(), None]
    except Exception as error:
        return [None, error]


def _goal(loss_fn: LossFn | None, mode: Mode, model: nn.Module, batch: Any) -> LossFn | None:
    """What is profiled at the model's end: its loss; where it has none and is only run forward, all that it gives."""
    training = mode is Mode.TRAINING or loss_fn is not None
    return loss_fn if training or gives_loss(model, batch) else mean_of_outputs


def _profile(
    profile: Profile | str | Path | None,
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None,
    blocks: Any,
    precision: str | None,
    folder: Path,
) -> Profile:
    from galvatron_lite.capture.trace import trace
    from galvatron_lite.profiler.kept_profiles import kept_profile, other_hardware, profile_name
    from galvatron_lite.profiler.measure import measure_profile
    from galvatron_lite.profiler.measure_tasks import agree, notices
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.profiler.store import read_profile
    from galvatron_lite.runtime.branches.measure import branch_seconds

    if profile is not None:
        known = profile if isinstance(profile, Profile) else read_profile(Path(profile))
        _warn(other_hardware(known))
        return known
    graph = trace(model, batch, loss_fn=loss_fn, blocks=blocks, precision=precision)
    cached: Profile | None = agree(kept_profile(model, graph, folder) if dist.get_rank() == 0 else None)
    if cached is not None:
        return cached
    alone, begun = world_size() == 1, monotonic()
    how = "measuring it briefly, as one device leaves little to choose" if alone else "measuring"
    measured = measure_profile(
        model, batch, loss_fn=loss_fn, blocks=blocks, precision=precision, name=profile_name(model), folder=folder,
        remember=False, brief=alone, graph=graph, branch_seconds=branch_seconds,
        progress=notices(f"no profile of this model on {world_size()} process(es) in {folder}/ yet; {how}"),
    )  # fmt: skip
    if dist.get_rank() == 0:
        say(f"measured in {monotonic() - begun:.0f} s; the next run reads it from {folder}/")
    return measured


def _on_size(plan: Plan, model: nn.Module) -> tuple[str, ...]:
    return other_size(plan, sum(one.numel() for one in model.parameters())) if dist.get_rank() == 0 else ()


def _on_dead(graph: ModelGraph) -> tuple[str, ...]:
    return dead_note(graph.dead, graph.parameters, "an output or the loss")


def _warn(messages: Sequence[str]) -> None:
    for message in messages:
        warnings.warn(message, stacklevel=4)
