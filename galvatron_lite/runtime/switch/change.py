"""A change of plan under way, phase by phase.

validate: the plan fits this world, and the optimizer's states can be cut. prepare: the user's modules are whole again,
without values, and examined. groups: process groups of the new plan. build: the new split, without values. carry: every
tensor goes from the boxes that ranks hold to those that they are to hold; checksums of whole tensors before and after
agree. commit. After each phase the ranks agree whether it went well on all; if not, every rank goes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError, LaunchError
from galvatron_lite.parallelism.process_groups import ProcessGroups
from galvatron_lite.plans.execution import check_runs
from galvatron_lite.plans.schema import Mode, Plan
from galvatron_lite.runtime.alike import shares_samples
from galvatron_lite.runtime.compiled import check_compile
from galvatron_lite.runtime.mesh import Meshes, build_meshes
from galvatron_lite.runtime.parallelize import Prepared, SetupOptions, StageRuntime, build, make_pipeline_groups
from galvatron_lite.runtime.pieces import Entries, Held, Parallel, held_parameters, held_states
from galvatron_lite.runtime.switch.agree import gathered, together
from galvatron_lite.runtime.switch.blanks import Blanks
from galvatron_lite.runtime.switch.buffers import live_buffers, wanted_buffers
from galvatron_lite.runtime.switch.cargo import Hold, TensorReport, items_of
from galvatron_lite.runtime.switch.carry import Carrying
from galvatron_lite.runtime.switch.memory import available
from galvatron_lite.runtime.switch.optimizer import (
    Described,
    Regrouping,
    States,
    apply,
    blank_states,
    describe,
    merged,
    regroup,
)
from galvatron_lite.runtime.switch.origin import OriginalModel
from galvatron_lite.runtime.switch.randomness import RandomStates
from galvatron_lite.runtime.switch.storages import Sized, allocate, release
from galvatron_lite.runtime.switch.structure import Changes, Structure

Observe = Callable[[str], None]
"""Called at the start of every phase, with its name; what it raises fails the phase."""
Result = TypeVar("Result")


class SwitchableModel(Parallel, Protocol):
    """A model in training, which can be split by another plan: a ``ParallelModel``."""

    plan: Plan
    device: torch.device
    origin: OriginalModel
    plan_check: Callable[[Plan], None] | None

    def adopt(self, plan: Plan, runtimes: Sequence[StageRuntime], options: SetupOptions) -> None:
        """Be split by another plan from now on."""
        ...


@dataclass(slots=True)
class PiecesView:
    """A split model, as ``runtime.pieces`` sees it."""

    entries: Entries
    runtimes: Sequence[StageRuntime]
    structures: Sequence[nn.Module]


class PhaseClock:
    """When phases began."""

    def __init__(self) -> None:
        self._starts: list[tuple[str, float]] = []

    def start(self, phase: str) -> None:
        """A phase begins."""
        self._starts.append((phase, time.perf_counter()))

    def phases(self) -> dict[str, float]:
        """Seconds of each phase, the last one up to now."""
        ends = [*(start for _, start in self._starts[1:]), time.perf_counter()]
        return {phase: end - start for (phase, start), end in zip(self._starts, ends, strict=True)}


@dataclass(slots=True)
class Old:
    """What is kept of the plan that is left, to go back to it."""

    hold: Hold  # this rank's tensors
    random: RandomStates  # random states
    structure: Structure | None = None  # the modules, split as they were; None as long as they still are
    gradients: Sized = field(default_factory=list)  # memory of gradient buffers
    copies: list[Tensor] = field(default_factory=list)  # of parameters, that an optimizer updates in their stead
    changes: Changes = field(default_factory=lambda: Changes([], []))  # of the user's since the model was split last


@dataclass(slots=True)
class New:
    """What there is of the plan that comes."""

    options: SetupOptions  # how the model is set up
    prepared: Prepared  # what is known of the plan
    meshes: Meshes | None = None  # process groups
    runtimes: list[StageRuntime] = field(default_factory=list)  # what trains this rank's parts
    hold: Hold = field(default_factory=lambda: Hold([]))  # this rank's tensors
    blank: dict[str, Sized] = field(default_factory=dict)  # memory of optimizer states, to be taken later, by name
    buffers: frozenset[str] = frozenset()  # names of buffers
    states: States = field(default_factory=States)  # of the optimizer
    regrouping: Regrouping = field(default_factory=lambda: Regrouping([], []))  # of its groups
    gradients: Sized = field(default_factory=list)  # memory of gradient buffers


class PlanChange:
    """A change of plan; its methods are called in their order, by all ranks. See ``live.switch`` for the arguments."""

    def __init__(
        self,
        parallel: SwitchableModel,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        scheduler: Any,
        batch: Any,
        observe: Observe,
    ) -> None:
        self.clock = PhaseClock()
        self._parallel, self._optimizer, self._plan, self._scheduler = parallel, optimizer, plan, scheduler
        self._origin, self._batch, self._observe = parallel.origin, batch, observe
        self._groups = ProcessGroups(parallel.origin.options.groups)
        self._told = Described()
        self._before: list[dict[str, TensorReport]] = []
        self._old: Old | None = None
        self._new: New | None = None
        self._carrying: Carrying | None = None

    def validate(self) -> None:
        """The plan is for this world, and what the ranks hold can be cut.

        Raises:
            LaunchError: it is for another world.
            InputError: it is of another kind, gradients are pending, or a state cannot be cut.
        """
        for runtime in self._parallel.runtimes:
            runtime.updates.publish()
        everyone = self._gathered("validate", self._checked)
        self._told = merged([told for told, _ in everyone])
        self._before = [held for _, held in everyone]

    def prepare(self) -> None:
        """Make the user's modules whole again, without values, and find out what the plan needs to know."""
        self._together("prepare", self._examined)

    def make_groups(self) -> None:
        """Make the process groups of the plan that the old one does not have."""
        self._together("groups", lambda: None)
        self._new_model.meshes = build_meshes(self._plan, self._parallel.device.type, self._groups)
        make_pipeline_groups(self._new_model.prepared, self._groups)

    def build(self) -> None:
        """Split the modules by the plan, without values."""
        self._together("build", self._built)

    def carry(self, free: int | None) -> Carrying:
        """Bring everything to where the plan has it, and check that it arrived.

        Args:
            free: bytes that may be taken; what is free if not given.
        """
        new, old, device = self._new_model, self._left, self._parallel.device
        after = self._gathered("carry", lambda: new.hold.told)
        items = items_of(self._before, after)
        self._carrying = Carrying(items, old.hold, new.hold, new.blank, new.buffers, device, self._observe)
        self._carrying.run(available(device) if free is None else free)
        for runtime in new.runtimes:
            runtime.updates.take()
        old.random.share(shares_samples(self._plan) and not shares_samples(self._parallel.plan), device)
        self._together("commit", lambda: None)
        return self._carrying

    def commit(self) -> None:
        """Train under the plan from now on; give up what is left of the old one."""
        new, old, parallel, before = self._new_model, self._left, self._parallel, self._origin.options.groups
        _close(parallel.runtimes)
        allocate(new.gradients)
        parallel.adopt(self._plan, new.runtimes, new.options)
        apply(self._optimizer, new.regrouping, new.states, self._scheduler)
        self._origin.options, self._origin.batch = new.options, self._example
        self._origin.whole.take_in(old.changes)
        self._origin.settle()
        old.random.restore()
        assert self._carrying is not None
        self._carrying.give_up()
        release(old.copies)
        before.destroy(kept=self._groups)
        self._groups.settle()

    def roll_back(self) -> None:
        """Go back to the plan that the model had."""
        if self._carrying is not None:
            self._carrying.undo()
        if self._old is not None:
            if self._old.structure is not None:
                self._old.structure.restore()
            allocate(self._old.gradients)
            self._old.random.restore()
        _close(self._new.runtimes if self._new is not None else ())
        self._groups.destroy(kept=self._origin.options.groups)

    @property
    def _new_model(self) -> New:
        assert self._new is not None
        return self._new

    @property
    def _left(self) -> Old:
        assert self._old is not None
        return self._old

    @property
    def _example(self) -> Any:
        return self._origin.batch if self._batch is None else self._batch

    def _together(self, phase: str, work: Callable[[], Result]) -> Result:
        self.clock.start(phase)
        return together(phase, self._parallel.device, lambda: self._observed(phase, work))

    def _gathered(self, phase: str, work: Callable[[], Result]) -> list[Result]:
        self.clock.start(phase)
        return gathered(phase, self._parallel.device, lambda: self._observed(phase, work))

    def _observed(self, phase: str, work: Callable[[], Result]) -> Result:
        self._observe(phase)
        return work()

    def _checked(self) -> tuple[Described, dict[str, TensorReport]]:
        parallel = self._parallel
        check_plan(self._plan, parallel)
        if parallel.plan_check is not None:
            parallel.plan_check(self._plan)
        check_idle(parallel, self._optimizer, self._scheduler)
        for module in (one for runtime in parallel.runtimes for one in runtime.sharded.zero_modules):
            module.reshard()
        told = describe(self._optimizer, _names(parallel.entries, parallel.runtimes))
        cut = _cut_states(told)
        held = [one for one in held_states(parallel, self._optimizer) if one.name in cut]
        hold = Hold([*held_parameters(parallel), *held, *live_buffers(parallel, self._origin.layers)])
        copies = [one.host.copy.detach() for runtime in parallel.runtimes for one in runtime.owned if one.host]
        self._old = Old(hold, RandomStates(parallel.device), copies=list[Tensor](copies))
        return told, hold.told

    def _examined(self) -> None:
        origin, old = self._origin, self._left
        assert origin.split is not None
        old.changes = origin.split.changes()
        old.structure = origin.everything()
        old.gradients = _release_gradients(self._parallel.runtimes)
        origin.whole.restore()
        old.changes.apply()
        for name, parameter in origin.model.named_parameters():
            parameter.requires_grad_(self._told.trained.get(self._first_name(name), parameter.requires_grad))
        options = origin.options_of(self._plan, self._groups)
        self._new = New(options, origin.prepare(self._plan, options, self._example, dist.get_rank()))

    def _built(self) -> None:
        origin, new, parallel = self._origin, self._new_model, self._parallel
        assert new.meshes is not None
        shapes = {name: told.shape for held in self._before for name, told in held.items()}
        blanks = Blanks(origin.layers, parallel.device, shapes)
        new.runtimes = build(origin.model, new.prepared, new.meshes, new.options, blanks.place)
        new.gradients = _release_gradients(new.runtimes)
        view = PiecesView(parallel.entries, new.runtimes, [runtime.model for runtime in new.runtimes])
        names = _names(parallel.entries, new.runtimes)
        new.regrouping = regroup(self._optimizer, self._told, names, self._scheduler)
        new.states = blank_states(self._told, names)
        held, cut = held_states(view, new.states), _cut_states(self._told)
        entries = [one for one in held if one.name in cut]
        new.blank = _blank(entries)
        buffers = wanted_buffers(view, blanks.buffers)
        new.buffers = frozenset(one.name for one in buffers)
        new.hold = Hold([*held_parameters(view), *entries, *buffers])

    def _first_name(self, name: str) -> str:
        return self._parallel.entries.names.get(name, name)


