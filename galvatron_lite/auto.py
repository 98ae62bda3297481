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
from galvatron_lite.errors import LOG, InputError, TraceError
from galvatron_lite.launch.commands import PLAN_VARIABLE
from galvatron_lite.launch.error_reports import listen
from galvatron_lite.model.batch import batch_size, check_entries
from galvatron_lite.model.discover import Watched, discover_layers, watch_model
from galvatron_lite.model.example import example_batch
from galvatron_lite.model.graph import dead_note
from galvatron_lite.model.trace.meta import LOCAL_BATCH_NORMS, check_model, precision_of
from galvatron_lite.model.trace.record import ValuesReadError
from galvatron_lite.model.trace.run import gives_loss, mean_of_outputs
from galvatron_lite.parallelism.cyclic.rules import CyclicRule
from galvatron_lite.plans.describe import norm_notes, other_size, plan_line
from galvatron_lite.plans.io import check_runs, file_named
from galvatron_lite.plans.schema import Mode, Plan, TrainedBy
from galvatron_lite.request import mode_named, texts
from galvatron_lite.runtime.batch_checks import GlobalBatches
from galvatron_lite.runtime.checkpoint.plain import generators, put_generators
from galvatron_lite.runtime.monitor.attach import (
    adapt_settings,
    correct_inputs,
    earlier_corrections,
    observe,
    observer_options,
    split_phases,
    steer,
)
from galvatron_lite.runtime.parameters.use import check_unsplit
from galvatron_lite.runtime.peers import from_rank_zero
from galvatron_lite.world import join, pick_device, world_size

