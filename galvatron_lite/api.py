"""The entry points as functions: ``plan``, the sweeps (``best_batch``, ``fewest_devices``, ``cheapest``,
``pareto_front``), ``plan_phases`` and ``evaluate``. ``auto_parallelize`` is in ``auto.py``, which needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast

from galvatron_lite.analysis import sweeps
from galvatron_lite.analysis.setting import ask, batch_for
from galvatron_lite.api_plans import read_with_profile
from galvatron_lite.api_profile import find_profile, precision_on, profile
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.backends import target_named
from galvatron_lite.peers.plan_files import priced, priced_settings
from galvatron_lite.plans.phases import Phase, PhasedPlan, read_phases
from galvatron_lite.plans.schema import Plan
from galvatron_lite.request import PlanArguments, PlanRequest, ProfileSource, integer, number, seconds, share, size
from galvatron_lite.search import planner

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
    """The simplest of the fastest plans that fit the memory budget.

    Args:
        profile: what layers and communication cost, or the file that holds it. With neither a profile nor a model, the
            last profile made in this folder.
        certify: also solve the problem as an integer programme and compare; the tolerance is 0 then.
        runners_up: how many other plans to report.
        tolerance: share of the step time (``1%``, 0.01) that the plan may be from the best possible, so as to have as
            few runs of strategies as can be; 0: the fastest plan.
        setup: by name:

            - ``model``: instead of a profile: a model by name (``gpt3-175b``), YAML file or graph; its costs are
              estimated.
            - ``shape``: instead of a model: the flags that describe one, ``{"layers": "32", "hidden": "4096", ...}``.
            - ``image``: pixels of a picture, of a model of pictures by name: ``512x1024``.
            - ``cluster``: name (``a100-80gb``) or YAML file; needed with ``model``, and replaces the profile's links
              otherwise.
            - ``gpus``: how many devices; the whole cluster if not given.
            - ``mem``: budget a device: ``40GB``, ``40GiB``, ``80%`` of the device's memory (or 0.8), or bytes; 95 % if
              not given. Where devices are of several types, a share is of each one's own memory.
            - ``batch``: samples a step over all devices; 8 a device (32 pictures) if not given.
            - ``sequence``: tokens a sample, for a model by name.
            - ``precision``: of compute, for a model by name; the best that the devices train in if not given: bf16,
              else fp16, else fp32.
            - ``trainable``: of a model by name: ``all``, or ``lora:r=16`` (``lora:r=16,targets=q+v``): adapters beside
              linear layers of its blocks alone.
            - ``freeze``: names of what gets no gradient, of a model by name: ``before``, ``layers.[0-9].*``; one or a
              list.
            - ``fix``: what is not left to the search: ``pp=4``, ``layers.3.recompute=full`` (``search.pins``);
              one, a list, or a mapping: ``{"pp": 4}``.
            - ``forbid``: dimensions that no layer may use: ``tp``, ``pipeline``; one or a list.
            - ``schedules``: of the pipeline, to choose from.
            - ``backend``: what is to run the plan: ``galvatron``, ``deepspeed``, or ``any`` for all that is priced.
            - ``target``: other software that is to train by the plan, with its own costs: ``megatron``, ``nemo``,
              ``torchtitan``, ``deepspeed`` or ``accelerate``.
            - ``mode``: what the plan is for: ``training`` (if not given) or ``inference``: forward passes only.
            - ``allow_delay``: whether gradients may be delayed (cyclic data parallelism), which changes the training
              rule; ``fix`` may say which: ``rule=cdp-v1``, ``setting=data``, ``schedule=cyclic``.
            - ``margin``: share of the budget (``5%``, 0.05) that predictions keep free; if not given, by how far
              measured memory has been above predictions for such profiles.
            - ``progress``: called with (done, total, label) while the search runs.

    Raises:
        InputError: an unknown argument or name, an unreadable file, a batch that cannot be divided, a
            precision that the devices have no units for, a pin that cannot be kept.
        InfeasibleError: no plan fits; names the smallest budget that would.
    """
    request = PlanRequest.parse(profile, setup, ("certify", "runners_up", "tolerance"))
    setting = request.setting
    devices = setting.profile.cluster.devices
    return ask(
        setting, devices, batch_for(setting, devices, request.batch), certify=certify, runners_up=runners_up,
        progress=request.progress,
        stoppable=True, tolerance=share("--tolerance", tolerance) or 0.0,
    )  # fmt: skip


def best_batch(
    profile: ProfileSource | PlanRequest = None, *, max_batch: int | None = None, **setup: Unpack[PlanArguments]
) -> sweeps.BestBatch:
    """The batch of the greatest throughput; see ``analysis.sweeps``.

    Args:
        profile: see ``plan``; also a function that gives the profile of so many devices (None: of all).
        max_batch: samples a step up to which batches are looked at; 64 a device if not given.
        setup: see ``plan``; without ``batch``.

    Raises:
        InputError: see ``plan``; a batch is given.
        InfeasibleError: no batch has a plan that fits.
    """
    request = PlanRequest.parse(profile, setup, ("max_batch",))
    if request.batch is not None:
        raise InputError("--batch", request.batch, "The best one is looked for; --max-batch limits it.")
    return sweeps.best_batch(request.setting, integer("max_batch", max_batch), request.progress)


def fewest_devices(
    profile: ProfileSource | PlanRequest = None,
    *,
    step: float | str | None = None,
    samples: float | str | None = None,
    tokens: float | str | None = None,
    **setup: Unpack[PlanArguments],
) -> sweeps.Fewest:
    """The fewest devices that reach a step time or a throughput, or that fit the model; see ``analysis.sweeps``.

    Args:
        profile: see ``best_batch``.
        step: seconds of a step at most, of ``batch`` samples; or a text: ``130ms``.
        samples: a second at least; or a text: ``2K``.
        tokens: a second at least; or a text: ``1M``.
        setup: see ``plan``; ``gpus`` is the most devices to look at.

    Raises:
        InputError: see ``plan``; more than one target.
    """

    wanted = {
        sweeps.Goal.STEP: seconds("step", step),
        sweeps.Goal.SAMPLES: number("samples", samples),
        sweeps.Goal.TOKENS: number("tokens", tokens),
    }
    targets = [sweeps.Target(goal, value) for goal, value in wanted.items() if value is not None]
    if len(targets) > 1:
        raise InputError("target", ", ".join(target.goal for target in targets), "Give one of them.")
    request = PlanRequest.parse(profile, setup, ("step", "samples", "tokens"))
    target = targets[0] if targets else sweeps.Target(sweeps.Goal.FIT)
    return sweeps.fewest_devices(request.setting, target, request.batch, request.progress)


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
    """What a run costs by the number of devices, and the cheapest; see ``analysis.sweeps``.

    Args:
        profile: see ``best_batch``.
        price: of a device for an hour, in any currency.
        samples: in the run; a number, or a text: ``2M``. The same for tokens and steps.
        tokens: in the run; a million if neither samples nor tokens nor steps are given.
        steps: in the run, of ``batch`` samples.
        within: seconds in which the run must end; or a text: ``30d``.
        setup: see ``plan``; ``gpus`` is the most devices to look at.

    Raises:
        InputError: see ``plan``; more than one size of the run.
        InfeasibleError: no number of devices has a plan that fits.
    """

    if samples is tokens is steps is None:
        tokens = sweeps.MILLION
    names = ("price", "samples", "tokens", "steps", "within")
    request = PlanRequest.parse(profile, setup, names)
    run = sweeps.TrainingAmount(number("samples", samples), number("tokens", tokens), number("steps", steps))
    cost, deadline = number("price", price) or 0.0, seconds("within", within)
    return sweeps.cheapest(
        request.setting, run, cost, batch=request.batch, deadline=deadline, progress=request.progress
    )


def pareto_front(
    profile: ProfileSource | PlanRequest = None, *, memory_step: int | str | None = None, **setup: Unpack[PlanArguments]
) -> sweeps.ParetoFront:
    """The fastest plan for every budget from ``mem`` down; see ``analysis.sweeps``.

    Args:
        profile: see ``best_batch``.
        memory_step: bytes (or a text: ``400MB``) that budgets differ by at the least; 1/32 of the budget if not given.
        setup: see ``plan``.

    Raises:
        InputError: see ``plan``.
        InfeasibleError: no plan fits.
    """
    request = PlanRequest.parse(profile, setup, ("memory_step",))
    step = size("memory_step", memory_step)
    return sweeps.pareto_front(request.setting, request.batch, step=step, progress=request.progress)


def plan_phases(
    phases: Sequence[Phase] | str | Path,
    profile: ProfileSource | PlanRequest = None,
    **setup: Unpack[PlanArguments],
) -> PhasedPlan:
    """The plan of every phase of a run, the cost of switching counted; see ``search.planner``.

    Args:
        phases: or the file that holds them (``plans.phases``).
        profile: see ``plan``; of the phases that name none of their own. Also a function that gives the profile of so
            many tokens a sample (None: as it is).
        setup: see ``plan``; without ``batch``, which is the phases', as ``sequence`` is where they say one. Where a
            model is named, its costs are estimated at the sequence of every phase; figures that were measured at one
            sequence are not taken for another.

    Raises:
        InputError: see ``plan``; a phase whose sequence the profile is not of.
        InfeasibleError: a phase without a plan that fits.
    """

    request = PlanRequest.parse(profile, setup)
    if request.batch is not None:
        raise InputError("--batch", request.batch, "The phases have their own.")
    listed = read_phases(Path(phases)) if isinstance(phases, (str, Path)) else tuple(phases)
    if not listed:
        raise InputError("phases", "none", "Give at least one phase.")
    request = replace(request, forbid=(*request.forbid, "branches"))
    return planner.plan_phases([_phase_case(phase, request) for phase in listed])


def _phase_profile(phase: Phase, request: PlanRequest) -> Profile:
    wanted = phase.sequence or request.sequence
    if phase.profile:
        placed = {"cluster": request.cluster, "gpus": request.gpus, "precision": request.precision}
        known = find_profile(phase.profile, **placed)  # type: ignore[arg-type]
    elif callable(request.profile):
        known = request.profile(wanted)
    else:
        known = replace(request, sequence=wanted if request.estimated else None).profile_on(request.gpus)
    if wanted not in (None, known.graph.sequence):
        remedy = (
            f"Profile {known.name} is of {known.graph.sequence} tokens a sample. Profile the model at {wanted} and "
            "name the file in the phase (profile: FILE), or plan a --model by name, whose costs are estimated."
        )
        raise InputError(f"sequence of phase {phase.name}", wanted, remedy)
    return known


def _phase_case(phase: Phase, request: PlanRequest) -> planner.PhaseCase:
    known = _phase_profile(phase, request)
    setting, devices = request.on(known).setting, known.cluster.devices
    best = ask(setting, devices, phase.batch, progress=request.progress)
    return planner.PhaseCase(phase, setting.session(devices), setting.budget_at(devices), best)


def evaluate(
    plan: Plan | str | Path,
    profile: Profile | str | Path | None = None,
    **setup: Unpack[PlanArguments],
) -> Plan:
    """The plan with its prediction: step time and where it goes, memory of every stage.

    Args:
        plan: a plan, or a file: ours, one written by hand (``plans.written``), or Hetu-Galvatron's.
        profile: with neither a profile nor a model, the one that the plan was made from; for a plan that names none,
            the last profile made in this folder.
        setup: by name:

            - ``model``, ``cluster``, ``gpus``, ``sequence``, ``precision``, ``trainable`` and ``freeze``: as for
              ``plan``.
            - ``mem``: budget a device that its memory is held against, as for ``plan``; the answer's ``fits`` says
              whether it is within it, ``overfull`` which stages are not, ``provenance.budget`` what it is.
            - ``batch``: samples a step; the plan's if not given. At others its micro-batches keep their size.
            - ``target``: the software whose settings the file holds, and which trains by them at its own costs:
              ``megatron``, ``nemo``, ``torchtitan``, ``deepspeed`` or ``accelerate``; see ``plan``. Which settings were
              not looked at is in the notes, too.

    What is priced otherwise than the plan says (its model, its batch) is in the answer's ``provenance.notes``.

    Raises:
        InputError: a file, layer or number that cannot be used; names it. A plan for another number of devices than
            ``gpus``, or for more than there are; the profile that the plan was made from is not here.
    """
    setup = cast("PlanArguments", {name: value for name, value in setup.items() if value is not None})
    return evaluated(plan, PlanRequest.parse(profile, setup), setup)[0]


def evaluated(plan: Plan | str | Path, request: PlanRequest, setup: PlanArguments) -> tuple[Plan, Profile]:
    """A plan with its prediction, and the profile that it is priced with; see ``evaluate``."""
    mem, target = None if setup.get("mem") is None else request.mem, setup.get("target")
    if target is not None and not isinstance(plan, Plan):
        used: list[Profile] = []

        def find(stack: str) -> Profile:
            used.append(request.profile_on(request.gpus, stack))
            return used[-1]

        return priced_settings(Path(plan), target, find, mem, request.batch), used[-1]
    stack = "" if target is None else target_named(target).stack
    found, known = read_with_profile(plan, request, stack, last=True)
    return priced(found, known, mem, request.batch), known
