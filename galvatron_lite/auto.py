"""``auto_parallelize``: capture a model, profile it (or read its profile), plan, and apply the plan."""

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
from galvatron_lite.model.trace.meta import LOCAL_BATCH_NORMS, check_model, meta_copy, precision_of
from galvatron_lite.model.trace.record import MetaRunError, ValuesReadError
from galvatron_lite.model.trace.run import gives_loss, mean_of_outputs
from galvatron_lite.parallelism.cyclic.rules import CyclicRule
from galvatron_lite.plans.describe import norm_notes, other_size, plan_line
from galvatron_lite.plans.io import check_runs, file_named
from galvatron_lite.plans.schema import Mode, Plan, TrainedBy
from galvatron_lite.profiler.schema import PlanNeeds
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
from galvatron_lite.verify.trial.snapshots import OutsideValues
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
    """Split a model over the launched world, under a plan.

    With nothing but the model, it captures the model on an example batch, measures a profile on this world (or reads
    the one measured here before), searches a plan for this world and applies it. Every rank makes the same call.

    Args:
        model: an unchanged ``nn.Module``; on the meta device if it does not fit one device.
        batch: an example batch of global size; models of the zoo or of transformers make their own.
        plan: a plan, its file, or a plan in phases (``galvatron plan --phases``), between which the model switches by
            itself; by default that of ``galvatron launch --plan``, or one that is searched here.
        profile: a profile, or its file; by default read from ``folder`` or measured.
        mem: memory budget a device, as for ``galvatron plan``.
        fix: choices that are not left to the search (``"pp=2"``, ``{"tp": 2}``), as for ``galvatron_lite.plan``.
        forbid: dimensions that no layer may use (``"tp"``), as for ``galvatron_lite.plan``.
        tolerance: share of the step time by which the plan may be slower than the fastest, as for
            ``galvatron_lite.plan``, which has the default.
        global_batch: samples a step; by default those of ``batch`` (of all ranks with ``local_batch``).
        local_batch: whether each rank gives its own batches, of equal shapes, as a ``DistributedSampler`` draws them;
            the batch of a step is theirs in the order of ranks. If False, every rank gives the same global batch.
        loss_fn: ``loss_fn(output, batch)``, for a model whose output does not hold its loss. Entries of the batch that
            ``forward`` does not take, such as labels, are for this function.
        blocks: the repeated blocks, if they are not found.
        precision: of compute: ``fp32``, ``bf16`` or ``fp16``; by default that of the parameters.
        init_fn: initializes one module of a model on the meta device.
        seed: of that initialization.
        device: ``auto``, ``cpu`` or ``cuda``.
        folder: of profiles. A single process, which leaves little to choose, measures only briefly.
        mode: ``training`` or ``inference``; by default that of the plan, or training.
        delay: whether a plan that is searched here may delay gradients, which changes the training rule: ``cyclic``
            allows it if it is faster; ``cdp-v1`` or ``cdp-v2`` demands cyclic data parallelism with that rule. By
            default gradients are not delayed.
        backend: what trains: ``galvatron``, or ``deepspeed`` with one ZeRO stage for all layers; by default that of the
            plan, or ``galvatron``.
        adapt: watch training, and switch to another plan if links, devices or memory differ from the profile
            (docs/adapting.md); True, or settings.
        expert_capacity: capacity beyond which experts of a mixture drop tokens, see ``ParallelModel``; by default they
            drop none.
        compile: compile the forward of every block by ``torch.compile``. ``auto`` measures a block of each kind both
            ways in the first step, and keeps what is faster; another string names a backend other than inductor. A
            warning names blocks that do not compile, which run as they are.
        randomness: ``own``: every rank draws dropout and other random numbers for its own share. ``same``: all plans
            draw the numbers of one process (``galvatron_lite.same_randomness``) from ``seed``; each number depends on
            its step, module and sample. This takes more time, and memory if attention drops weights.
        timeout: seconds after which a step that waits for another rank raises an error that names it; by default that
            of torch's process groups (1800 with gloo, 600 with NCCL), or 600 with cyclic data parallelism or branches.
        log: folder to which the run is written, for ``galvatron diagnose`` and TensorBoard (docs/watch.md); resumed
            runs continue in it. By default nothing is written.
        live: show on standard error of rank 0 how the run compares with its prediction.
        profile_steps: steps of which ``torch.profiler`` writes a trace to ``log``: ``range(10, 13)``.
        verify: first run a step of the plan without data in a fork of rank 0, and match the messages of all ranks
            (docs/verify.md). It takes seconds to minutes; rank 0 reports the result.
        loss_weight: ``loss_weight(batch)`` of some samples: the weight of their mean loss in the mean of the batch,
            such as the number of labels that count. Found automatically for mean cross-entropies over an entry of the
            batch (docs/training-loops.md).
        loss_reduction: ``mean``, or ``sum`` for a loss that is a sum over samples.
        check: first try on rank 0, on a small copy of the model and in seconds, whether the loss and gradients of the
            example batch are those of its shares; ``verify`` does so, too.

    Returns:
        An object that is used like the model, with ``train_step(batch, optimizer)``. For inference, one that is called
        like the model and returns the model's outputs on every rank, without gradients.

    Raises:
        LaunchError: the world's size is not the plan's, or there is no GPU.
        InputError: the model, batch or a file cannot be used; an unknown delay; or the plan would not train the model
            as one process does, because of its loss, parameters read outside of their layers, or buffers.
        InfeasibleError: no plan fits the budget.
        VerificationError: a check of ``verify`` failed; on every rank.
    """
    check_unsplit(model)
    check_model(model)
    check_entries(model, batch, loss_fn)
    listen()
    verifier = launched_verifier(model, batch, loss_fn) if verify else None  # it forks, so before the world is joined
    place, observers = pick_device(device), observer_options(log, live, profile_steps)
    random_states, outside = generators(), OutsideValues(model, loss_fn)
    join(place)
    example = batch if batch is not None else example_batch(model)
    if local_batch and batch is not None:
        example = GlobalBatches(place, local=True)(batch)
    uncaptured: MetaRunError | None = None
    watched: Watched | None = None
    try:
        watched = watch_model(model, example, blocks)
        layers = watched.layers
    except MetaRunError as error:
        layers, uncaptured = discover_layers(model, None, blocks), error
    outside.restore()
    plan = os.environ.get(PLAN_VARIABLE) if plan is None else plan
    settings, (phased, first) = adapt_settings(adapt, mem), split_phases(plan)
    chosen = _users_plan(first, backend, delay, fix=fix, forbid=forbid, tolerance=tolerance)
    plan_mode = mode_named(mode or (Mode.TRAINING if chosen is None else chosen.mode))
    trains = plan_mode is Mode.TRAINING
    if trains:
        _check_training(model, chosen)
    findings = None
    if trains and (check or verify):
        findings = _try_model(model, example, layers, loss_fn, loss_weight, loss_reduction, init_fn)
    used_profile = None
    if uncaptured is None and (chosen is None or settings is not None):
        goal = loss_fn if trains or loss_fn is not None or gives_loss(model, example) else mean_of_outputs
        try:
            used_profile = _find_profile(profile, model, example, goal, blocks, precision, Path(folder), watched)
            # the findings say the others, or check=False leaves them out
            found = PlanNeeds() if findings is None else findings.needs()
            needs = PlanNeeds(least_samples=found.least_samples, alike=found.alike)
            used_profile = replace(used_profile, needs=needs)
        except MetaRunError as error:
            uncaptured = error
    if uncaptured is not None:
        runs = isinstance(uncaptured, ValuesReadError) or not (findings is None or findings.skipped)
        if not (trains and runs and settings is None):
            from galvatron_lite.capture.trace import error_of_fewer_samples

            raise error_of_fewer_samples(meta_copy(model), example, precision, blocks, uncaptured) or uncaptured
        if findings is not None and findings.keeps_batch and world_size() > 1:
            raise findings.without_plan(world_size(), uncaptured=f"{uncaptured.field} ({uncaptured.value})")
    watched = None  # frees its copy of the model
    if chosen is None:
        pins = {"fix": texts("fix", fix), "forbid": texts("forbid", forbid)}
        samples = global_batch or batch_size(example)
        if used_profile is None:
            assert uncaptured is not None
            chosen = _plan_uncaptured(model, layers, samples, mem, precision, pins, uncaptured)
        else:
            needed = {} if findings is None else findings.pins()
            if settings is not None:
                all_fix = *settings.fix, *needed.get("fix", ()), *pins["fix"]
                all_forbid = *settings.forbid, *needed.get("forbid", ()), *pins["forbid"]
                settings = replace(settings, fix=all_fix, forbid=all_forbid)
            source, budget = correct_inputs(used_profile, earlier_corrections(settings, used_profile), mem)
            request: Any = {"mem": budget, "batch": samples, "gpus": world_size(), "forbid": pins["forbid"]}
            request |= _mode_arguments(plan_mode, delay, pins["fix"])
            optional = {"backend": backend, "tolerance": tolerance}
            request |= {name: value for name, value in optional.items() if value is not None}
            chosen = _search_plan(source, request, delay, findings)
    if uncaptured is not None:
        check_uncaptured(chosen, uncaptured)
    if findings is not None:
        for phase_plan in (chosen,) if phased is None else (phase.plan for phase in phased.phases):
            findings.check(phase_plan)
    _warn(other_size(chosen, sum(parameter.numel() for parameter in model.parameters())))
    if verifier is not None:
        verifier.check(chosen)
    options: dict[str, Any] = {"precision": precision, "init_fn": init_fn, "seed": seed}
    options |= _synchronous_options(
        chosen, expert_capacity=expert_capacity, randomness=randomness, local_batch=local_batch, compile=compile
    )  # fmt: skip
    if trains:
        weight = loss_weight if findings is None or loss_weight is not None else findings.weight
        options |= {"loss_weight": weight, "loss_reduction": loss_reduction}
    if findings is not None and findings.synced:
        options |= _buffer_options(chosen, findings.synced)
    if timeout is not None:
        _check_timeout(chosen, timeout)
        options["timeout"] = timeout
    if randomness == "same" and findings is not None and findings.draws_elsewhere:
        remedy = "The model draws random numbers of Python or numpy, which are not those of one process: use torch's."
        raise InputError("randomness", randomness, remedy)
    put_generators(random_states)  # as if nothing had been measured or traced
    outside.restore()
    with file_named(plan):
        parallel = _model_class(chosen)(model, chosen, layers, example, loss_fn=loss_fn, device=place, **options)
    outside.restore()
    if findings is not None:
        parallel.plan_check = findings.check
    steer(parallel, phased, settings, used_profile)
    observe(parallel if trains else None, observers, used_profile)
    return parallel if trains else _for_inference(parallel)