if TYPE_CHECKING:
    from galvatron_lite.model.graph import Layer
    from galvatron_lite.plans.phases import PhasedPlan
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.request import PlanArguments
    from galvatron_lite.runtime.cyclic.model import CyclicModel
    from galvatron_lite.runtime.deepspeed.engine import DeepSpeedModel
    from galvatron_lite.runtime.engine import ParallelModel
    from galvatron_lite.runtime.loss.weights import LossWeight
    from galvatron_lite.runtime.monitor.schema import Adapt
    from galvatron_lite.runtime.parameters.use import InferenceModel
    from galvatron_lite.verify.launched import Verifier
    from galvatron_lite.verify.trial.findings import Findings

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
    folder: Path | str = "profiles",
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
        loss_fn: ``loss_fn(output, batch)``, for a model whose output is not or does not hold its loss. Entries of the
            batch that the model's ``forward`` does not take, such as labels, are for this function alone.
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
    check_unsplit(model)
    check_model(model)
    check_entries(model, batch, loss_fn)
    listen()
    verifier = launched_verifier(model, batch, loss_fn) if verify else None  # it forks: before the world is joined
    place, seen = pick_device(device), observer_options(log, live, profile_steps)
    randomness_before = generators()
    join(place)
    example = batch if batch is not None else example_batch(model)
    if local_batch and batch is not None:
        example = GlobalBatches(place, local=True)(batch)
    uncaptured: TraceError | None = None
    watched: Watched | None = None
    try:
        watched = watch_model(model, example, blocks)
        layers = watched.layers
    except ValuesReadError as error:
        layers, uncaptured = discover_layers(model, None, blocks), error
    plan = os.environ.get(PLAN_VARIABLE) if plan is None else plan
    settings, (phased, first) = adapt_settings(adapt, mem), split_phases(plan)
    chosen = _plan_of_user(first, backend)
    _check_delay(chosen, delay)
    for name, value in (("fix", fix), ("forbid", forbid), ("tolerance", tolerance)):
        if chosen is not None and value not in (None, (), {}, []):
            raise InputError(name, str(value), "The plan is given: leave one of the two out.")
    wanted = mode_named(mode or (Mode.TRAINING if chosen is None else chosen.mode))
    trains = wanted is Mode.TRAINING
    if trains and chosen is not None and any(isinstance(module, LOCAL_BATCH_NORMS) for module in model.modules()):
        for note in norm_notes(chosen, [run.strategy for stage in chosen.stages for run in stage.runs]):
            _say(f"note: {note}")
    if trains and not any(parameter.requires_grad for parameter in model.parameters()):
        remedy = "Let at least one train (model.requires_grad_()), or give mode='inference'."
        raise InputError("model", "no parameter that requires a gradient", remedy)
    findings = None
    if trains and (check or verify):
        findings = _tried_out(model, example, layers, loss_fn, loss_weight, loss_reduction, init_fn)
    if uncaptured is not None and (not trains or settings is not None):
        raise uncaptured
    if uncaptured is not None and findings is not None and findings.keeps_batch and world_size() > 1:
        raise findings.without_plan(world_size(), uncaptured=f"{uncaptured.field} ({uncaptured.value})")
    profiled = None
    if uncaptured is None and (chosen is None or settings is not None):
        goal = loss_fn if trains or loss_fn is not None or gives_loss(model, example) else mean_of_outputs
        profiled = _profile(profile, model, example, goal, blocks, precision, Path(folder), watched)
    watched = None  # its copy of the model is not needed any more
    if chosen is None:
        pins = {"fix": texts("fix", fix), "forbid": texts("forbid", forbid)}
        samples = global_batch or batch_size(example)
        if profiled is None:
            assert uncaptured is not None
            chosen = _without_graph(model, layers, samples, mem, precision, pins, uncaptured)
        else:
            pinned = {} if findings is None else findings.pins()
            pins = {name: (*pinned.get(name, ()), *words) for name, words in pins.items()}
            if settings is not None:
                kept = (*settings.fix, *pins["fix"]), (*settings.forbid, *pins["forbid"])
                settings = replace(settings, fix=kept[0], forbid=kept[1])
            source, budget = correct_inputs(profiled, earlier_corrections(settings, profiled), mem)
            asked: Any = {"mem": budget, "batch": samples, "gpus": world_size(), "forbid": pins["forbid"]}
            asked |= _plan_arguments(wanted, delay, pins["fix"])
            asked |= {} if backend is None else {"backend": backend}
            asked |= {} if tolerance is None else {"tolerance": tolerance}
            typed = [f"--{name} {text}" for name in pins for text in texts(name, {"fix": fix, "forbid": forbid}[name])]
            chosen = _searched(source, asked, delay, findings, " ".join(typed))
    if uncaptured is not None:
        check_uncaptured(chosen, uncaptured)
    if findings is not None:
        for each in (chosen,) if phased is None else (phase.plan for phase in phased.phases):
            findings.check(each)
    _warn(other_size(chosen, sum(parameter.numel() for parameter in model.parameters())))
    if verifier is not None:
        verifier.check(chosen)
    given: dict[str, Any] = {"precision": precision, "init_fn": init_fn, "seed": seed}
    given |= _checked_options(
        chosen, expert_capacity=expert_capacity, randomness=randomness, local_batch=local_batch, compile=compile
    )  # fmt: skip
    if trains:
        weight = loss_weight if findings is None or loss_weight is not None else findings.weight
        given |= {"loss_weight": weight, "loss_reduction": loss_reduction}
    if findings is not None and findings.synced:
        given |= _syncing(chosen, findings.synced)
    if timeout is not None:
        _check_timeout(chosen, timeout)
        given["timeout"] = timeout
    put_generators(randomness_before)  # as if nothing had been measured or traced
    with file_named(plan):
        parallel = _kind_of(chosen)(model, chosen, layers, example, loss_fn=loss_fn, device=place, **given)
    if findings is not None:
        parallel.plan_check = findings.check
    steer(parallel, phased, settings, profiled)
    observe(parallel if trains else None, seen, profiled)
    return parallel if trains else _for_inference(parallel)


