"""Functions of the public API that plan: ``plan``, the sweeps (``best_batch``, ``fewest_devices``, ``cheapest``,
``pareto_front``), ``plan_phases`` and ``evaluate``. ``auto_parallelize`` is in ``auto.py``, which needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast

from galvatron_lite.analysis import sweeps
from galvatron_lite.analysis.setting import ask, batch_for
from galvatron_lite.api_measure import profile
from galvatron_lite.api_plans import read_with_profile
from galvatron_lite.api_profile import find_profile, precision_on
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.backends import target_named
from galvatron_lite.peers.plan_files import priced, priced_settings
from galvatron_lite.plans.phases import Phase, PhasedPlan, read_phases
from galvatron_lite.plans.schema import Plan
from galvatron_lite.request import PlanArguments, PlanRequest, ProfileSource, integer, number, seconds, share, size
from galvatron_lite.search.phases import PhaseCase
from galvatron_lite.search.phases import plan_phases as plans_of_phases

if TYPE_CHECKING:
    from galvatron_lite.profiler.schema import Profile

RUNNERS_UP = 5
TOLERANCE = 0.01

__all__ = [
    "best_batch",
    "cheapest",
    "fewest_devices",
    "find_profile",
    "pareto_front",
    "plan",
    "plan_phases",
    "precision_on",
    "profile",
]


def plan(
    profile: ProfileSource | PlanRequest = None,
    *,
    certify: bool = False,
    runners_up: int = RUNNERS_UP,
    tolerance: str | float = TOLERANCE,
    **setup: Unpack[PlanArguments],
) -> Plan:
    """Search for the fastest plan that fits the memory budget, or the simplest plan that is almost as fast.

    Args:
        profile: the costs of layers and communication, or their file. With neither a profile nor a model, the last
            profile made in this folder.
        certify: also solve the problem as an integer program and compare; the tolerance is then 0.
        runners_up: number of other plans to report.
        tolerance: share of the step time (``1%``, 0.01) by which the plan may be slower than the best, to have as few
            runs of strategies as possible; 0: the fastest plan.
        setup: by name:

            - ``model``: a model by name (``gpt3-175b``), YAML file or graph instead of a profile; its costs are
              estimated.
            - ``shape``: flags that describe a model, instead of its name: ``{"layers": "32", "hidden": "4096", ...}``.
            - ``image``: pixels of an image, for an image model by name: ``512x1024``.
            - ``cluster``: name (``a100-80gb``) or YAML file; needed with ``model``. With a profile it replaces the
              profile's links.
            - ``gpus``: number of devices; by default all of the cluster.
            - ``mem``: memory budget a device: ``40GB``, ``40GiB``, ``80%`` of the device's memory (or 0.8), or bytes;
              by default 95 %. In a cluster of several types of device, a share is of the memory of each type.
            - ``batch``: samples a step over all devices; by default 8 a device (32 images).
            - ``sequence``: tokens a sample, for a model by name.
            - ``precision``: of compute, for a model by name; by default the best that the devices support: bf16, else
              fp16, else fp32.
            - ``trainable``: what trains in a model by name: ``all``, or ``lora:r=16`` (``lora:r=16,targets=q+v``):
              only adapters beside linear layers of its blocks.
            - ``freeze``: names of layers without gradients, for a model by name: ``before``, ``layers.[0-9].*``; one or
              a list.
            - ``fix``: choices that are not left to the search: ``pp=4``, ``layers.3.recompute=full``
              (``search.pins``); one, a list, or a mapping: ``{"pp": 4}``.
            - ``forbid``: dimensions that no layer may use: ``tp``, ``pipeline``; one or a list.
            - ``schedules``: pipeline schedules to choose from.
            - ``backend``: what runs the plan: ``galvatron``, ``deepspeed``, or ``any`` for everything that can be
              priced.
            - ``target``: other software that trains with the plan, at its own costs: ``megatron``, ``nemo``,
              ``torchtitan``, ``deepspeed`` or ``accelerate``.
            - ``mode``: ``training`` (the default) or ``inference`` (forward passes only).
            - ``allow_delay``: whether gradients may be delayed (cyclic data parallelism), which changes the training
              rule; ``fix`` can say how: ``rule=cdp-v1``, ``setting=data``, ``schedule=cyclic``.
            - ``margin``: share of the budget (``5%``, 0.05) that predictions keep free; by default the usual error of
              predicted memory for such profiles.
            - ``progress``: called with (done, total, label) during the search.

    Raises:
        InputError: an unknown argument or name, an unreadable file, a batch that cannot be divided, a precision that
            the devices do not support, or a pin that cannot be kept.
        InfeasibleError: no plan fits; names the smallest budget that would be enough.
    """
    request = PlanRequest.parse(profile, setup, ("certify", "runners_up", "tolerance"))
    setting = request.resolved
    devices = setting.profile.cluster.devices
    return ask(
        setting, devices, batch_for(setting, devices, request.batch), certify=certify, runners_up=runners_up,
        progress=request.progress,
        stoppable=True, tolerance=share("--tolerance", tolerance) or 0.0,
    )  # fmt: skip


def best_batch(
    profile: ProfileSource | PlanRequest = None, *, max_batch: int | None = None, **setup: Unpack[PlanArguments]
) -> sweeps.BestBatch:
    """Search for the batch of the greatest throughput; see ``analysis.sweeps``.

    Args:
        profile: see ``plan``; also a function that returns the profile of a number of devices (None: all).
        max_batch: largest batch to try; by default 64 samples a device.
        setup: see ``plan``; without ``batch``.

    Raises:
        InputError: see ``plan``; or a batch.
        InfeasibleError: no batch has a plan that fits.
    """
    request = PlanRequest.parse(profile, setup, ("max_batch",))
    if request.batch is not None:
        raise InputError("--batch", request.batch, "The best one is looked for; --max-batch limits it.")
    return sweeps.best_batch(request.resolved, integer("max_batch", max_batch), request.progress)


def fewest_devices(
    profile: ProfileSource | PlanRequest = None,
    *,
    step: float | str | None = None,
    samples: float | str | None = None,
    tokens: float | str | None = None,
    **setup: Unpack[PlanArguments],
) -> sweeps.Fewest:
    """Search for the fewest devices that reach a target, or that fit the model; see ``analysis.sweeps``.

    Args:
        profile: see ``best_batch``.
        step: most seconds of a step of ``batch`` samples; or a text: ``130ms``.
        samples: least samples a second; or a text: ``2K``.
        tokens: least tokens a second; or a text: ``1M``.
        setup: see ``plan``; ``gpus`` is the largest number of devices to try.

    Raises:
        InputError: see ``plan``; or more than one target.
    """
    values = {
        sweeps.Goal.STEP: seconds("step", step),
        sweeps.Goal.SAMPLES: number("samples", samples),
        sweeps.Goal.TOKENS: number("tokens", tokens),
    }
    targets = [sweeps.Target(goal, value) for goal, value in values.items() if value is not None]
    if len(targets) > 1:
        raise InputError("target", ", ".join(target.goal for target in targets), "Give one of them.")
    request = PlanRequest.parse(profile, setup, ("step", "samples", "tokens"))
    target = targets[0] if targets else sweeps.Target(sweeps.Goal.FIT)
    return sweeps.fewest_devices(request.resolved, target, request.batch, request.progress)


def cheapest(
    profile: ProfileSource | PlanRequest = None,
    *,
    price: float | str,
    samples: float | str | None = None,
    tokens: float | str | None = None,
    steps: float | str | None = None,
    within: float | str | None = None,
    **setup: Unpack[PlanArguments],
) -> sweeps.Cheapest:
    """Search for the cheapest number of devices for a run; see ``analysis.sweeps``.

    Args:
        profile: see ``best_batch``.
        price: of a device for an hour, in any currency.
        samples: length of the run in samples, as a number or a text: ``2M``.
        tokens: length of the run in tokens; by default, without samples and steps, a million.
        steps: length of the run in steps of ``batch`` samples.
        within: deadline in seconds; or a text: ``30d``.
        setup: see ``plan``; ``gpus`` is the largest number of devices to try.

    Raises:
        InputError: see ``plan``; or more than one length of the run.
        InfeasibleError: no number of devices has a plan that fits.
    """
    if samples is tokens is steps is None:
        tokens = sweeps.MILLION
    names = ("price", "samples", "tokens", "steps", "within")
    request = PlanRequest.parse(profile, setup, names)
    run = sweeps.TrainingAmount(number("samples", samples), number("tokens", tokens), number("steps", steps))
    cost, deadline = number("price", price) or 0.0, seconds("within", within)
    return sweeps.cheapest(
        request.resolved, run, cost, batch=request.batch, deadline=deadline, progress=request.progress
    )


def pareto_front(
    profile: ProfileSource | PlanRequest = None, *, memory_step: int | str | None = None, **setup: Unpack[PlanArguments]
) -> sweeps.ParetoFront:
    """Search for the fastest plan of every budget from ``mem`` down; see ``analysis.sweeps``.

    Args:
        profile: see ``best_batch``.
        memory_step: least difference between budgets in bytes, or a text: ``400MB``; by default 1/32 of the budget.
        setup: see ``plan``.

    Raises:
        InputError: see ``plan``.
        InfeasibleError: no plan fits.
    """
    request = PlanRequest.parse(profile, setup, ("memory_step",))
    step = size("memory_step", memory_step)
    return sweeps.pareto_front(request.resolved, request.batch, step=step, progress=request.progress)


def plan_phases(
    phases: Sequence[Phase] | str | Path,
    profile: ProfileSource | PlanRequest = None,
    **setup: Unpack[PlanArguments],
) -> PhasedPlan:
    """Search for a plan of every phase of a run, including the cost of switches; see ``search.phases``.

    Args:
        phases: the phases, or their file (``plans.phases``).
        profile: see ``plan``; for phases that name no profile. Also a function that returns the profile of a number of
            tokens a sample (None: the profile's own).
        setup: see ``plan``; without ``batch``. Costs of a model by name are estimated at the sequence of every phase;
            a measured profile is used only for phases of its own sequence.

    Raises:
        InputError: see ``plan``; or a phase with another sequence than the profile.
        InfeasibleError: a phase has no plan that fits.
    """
    request = PlanRequest.parse(profile, setup)
    if request.batch is not None:
        raise InputError("--batch", request.batch, "The phases have their own.")
    phases = read_phases(Path(phases)) if isinstance(phases, (str, Path)) else tuple(phases)
    if not phases:
        raise InputError("phases", "none", "Give at least one phase.")
    request = replace(request, forbid=(*request.forbid, "branches"))
    return plans_of_phases([_phase_case(phase, request) for phase in phases])


def _phase_profile(phase: Phase, request: PlanRequest) -> Profile:
    sequence = phase.sequence or request.sequence
    if phase.profile:
        profile = find_profile(
            phase.profile, cluster=request.cluster, gpus=request.gpus, precision=request.precision
        )  # fmt: skip
    elif callable(request.profile):
        profile = request.profile(sequence)
    else:
        profile = replace(request, sequence=sequence if request.estimated else None).profile_on(request.gpus)
    if sequence not in (None, profile.graph.sequence):
        remedy = (
            f"Profile {profile.name} is of {profile.graph.sequence} tokens a sample. Profile the model at {sequence} "
            "and name the file in the phase (profile: FILE), or plan a --model by name, whose costs are estimated."
        )
        raise InputError(f"sequence of phase {phase.name}", sequence, remedy)
    return profile


def _phase_case(phase: Phase, request: PlanRequest) -> PhaseCase:
    profile = _phase_profile(phase, request)
    setting, devices = request.on(profile).resolved, profile.cluster.devices
    best = ask(setting, devices, phase.batch, progress=request.progress, tolerance=TOLERANCE)
    return PhaseCase(phase, setting.session(devices), setting.budget_at(devices), best)


def evaluate(
    plan: Plan | str | Path,
    profile: Profile | str | Path | None = None,
    **setup: Unpack[PlanArguments],
) -> Plan:
    """Predict the step time and the memory of a plan, and return it with its prediction.

    Args:
        plan: a plan, or a file: ours, one written by hand (``plans.written``), or Hetu-Galvatron's.
        profile: with neither a profile nor a model, the profile that the plan was made from, or, for a plan that names
            none, the last profile made in this folder.
        setup: by name:

            - ``model``, ``cluster``, ``gpus``, ``sequence``, ``precision``, ``trainable`` and ``freeze``: as for
              ``plan``.
            - ``mem``: memory budget a device, as for ``plan``. The result's ``fits`` says whether the plan is within
              it, ``overfull`` which stages are not, and ``provenance.budget`` has the budget.
            - ``batch``: samples a step; by default the plan's. Micro-batches keep their size.
            - ``target``: software whose settings the file holds, and which trains at its own costs: ``megatron``,
              ``nemo``, ``torchtitan``, ``deepspeed`` or ``accelerate``. The notes list settings that are not used.

    Differences from the plan (another model or batch) are in ``provenance.notes`` of the result.

    Raises:
        InputError: a file, layer or number that cannot be used; names it. Also a plan for another number of devices
            than ``gpus``, or for more than the cluster has; or the plan's profile was not found.
    """
    setup = cast("PlanArguments", {name: value for name, value in setup.items() if value is not None})
    return evaluated(plan, PlanRequest.parse(profile, setup), setup)[0]


def evaluated(plan: Plan | str | Path, request: PlanRequest, setup: PlanArguments) -> tuple[Plan, Profile]:
    """A plan with its prediction, and the profile that was used; see ``evaluate``."""
    mem, target = None if setup.get("mem") is None else request.mem, setup.get("target")
    if target is not None and not isinstance(plan, Plan):
        profiles: list[Profile] = []

        def find(stack: str) -> Profile:
            profiles.append(request.profile_on(request.gpus, stack))
            return profiles[-1]

        return priced_settings(Path(plan), target, find, mem, request.batch), profiles[-1]
    stack = "" if target is None else target_named(target).stack
    loaded, profile = read_with_profile(plan, request, stack, last=True)
    return priced(loaded, profile, mem, request.batch), profile