def launched_verifier(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> Verifier:
    """Start to verify plans of a model at launch, by the checks that need no values."""
    from galvatron_lite.verify.checks import launch_checks
    from galvatron_lite.verify.launched import Verifier

    return Verifier(model, batch, loss_fn, launch_checks)


def _users_plan(plan: Plan | None, backend: str | None, delay: str | None, **choices: object) -> Plan | None:
    """The user's plan, checked for the user's backend and delay; refuse choices for a search beside a plan."""
    backends = [option.value for option in TrainedBy]
    if backend not in (None, *backends):
        raise InputError("backend", str(backend), f"Give {' or '.join(backends)}, or leave it out.")
    if plan is not None:
        plan = check_runs(plan if backend is None else replace(plan, backend=TrainedBy(backend)))
    _check_delay(plan, delay)
    for name, value in choices.items():
        if plan is not None and value not in (None, (), {}, []):
            raise InputError(name, str(value), "The plan is given: leave one of the two out.")
    return plan


def _check_delay(plan: Plan | None, delay: str | None) -> None:
    """Refuse an unknown delay, or one that the user's plan does not have."""
    rules = [rule.value for rule in CyclicRule]
    if delay not in (None, "cyclic", *rules):
        raise InputError("delay", str(delay), f"Give 'cyclic', {' or '.join(map(repr, rules))}, or leave it out.")
    if plan is None or delay is None:
        return
    rule = None if plan.cyclic is None else plan.cyclic.rule.value
    if rule is None or delay not in ("cyclic", rule):
        reason = "delays no gradients" if rule is None else f"is one of {rule}"
        remedy = f"The plan that was given {reason}. Leave the plan out to find one, or the delay."
        raise InputError("delay", delay, remedy)


def _check_training(model: nn.Module, plan: Plan | None) -> None:
    """Note how batch norms differ under the user's plan; refuse a model without anything to train."""
    if plan is not None and any(isinstance(module, LOCAL_BATCH_NORMS) for module in model.modules()):
        for note in norm_notes(plan, [run.strategy for stage in plan.stages for run in stage.runs]):
            _say(f"note: {note}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        remedy = "Let at least one train (model.requires_grad_()), or give mode='inference'."
        raise InputError("model", "no parameter that requires a gradient", remedy)


def _try_model(
    model: nn.Module,
    batch: Any,
    layers: Sequence[Layer],
    loss_fn: LossFn | None,
    weight: LossWeight | None,
    reduction: str,
    init_fn: Callable[[nn.Module], None] | None,
) -> Findings:
    """Try the loss and buffers of a model on rank 0, and return the findings on every rank."""
    from galvatron_lite.runtime.loss.weights import check_reduction
    from galvatron_lite.verify.trial.check import try_model

    check_reduction(reduction, weight)
    options: dict[str, Any] = {"loss_fn": loss_fn, "weight": weight, "reduction": reduction, "init_fn": init_fn}
    findings: Findings = from_rank_zero(lambda: try_model(model, batch, layers, **options))
    _warn(findings.warnings())
    return findings


def _find_profile(
    profile: Profile | str | Path | None,
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None,
    blocks: Any,
    precision: str | None,
    folder: Path,
    watched: Watched | None,
) -> Profile:
    """The user's profile, the one measured here before, or a new one."""
    from galvatron_lite.capture.trace import trace
    from galvatron_lite.profiler.measure import measure_profile
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.profiler.store import check_trainable, kept_profile, other_hardware, profile_name, read_profile
    from galvatron_lite.profiler.timing import from_first_rank, log_progress
    from galvatron_lite.runtime.branches.engine import branch_seconds

    if profile is not None:
        profile = profile if isinstance(profile, Profile) else read_profile(Path(profile))
        check_trainable(model, profile)
        _warn(other_hardware(profile))
        return profile
    graph = trace(model, batch, loss_fn=loss_fn, blocks=blocks, precision=precision, watched=watched)
    cached: Profile | None = from_first_rank(kept_profile(model, graph, folder) if dist.get_rank() == 0 else None)
    if cached is not None:
        return cached
    alone, start = world_size() == 1, monotonic()
    action = "measuring it briefly, as one device leaves little to choose" if alone else "measuring"
    measured = measure_profile(
        model, batch, loss_fn=loss_fn, blocks=blocks, precision=precision, name=profile_name(model), folder=folder,
        remember=False, brief=alone, graph=graph, branch_seconds=branch_seconds,
        progress=log_progress(f"no profile of this model on {world_size()} process(es) in {folder}/ yet; {action}"),
    )  # fmt: skip
    _say(f"measured in {monotonic() - start:.0f} s; the next run reads it from {folder}/")
    return measured


def _plan_uncaptured(
    model: nn.Module,
    layers: Sequence[Layer],
    batch: int,
    mem: str | int,
    precision: str | None,
    pins: Mapping[str, Sequence[str]],
    uncaptured: TraceError,
) -> Plan:
    """Plan for a model that does not run without data, on rank 0, and return the plan on every rank."""
    from galvatron_lite.cluster.budget import budget_on
    from galvatron_lite.cluster.probe import probe

    def find() -> Plan:
        size, budget = sum(parameter.nbytes for parameter in model.parameters()), budget_on(probe(), mem).least
        return uncaptured_plan(
            type(model).__name__, layers, size=size, devices=world_size(), batch=batch, budget=budget,
            precision=precision or precision_of(model), **pins,
        )  # fmt: skip

    plan: Plan = from_rank_zero(find)
    _say(f"plan: {plan_line(plan)}")
    module = f"{uncaptured.field} ({uncaptured.value})"
    _say(
        f"note: {module} does not run without data: costs are not known, and only plans of data parallelism, ZeRO 1 "
        "and full recomputation run it"
    )
    return plan


def _mode_arguments(mode: Mode, delay: str | None, fix: Sequence[str]) -> PlanArguments:
    """Arguments of ``plan`` for the mode, delayed gradients and fixed choices."""
    if mode is Mode.INFERENCE:
        if delay is not None:
            raise InputError("delay", delay, "Inference has no gradients: leave it out.")
        return {"mode": mode, "fix": fix}
    rule = (f"rule={delay}",) if delay in [rule.value for rule in CyclicRule] else ()
    return {"mode": mode, "fix": (*fix, *rule), "allow_delay": delay is not None}


def _search_plan(profile: Profile, request: PlanArguments, delay: str | None, findings: Findings | None) -> Plan:
    """Search a plan on rank 0, and return it on every rank; the model's loss and buffers may need further pins.

    Errors about pins that the model's loss or buffers need, or about the delay, speak of these.

    Args:
        profile: of the model on this world.
        request: arguments of ``plan``, with the user's pins.
        delay: the delay that the user gives.
        findings: on the model; None: it was not tried.
    """
    from galvatron_lite.api import plan as find

    _warn(dead_note(profile.graph.dead, profile.graph.parameters, "an output or the loss"))
    needed = {} if findings is None else findings.pins()
    options = dict[str, Any](request)
    pinned = options | {name: (*words, *texts(name, options[name])) for name, words in needed.items()}
    try:
        plan: Plan = from_rank_zero(lambda: find(profile, **pinned))
    except InputError as error:
        if delay is not None and error.field == "--fix schedule":
            raise _delay_error(profile, delay, error) from error
        if findings is None or not needed or not error.field.startswith(("--fix", "--forbid")):
            raise
        from_rank_zero(lambda: find(profile, **request))  # which raises what is wrong with the user's pins alone
        pins = " ".join(f"--{name} {word}" for name in ("fix", "forbid") for word in texts(name, options[name]))
        raise findings.without_plan(world_size(), pins=pins) from error
    _say(f"plan: {plan_line(plan)}")
    notes = () if findings is None else findings.notes()
    for note in (*(() if plan.provenance is None else plan.provenance.notes), *notes):
        _say(f"note: {note}")
    return plan


def _delay_error(profile: Profile, delay: str, error: InputError) -> InputError:
    """The error for a delay with which there is no plan; ``error``: of the search."""
    shared = next((tie for tie in profile.graph.ties if tie.parameters), None)
    if shared is None or "share parameters" not in error.remedy:
        return InputError("delay", delay, f"There is no such plan: {error.remedy}")
    remedy = (
        f"{shared.first} and {shared.second} share parameters, which stages would use at different versions. Untie "
        "them (give each parameters of its own), or leave the delay out."
    )
    return InputError("delay", delay, remedy)


_OPTIONS = {
    "expert_capacity": (None, "Only plans of synchronous training with galvatron drop tokens."),
    "randomness": ("own", "Under such a plan every rank draws for itself: take 'own'."),
    "local_batch": (False, "Under such a plan every rank gives the same global batch: leave it out."),
    "compile": (False, "Leave it out: blocks are not compiled under such a plan."),
}
"""Options of synchronous training with galvatron: their defaults, and the remedy under other plans."""


def _synchronous_options(plan: Plan, **options: Any) -> dict[str, Any]:
    """The options that differ from their defaults; raises ``InputError`` if the plan does not support them."""
    changed = {name: value for name, value in options.items() if value != _OPTIONS[name][0]}
    for name, value in changed.items():
        if plan.cyclic is not None or plan.backend is not TrainedBy.GALVATRON:
            raise InputError(name, value, _OPTIONS[name][1])
    return changed


def _check_timeout(plan: Plan, timeout: float) -> None:
    if not timeout > 0:
        raise InputError("timeout", timeout, "It is in seconds, and more than 0.")
    if plan.backend is TrainedBy.DEEPSPEED:
        remedy = "DeepSpeed has its own: give it to deepspeed.init_distributed(timeout=...)."
        raise InputError("timeout", timeout, remedy)


def _buffer_options(plan: Plan, rules: Mapping[str, str]) -> dict[str, Any]:
    """The option that synchronizes buffers that forward passes update; warns under plans without this option."""
    if plan.cyclic is None and plan.backend is TrainedBy.GALVATRON and not plan.branches:
        return {"synced_buffers": rules}
    _warn([f"Forward passes update {', '.join(rules)} from the samples: under this plan each rank keeps its own."])
    return {}


def _model_class(plan: Plan) -> type[ParallelModel] | type[CyclicModel] | type[DeepSpeedModel]:
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
        kind = "of cyclic data parallelism" if model.plan.cyclic else f"for {model.plan.backend.value}"
        raise InputError("mode", "inference", f"The plan is one {kind}, which only trains.")
    return InferenceModel(model)


def _say(line: str) -> None:
    """Log a line on rank 0."""
    if dist.get_rank() == 0:
        LOG.info(line)


def _warn(messages: Sequence[str]) -> None:
    """Warn on rank 0."""
    for message in messages if dist.get_rank() == 0 else ():
        warnings.warn(message, stacklevel=4)