def check_plan(plan: Plan, parallel: SwitchableModel) -> None:
    """Refuse plans that a model in training cannot change to.

    Raises:
        LaunchError: the plan is for another number of processes.
        InputError: it is for inference, or the plan that is left or comes delays gradients or has branches.
    """
    world = dist.get_world_size()
    if plan.devices != world:
        raise LaunchError(
            f"The plan is for {plan.devices} device(s), but {world} process(es) train. Give a plan for {world}, or "
            "save, start as many processes as the plan is for, and load."
        )
    for one, what in ((parallel.plan, "plan that is left"), (plan, "plan")):
        if one.mode is not Mode.TRAINING or one.cyclic is not None or one.branches:
            remedy = "Plans for training without delayed gradients and branches can be changed; else save and load."
            raise InputError(what, one.model, remedy)
    check_runs(plan)
    check_compile(parallel.origin.options.compile, plan)


def check_idle(parallel: SwitchableModel, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Refuse to change the plan in the middle of a step.

    Raises:
        InputError: there are gradients, or the scheduler is another optimizer's.
    """
    for one in (one for runtime in parallel.runtimes for one in runtime.owned):
        if one.updated.grad is not None or one.gradient is not None:
            remedy = "Change the plan between steps: after optimizer.step(), call optimizer.zero_grad()."
            raise InputError("gradients", one.names[0], remedy)
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise InputError("scheduler", type(scheduler).__name__, "Give the scheduler of this very optimizer.")


def _close(runtimes: Iterable[StageRuntime]) -> None:
    for runtime in runtimes:
        runtime.reducer.close()


def _names(entries: Entries, runtimes: Iterable[StageRuntime]) -> dict[nn.Parameter, str]:
    """Names of what the optimizer updates on this rank, in the order of the layers."""
    return {one.updated: entries.names.get(one.names[0], one.names[0]) for runtime in runtimes for one in runtime.owned}


def _cut_states(described: Described) -> set[str]:
    """Names of the optimizer's tensors that are cut as their parameters are."""
    return {f"{name}/{key}" for name, kept in described.states.items() for key, entry in kept.items() if entry.dtype}


def _blank(held: Iterable[Held]) -> dict[str, Sized]:
    found: dict[str, Sized] = {}
    for one in held:
        found.setdefault(one.name, []).extend(release([one.tensor]))
    return found


def _release_gradients(runtimes: Iterable[StageRuntime]) -> Sized:
    buffers: list[Tensor] = [buffer for runtime in runtimes for buffer in runtime.reducer.buffers]
    return release(buffers)
