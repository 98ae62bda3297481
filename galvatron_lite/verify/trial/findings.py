"""What of a model depends on how a batch is shared, and which plans that rules out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.describe import shares_batch
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import PlanNeeds
from galvatron_lite.runtime.loss.weights import LossWeight

SAMPLES_NEED = ("tensor", "context", "expert", "spatial", "channel", "branches")
"""Dimensions under which a forward pass updates a buffer from parts of samples."""
OUTSIDE_NEEDS = ("pipeline", "zero", "tensor", "context", "expert", "spatial", "channel", "branches")
"""Dimensions that leave a rank without whole parameters, or count a term of the loss more than once."""


def _shares_samples(plan: Plan) -> bool:
    """Whether a rank has part of a sample, or of the experts."""
    strategies = _strategies(plan)
    return any(one.devices > one.batch_degree or lines_of(one).spread is not None for one in strategies)


def _shares_parameters(plan: Plan) -> bool:
    """Whether a rank has a share of what layers hold, or of the layers."""
    sharded = any(one.parameter_shards > 1 for one in _strategies(plan))
    return sharded or _shares_samples(plan) or len(plan.stages) > 1 or bool(plan.branches)


def _shares_or_repeats(plan: Plan) -> bool:
    """As ``_shares_parameters``; or whether it computes layers again."""
    again = any(one != one.split for one in _strategies(plan))
    return again or _shares_parameters(plan)


def _repeats(plan: Plan, inside: bool, around: bool) -> bool:
    """Whether modules run more often than once a step: those inside of layers, or those around them."""
    recomputes = inside and any(one != one.split for one in _strategies(plan))
    return plan.microbatches > 1 or plan.cyclic is not None or recomputes or (around and len(plan.stages) > 1)


def _changes_what_is_written(plan: Plan) -> bool:
    """Whether forward passes run other than once, or elsewhere than on whole parameters and their states."""
    kept = all(one.devices == one.replicas and one.offload is Offload.NONE for one in _strategies(plan))
    return _shares_or_repeats(plan) or not kept or plan.microbatches > 1


def _strategies(plan: Plan) -> list[Strategy]:
    return [run.strategy for stage in plan.stages for run in stage.runs]


@dataclass(frozen=True, slots=True)
class Restriction:
    """Something of a model that rules plans out."""

    refuses: Callable[[Plan], bool]  # whether the model trains otherwise under a plan than in one process
    field: str  # field, value, remedy: of the error that a plan is refused with
    value: str
    remedy: str
    forbid: tuple[str, ...] = ()  # forbid, fix: what the planner keeps to, as options of ``galvatron plan``
    fix: tuple[str, ...] = ()
    note: str = ""  # what the pins are there for; empty: they go without saying
    reason: str = ""  # why no plan is left; empty: it is never the reason
    change: str = ""  # what to change of the model, so that there are plans; empty where nothing is known


@dataclass(frozen=True, slots=True)
class Findings:
    """What of a model depends on how a batch is shared."""

    weight: LossWeight | None = None  # a loss weight that was found; None: shares weigh the same, or the user gave one
    undivided: bool = False  # whether the loss is right only for the batch as one: no plan may share it out
    # places in the code that compare a number made of all samples to decide what runs
    compares: tuple[str, ...] = ()
    # places that decide by whether any or all entries are so, or how many, of which the trial saw one outcome alone
    asks: tuple[str, ...] = ()
    # parameters that code outside of their layers reads; such a plan has whole parameters
    outside: tuple[str, ...] = ()
    # modules whose values reach the loss otherwise than by what they return: by a list that they append to, or an
    # attribute
    leaking: tuple[str, ...] = ()
    written: tuple[str, ...] = ()  # parameters that a forward pass changes, such as averages of others
    sparse: tuple[str, ...] = ()  # parameters whose gradients are sparse
    differentiates: bool = False  # whether a forward pass takes gradients, which are differentiated again
    # buffers that a forward pass updates from the batch: ``mean`` or ``sum`` of what shares make of them, or empty
    # where it is neither
    buffers: tuple[tuple[str, str], ...] = ()
    # those of the buffers that are neither, and that the loss of the next batch reads, as a queue of earlier keys
    remembered: tuple[str, ...] = ()
    # plain attributes that a forward pass changes and the next one reads, and whether code inside of layers, or around
    # them, may be what reads any
    kept: tuple[str, ...] = ()
    kept_inside: bool = False
    kept_around: bool = False
    # those of the buffers that no layer holds: code between layers updates them, which a stage runs for its own layers
    loose: tuple[str, ...] = ()
    # shapes of parameters that get gradients and that the model does not hold, as those of a loss function
    unheld: tuple[str, ...] = ()
    # entries of the batch that neither the model nor the loss function takes
    unread: tuple[str, ...] = ()
    # whether passes over the same batch give other losses, though all random numbers are the same
    unsteady: bool = False
    draws_elsewhere: bool = False  # whether it draws random numbers of Python or numpy
    skipped: str = ""  # why nothing was found out; empty where it was
    unsaid: InputError | None = None  # what has to be said of the loss before a batch can be shared out; None: nothing

    @property
    def keeps_batch(self) -> bool:
        """Whether no plan may share a batch out."""
        return self.undivided or bool(self.compares) or bool(self.remembered)

    def restrictions(self) -> Iterator[Restriction]:
        """What rules plans out, in the order in which they are checked."""
        yield from self._of_batch()
        yield from self._of_state()
        yield from self._of_parameters()

    def _of_batch(self) -> Iterator[Restriction]:
        """Of gradients and losses that are no sums over shares of the batch."""
        if self.sparse:
            yield Restriction(
                lambda _: True, "parameters", _few(self.sparse),
                "Their gradients are sparse, which no plan sums or shards. Pass sparse=False where the model calls "
                "torch.nn.functional.embedding; of nn.Embedding and nn.EmbeddingBag it is switched off by itself.",
            )  # fmt: skip
        if self.unsteady:
            yield Restriction(
                lambda plan: plan.devices > 1 or _repeats(plan, inside=True, around=True), "model", "its loss",
                "It is another one in every pass over the same batch, with the same random numbers of torch, numpy and "
                "Python: it depends on a generator of its own, an iterator, or what else changes from pass to pass, "
                "which no plan can follow. Draw from torch's default generator, and keep numbers in attributes or "
                "buffers of modules. check=False lets each rank go on with its own.",
            )  # fmt: skip
        if self.undivided:
            yield Restriction(
                shares_batch, "plan", "one that shares the batch",
                "The loss compares samples with one another: that of the batch is no mean of its shares' losses. Give "
                "a plan that keeps the batch whole (--fix dp=1 --fix microbatches=1), or none, to have one found. If "
                "it is a mean over samples on your data, pass check=False.",
                fix=("dp=1", "microbatches=1"),
                note="the loss compares samples with one another: only plans that keep the batch whole (dp 1, one "
                "micro-batch) train like one process",
                reason="the loss compares samples with one another, so that it takes the batch as a whole",
                change="" if self.buffers else
                "make the loss a mean over samples (of one that balances experts: over each sample's tokens)",
            )  # fmt: skip
        if self.compares:
            names = _few(self.compares)
            yield Restriction(
                shares_batch, "model", names,
                "There a number made of all samples decides what runs, and each share of a batch would decide by its "
                "own. Give a plan that keeps the batch whole (--fix dp=1 --fix microbatches=1), or none, to have "
                "one found; or let a mask take the number's place, sample by sample (torch.where). If shares always "
                "decide alike, pass check=False.",
                fix=("dp=1", "microbatches=1"),
                note=f"at {names} a number made of all samples decides what runs: only plans that keep the batch whole "
                "(dp 1, one micro-batch) train like one process",
                reason=f"at {names} a number made of all samples decides what runs",
                change="decide sample by sample (torch.where)",
            )  # fmt: skip

    def _of_state(self) -> Iterator[Restriction]:
        """Of buffers and attributes that forward passes change."""
        if self.buffers:
            names = _few([name for name, _ in self.buffers])
            yield Restriction(
                _shares_samples, "buffers", names,
                "Forward passes update these buffers from the samples, of which a rank under this plan has a part of "
                "each. Give a plan of data parallelism, ZeRO or stages, or none, to have one found.",
                forbid=SAMPLES_NEED,
                reason=f"forward passes update {names} from the samples, so that no rank may have part of a sample",
                change=f"let forward passes update {names} only after they have read them for the last time",
            )  # fmt: skip
        if self.remembered:
            names = _few(self.remembered)
            yield Restriction(
                shares_batch, "buffers", names,
                "Forward passes update these buffers from the samples, by neither a mean nor a sum over them, and the "
                "loss reads them: shares of the batch would make others of them. Give a plan that keeps the batch "
                "whole (--fix dp=1 --fix microbatches=1), or none, to have one found. check=False lets each rank "
                "update its own.",
                fix=("dp=1", "microbatches=1"),
                note=f"the loss reads {names}, which a forward pass updates from the batch as a whole: only plans that "
                "keep the batch whole (dp 1, one micro-batch) train like one process",
                reason=f"the loss reads {names}, which forward passes update from the batch as a whole",
            )  # fmt: skip
        if self.kept:
            names, inside, around = _few(self.kept), self.kept_inside, self.kept_around
            once = " ".join(["and stage"] * around + ["without recomputation"] * inside)
            yield Restriction(
                lambda plan: _repeats(plan, inside, around), "attributes", names,
                f"Every forward pass changes {names}, which the loss reads. One process runs one pass a step, this "
                "plan several (micro-batches, recomputation) or parts of it (stages). Use a buffer that the training "
                f"loop updates; or give a plan of one micro-batch {once}, or none, to have one found.",
                forbid=("recompute",) * inside + ("pipeline",) * around, fix=("microbatches=1",),
                note=f"every forward pass changes {names}, which the loss reads: only plans of one micro-batch train "
                "like one process",
                reason=f"every forward pass changes {names}, which the loss reads",
                change=f"use a buffer for {names} that the training loop updates",
            )  # fmt: skip
        if self.loose:
            yield Restriction(
                lambda plan: len(plan.stages) > 1, "buffers", _few(self.loose),
                "Code between layers updates these buffers, and only one stage runs it. Give a plan of one stage, or "
                "none, to have one found; or move buffers and update into a module that is called.",
                forbid=("pipeline",),
                reason=f"code between layers updates {_few(self.loose)}, which only one stage runs",
            )  # fmt: skip

    def _of_parameters(self) -> Iterator[Restriction]:
        """Of parameters and outputs that are used outside of their layers, and of gradients in forward."""
        if self.leaking and not self.differentiates:  # whose loss is made of slopes
            names = _few(self.leaking)
            yield Restriction(
                _shares_parameters, "model", f"{names}: more than what it returns",
                "The loss is made of what these layers write elsewhere (to a list that they are given, an attribute), "
                "which reaches no other stage, and of which a rank may have a share. Return it, or give a plan of data "
                "parallelism or ZeRO-1 with one stage, or none, to have one found.",
                forbid=OUTSIDE_NEEDS,
                note=f"the loss is made of more than what {names} return: every device holds all parameters",
                reason=f"the loss is made of more than what {names} return",
                change="return what a layer makes for the loss",
            )  # fmt: skip
        if self.written:
            yield Restriction(
                _changes_what_is_written, "parameters", _few(self.written),
                "Forward passes change these parameters: further micro-batches and recomputation would do so again, "
                "and shards, shares and stages do not hold all. Change them after optimizer.step(), or give a plan of "
                "data parallelism alone with one micro-batch, or none, to have one found.",
                forbid=(*OUTSIDE_NEEDS, "recompute"), fix=("microbatches=1",),
                note=f"forward passes change {_few(self.written)}: every device holds all and runs its samples once",
                reason=f"forward passes change {_few(self.written)}",
            )  # fmt: skip
        if self.differentiates:
            yield Restriction(
                _shares_or_repeats, "model", "that calls torch.autograd.grad",
                "Forward passes take gradients, through layers of which a rank under this plan has a share, or which "
                "it would run or gather again at most once. Give a plan of data parallelism or ZeRO-1 with one stage "
                "and without recomputation, or none, to have one found.",
                forbid=(*OUTSIDE_NEEDS, "recompute"),
                note="forward passes take gradients: every device holds all parameters, and none recomputes",
                reason="forward passes take gradients, which nothing that is split can differentiate again",
            )  # fmt: skip
        if self.outside:
            yield Restriction(
                _shares_parameters, "parameters", _few(self.outside),
                "Code outside of their layers reads these parameters, of which a rank under this plan has a share, or "
                "none. Give a plan of data parallelism or ZeRO-1 with one stage, or none, to have one found; or move "
                "what reads them into the optimizer (weight_decay) or into their layers (a head with the weights of an "
                "embedding: an nn.Linear with head.weight = embedding.weight).",
                forbid=OUTSIDE_NEEDS,
                note=f"code outside of their layers reads {_few(self.outside)}: every device holds all parameters",
                reason=f"code outside of their layers reads {_few(self.outside)}",
            )  # fmt: skip

    def pins(self) -> dict[str, tuple[str, ...]]:
        """What the planner keeps to: ``fix`` and ``forbid`` of ``galvatron plan``."""
        if self.unsaid is not None:
            raise self.unsaid
        needs = self.needs()
        pins = {"fix": needs.fix, "forbid": needs.forbid}
        return {name: words for name, words in pins.items() if words}

    def needs(self) -> PlanNeeds:
        """What plans keep to, for a profile of the model."""
        every = list(self.restrictions())
        return PlanNeeds(
            fix=tuple(dict.fromkeys(word for one in every for word in one.fix)),
            forbid=tuple(dict.fromkeys(word for one in every for word in one.forbid)),
            notes=tuple(self.notes()),
            reasons=tuple(one.reason for one in every if one.reason),
        )

    def notes(self) -> list[str]:
        """What pins are there for, in words."""
        return [one.note for one in self.restrictions() if one.note]

    def check(self, plan: Plan) -> None:
        """Refuse a plan under which the model trains otherwise than in one process.

        Raises:
            InputError: it shares a batch that must stay whole, or parameters that code outside of their layers reads.
        """
        if self.unsaid is not None and shares_batch(plan):
            raise self.unsaid
        for one in self.restrictions():
            if one.refuses(plan):
                raise InputError(one.field, one.value, one.remedy)

    def without_plan(self, devices: int, uncaptured: str = "", pins: str = "") -> InputError:
        """The error that no plan on so many devices trains like one process: what rules plans out, and what to change.

        Args:
            devices: more than one.
            uncaptured: the part of the model that does not run without data; empty where it was captured.
            pins: of the user, beside which there is no plan; empty where there are none.
        """
        every = [one for one in self.restrictions() if one.reason]
        reasons = [one.reason for one in every]
        remedies = [f"lift {pins}"] * bool(pins) + [one.change for one in every if one.change]
        if uncaptured:
            reasons.append(f"{uncaptured} does not run without data, so that ranks share nothing but the batch")
            remedies.append(
                "make it run without data, so that plans may keep the batch whole (masks in place of values that "
                "decide; for experts model.zoo.moe.Experts)"
            )
        remedies.append("train in one process; check=False trains the mean of the shares' losses")
        why, what = "; ".join(reasons), "; or ".join(remedies)
        remedy = f"On {devices} devices no plan trains like one process: {why}. {what[:1].upper()}{what[1:]}."
        if pins:
            return InputError("fix", pins, remedy)
        named = next((one for one in every if one.field == "buffers"), None)
        return InputError("devices", devices, remedy) if named is None else InputError(named.field, named.value, remedy)

    @property
    def synced(self) -> dict[str, str]:
        """Rules of the buffers that ranks keep alike."""
        return {name: rule for name, rule in self.buffers if rule}

    def warnings(self) -> list[str]:
        """What could not be found out, or cannot be kept right, in words."""
        lines = []
        if lone := [name for name, rule in self.buffers if not rule and name not in self.remembered]:
            lines.append(
                f"Forward passes update {_few(lone)} from the samples, by neither a mean nor a sum over them: each "
                "rank and micro-batch updates its own by its share."
            )
        if self.asks:
            lines.append(
                f"Values of the samples decide what runs at {_few(self.asks)}; each share of a batch decides by its "
                "own samples. That trains like one process where the other course gives the same for such samples."
            )
        if self.unheld:
            lines.append(
                f"Parameters that the model does not hold (of shape {_few(self.unheld)}) get gradients: nothing trains "
                "them here, and each rank has the gradient of its own samples. Make what holds them a submodule of the "
                "model (model.criterion = criterion), or let them get none (requires_grad_(False))."
            )
        if self.unread:
            lines.append(
                f"Neither the model's forward nor loss_fn takes {_few(self.unread)} of the batch: is an argument "
                "misspelled?"
            )
        if self.skipped:
            lines.append(
                f"Whether the loss of a batch is that of its shares was not tried: {self.skipped}. If it is a mean "
                "over samples, pass check=False to leave this out."
            )
        return lines


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