def launched_verifier(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> Verifier:
    """Verifies the plan at launch, by the checks that need no values."""
    from galvatron_lite.verify.checks import launch_checks
    from galvatron_lite.verify.launched import Verifier

    return Verifier(model, batch, loss_fn, launch_checks)


def _plan_of_user(plan: Plan | None, backend: str | None) -> Plan | None:
    """The user's plan, for the user's backend."""
    known = [one.value for one in TrainedBy]
    if backend not in (None, *known):
        raise InputError("backend", str(backend), f"Give {' or '.join(known)}, or leave it out.")
    if plan is None:
        return None
    return check_runs(plan if backend is None else replace(plan, backend=TrainedBy(backend)))


def _check_delay(plan: Plan | None, delay: str | None) -> None:
    """Refuse a delay that is none of the known values, or that is not a given plan's."""
    rules = [rule.value for rule in CyclicRule]
    if delay not in (None, "cyclic", *rules):
        raise InputError("delay", str(delay), f"Give 'cyclic', {' or '.join(map(repr, rules))}, or leave it out.")
    if plan is None or delay is None:
        return
    rule = None if plan.cyclic is None else plan.cyclic.rule.value
    if rule is None or delay not in ("cyclic", rule):
        why = "delays no gradients" if rule is None else f"is one of {rule}"
        remedy = f"The plan that was given {why}. Leave the plan out to find one, or the delay."
        raise InputError("delay", delay, remedy)


def _tried_out(
    model: nn.Module,
    batch: Any,
    layers: Sequence[Layer],
    loss_fn: LossFn | None,
    weight: LossWeight | None,
    reduction: str,
    init_fn: Callable[[nn.Module], None] | None,
) -> Findings:
    """Rank 0's findings about the loss, on every rank."""
    from galvatron_lite.runtime.loss.weights import check_reduction
    from galvatron_lite.verify.trial.check import try_model

    check_reduction(reduction, weight)
    options: dict[str, Any] = {"loss_fn": loss_fn, "weight": weight, "reduction": reduction, "init_fn": init_fn}
    findings: Findings = from_rank_zero(lambda: try_model(model, batch, layers, **options))
    _warn(findings.warnings())
    return findings


def _profile(
    profile: Profile | str | Path | None,
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None,
    blocks: Any,
    precision: str | None,
    folder: Path,
    watched: Watched | None,
) -> Profile:
    from galvatron_lite.capture.trace import trace
    from galvatron_lite.profiler.measure import measure_profile
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.profiler.store import check_trainable, kept_profile, other_hardware, profile_name, read_profile
    from galvatron_lite.profiler.timing import from_first_rank, log_progress
    from galvatron_lite.runtime.branches.engine import branch_seconds

    if profile is not None:
        known = profile if isinstance(profile, Profile) else read_profile(Path(profile))
        check_trainable(model, known)
        _warn(other_hardware(known))
        return known
    graph = trace(model, batch, loss_fn=loss_fn, blocks=blocks, precision=precision, watched=watched)
    cached: Profile | None = from_first_rank(kept_profile(model, graph, folder) if dist.get_rank() == 0 else None)
    if cached is not None:
        return cached
    alone, begun = world_size() == 1, monotonic()
    how = "measuring it briefly, as one device leaves little to choose" if alone else "measuring"
    measured = measure_profile(
        model, batch, loss_fn=loss_fn, blocks=blocks, precision=precision, name=profile_name(model), folder=folder,
        remember=False, brief=alone, graph=graph, branch_seconds=branch_seconds,
        progress=log_progress(f"no profile of this model on {world_size()} process(es) in {folder}/ yet; {how}"),
    )  # fmt: skip
    _say(f"measured in {monotonic() - begun:.0f} s; the next run reads it from {folder}/")
    return measured


def _without_graph(
    model: nn.Module,
    layers: Sequence[Layer],
    batch: int,
    mem: str | int,
    precision: str | None,
    pins: Mapping[str, Sequence[str]],
    uncaptured: TraceError,
) -> Plan:
    """A plan of a model whose values decide what it runs."""
    from galvatron_lite.cluster.budget import budget_on
    from galvatron_lite.cluster.probe import probe

    def find() -> Plan:
        return uncaptured_plan(
            type(model).__name__, layers, size=sum(one.nbytes for one in model.parameters()), devices=world_size(),
            batch=batch, budget=budget_on(probe(), mem).least, precision=precision or precision_of(model), **pins,
        )  # fmt: skip

    plan: Plan = from_rank_zero(find)
    _say(f"plan: {plan_line(plan)}")
    what = f"{uncaptured.field} ({uncaptured.value})"
    _say(
        f"note: values of tensors decide what {what} runs: costs are not known, and only plans of data "
        "parallelism, ZeRO 1 and full recomputation run it"
    )
    return plan


def _plan_arguments(mode: Mode, delay: str | None, fix: Sequence[str]) -> PlanArguments:
    """Arguments of the planner for the mode and for delayed gradients."""
    if mode is Mode.INFERENCE:
        if delay is not None:
            raise InputError("delay", delay, "Inference has no gradients: leave it out.")
        return {"mode": mode, "fix": fix}
    rule = (f"rule={delay}",) if delay in [rule.value for rule in CyclicRule] else ()
    return {"mode": mode, "fix": (*fix, *rule), "allow_delay": delay is not None}


def _searched(
    profile: Profile, arguments: PlanArguments, delay: str | None, findings: Findings | None, pins: str
) -> Plan:
    """Rank 0's plan; where pins that the model's loss or buffers need leave none, the error speaks of these.

    Args:
        findings: of the model; None: nothing was tried.
        pins: that the user typed.
    """
    graph = profile.graph
    _warn(dead_note(graph.dead, graph.parameters, "an output or the loss"))
    try:
        plan = _searched_plan(profile, arguments, delay)
    except InputError as error:
        if findings is None or not findings.pins() or error.field not in ("--fix", "--forbid"):
            raise
        raise findings.without_plan(world_size(), pins=pins) from error
    _say(f"plan: {plan_line(plan)}")
    notes = () if findings is None else findings.notes()
    for note in (*(() if plan.provenance is None else plan.provenance.notes), *notes):
        _say(f"note: {note}")
    return plan


def _searched_plan(profile: Profile, arguments: PlanArguments, delay: str | None) -> Plan:
    """Rank 0's plan. Where the wanted delay is why there is none, the error speaks of it."""
    from galvatron_lite.api import plan as find

    try:
        plan: Plan = from_rank_zero(lambda: find(profile, **arguments))
        return plan
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


_OPTIONS = {
    "expert_capacity": (None, "Only plans of synchronous training with galvatron drop tokens."),
    "randomness": ("own", "Under such a plan every rank draws for itself: take 'own'."),
    "local_batch": (False, "Under such a plan every rank gives the same global batch: leave it out."),
    "compile": (False, "Leave it out: blocks are not compiled under such a plan."),
}
"""Options of synchronous training with galvatron alone: what they are if not given, and the remedy elsewhere."""


def _checked_options(plan: Plan, **options: Any) -> dict[str, Any]:
    """The options that are given; refused where the plan cannot have them."""
    given = {name: value for name, value in options.items() if value != _OPTIONS[name][0]}
    for name, value in given.items():
        if plan.cyclic is not None or plan.backend is not TrainedBy.GALVATRON:
            raise InputError(name, value, _OPTIONS[name][1])
    return given


def _check_timeout(plan: Plan, timeout: float) -> None:
    if not timeout > 0:
        raise InputError("timeout", timeout, "It is in seconds, and more than 0.")
    if plan.backend is TrainedBy.DEEPSPEED:
        remedy = "DeepSpeed has its own: give it to deepspeed.init_distributed(timeout=...)."
        raise InputError("timeout", timeout, remedy)


def _syncing(plan: Plan, rules: Mapping[str, str]) -> dict[str, Any]:
    """The option that keeps buffers alike that forward passes update; where the trainer has none, a warning."""
    if plan.cyclic is None and plan.backend is TrainedBy.GALVATRON and not plan.branches:
        return {"synced_buffers": rules}
    _warn([f"Forward passes update {', '.join(rules)} from the samples: under this plan each rank keeps its own."])
    return {}


def _kind_of(plan: Plan) -> type[ParallelModel] | type[CyclicModel] | type[DeepSpeedModel]:
    """The class that runs a plan."""
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


def _for_inference(model: ParallelModel | CyclicModel | DeepSpeedModel) -> InferenceModel:
    from galvatron_lite.runtime.engine import ParallelModel
    from galvatron_lite.runtime.parameters.use import InferenceModel

    if not isinstance(model, ParallelModel):
        what = "of cyclic data parallelism" if model.plan.cyclic else f"for {model.plan.backend.value}"
        raise InputError("mode", "inference", f"The plan is one {what}, which only trains.")
    return InferenceModel(model)


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        LOG.info(line)


def _warn(messages: Sequence[str]) -> None:
    """Warn on rank 0."""
    for message in messages if dist.get_rank() == 0 else ():
        warnings.warn(message, stacklevel=4)
