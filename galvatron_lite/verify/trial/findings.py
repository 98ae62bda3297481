"""What of a model depends on how a batch is shared, and the plans that this rules out."""

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

SPLITS_SAMPLES = ("tensor", "context", "expert", "spatial", "channel", "branches")
"""Dimensions under which a rank has part of a sample, or of what is computed of it."""
SPLITS_PARAMETERS = ("pipeline", "zero", *SPLITS_SAMPLES)
"""Dimensions under which a rank lacks some of the parameters, or counts a term of the loss more than once."""
FULL_BATCH = ("dp=1", "microbatches=1")
"""Pins of plans that keep the batch in one piece."""
_KEEP_BATCH = (
    "Give a plan that keeps the batch whole (--fix dp=1 --fix microbatches=1), or leave the plan out to have one "
    "searched"
)
_ONLY_FULL_BATCH = "only plans that keep the batch whole (dp 1, one micro-batch) train like one process"
_ALL_PARAMETERS = "every device holds all parameters"
_ONE_STAGE = "a plan of data parallelism or ZeRO-1 with one stage"
_SEARCHED = "or leave the plan out to have one searched"


def _strategies(plan: Plan) -> list[Strategy]:
    return [run.strategy for stage in plan.stages for run in stage.runs]


def _recomputes(plan: Plan) -> bool:
    return any(strategy != strategy.split for strategy in _strategies(plan))


def _splits_samples(plan: Plan) -> bool:
    """Whether a rank has part of a sample, or of the experts."""
    return any(
        strategy.devices > strategy.batch_degree or lines_of(strategy).spread is not None
        for strategy in _strategies(plan)
    )


def _shares_loss(plan: Plan) -> bool:
    """Whether a rank or a pass has only a part of the loss, which is scaled before backward."""
    strategies = _strategies(plan)
    return shares_batch(plan) or bool(plan.branches) or any(one.devices > one.tensor for one in strategies)


def _splits_parameters(plan: Plan) -> bool:
    """Whether a rank has a shard of the parameters, or some of the layers."""
    sharded = any(strategy.parameter_shards > 1 for strategy in _strategies(plan))
    return sharded or _splits_samples(plan) or len(plan.stages) > 1 or bool(plan.branches)


def _splits_or_recomputes(plan: Plan) -> bool:
    return _recomputes(plan) or _splits_parameters(plan)


def _repeats(plan: Plan, inside: bool, around: bool) -> bool:
    """Whether modules inside of layers, or around them, run more often than once a step, or on some ranks only."""
    recomputes = inside and _recomputes(plan)
    return plan.microbatches > 1 or plan.cyclic is not None or recomputes or (around and len(plan.stages) > 1)


def _loses_writes(plan: Plan) -> bool:
    """Whether forward passes run more often than once, or on less than all parameters and their states."""
    complete = all(
        strategy.devices == strategy.replicas and strategy.offload is Offload.NONE for strategy in _strategies(plan)
    )
    return _splits_or_recomputes(plan) or not complete or plan.microbatches > 1


def _regroups_samples(plan: Plan) -> bool:
    """Whether layers share the batch among more or fewer ranks than others do."""
    branches = [run.strategy for branch in plan.branches for run in branch.runs]
    return len({strategy.batch_degree for strategy in (*_strategies(plan), *branches)}) > 1


@dataclass(frozen=True, slots=True)
class Restriction:
    """A property of a model that rules plans out."""

    refuses: Callable[[Plan], bool]  # whether the model trains otherwise under a plan than in one process
    field: str  # field, value, remedy: of the error that refuses such a plan
    value: str
    remedy: str
    forbid: tuple[str, ...] = ()  # forbid, fix: options of ``galvatron plan`` that avoid such plans
    fix: tuple[str, ...] = ()
    alike: str = ""  # why all layers must share the batch alike, which the planner knows; empty: they need not
    reason: str = ""  # the property, in words; empty: no pins avoid it
    effect: str = ""  # on plans with these pins, for their notes; empty: not worth a note
    change: str = ""  # a change of the model that lifts the restriction; empty: none is known


@dataclass(frozen=True, slots=True)
class Findings:
    """What of a model depends on how a batch is shared. Parameters, buffers and attributes are given by name."""

    weight: LossWeight | None = None  # the loss weight that is right; None: shares weigh the same, or the user gave one
    loss_error: InputError | None = None  # what the user must state of the loss before plans may share the batch
    undivided: bool = False  # whether the loss is right only for the full batch
    least_samples: int = 1  # that a share must have: one alone may not run, or give another loss
    unrepeatable: bool = False  # whether blocks that run again in backward compute something else
    unscaled: bool = False  # whether gradients do not scale with the loss
    # file and line of code that decides what it computes by comparing a number computed from all samples
    compares: tuple[str, ...] = ()
    # file and line of code that decides by whether any or all entries fulfil a condition, or how many do
    guards: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()  # parameters that code outside of their layers reads
    leaking: tuple[str, ...] = ()  # layers with values that reach the loss without being returned
    written: tuple[str, ...] = ()  # parameters that a forward pass changes, such as averages of others
    sparse: tuple[str, ...] = ()  # parameters with sparse gradients
    takes_gradients: bool = False  # whether a forward pass takes gradients, which backward differentiates again
    # layers that are given or return what depends on the other samples of a share: offsets, sums over samples
    bound: tuple[str, ...] = ()
    bound_around: tuple[str, ...] = ()  # modules around layers, for which the same holds
    # buffers that a forward pass updates from the batch, each with ``mean`` or ``sum``: how the updates of shares
    # combine to that of the batch; empty: by neither
    buffers: tuple[tuple[str, str], ...] = ()
    # buffers and attributes that combine by neither and that the next loss reads, such as a queue of earlier keys
    uncombined: tuple[str, ...] = ()
    buffers_between: tuple[str, ...] = ()  # buffers that no layer holds: code between layers updates them
    attributes: tuple[str, ...] = ()  # plain attributes that a forward pass changes and the next one reads
    attributes_inside: bool = False  # whether code inside of layers may read any of the attributes
    attributes_around: bool = False  # whether code around layers may read any of the attributes
    foreign: tuple[str, ...] = ()  # shapes of parameters with gradients that the model does not hold
    unused: tuple[str, ...] = ()  # entries of the batch that neither the model nor the loss function takes
    nondeterministic: bool = False  # whether the loss of one batch differs from pass to pass in spite of equal seeds
    draws_elsewhere: bool = False  # whether the loss depends on random numbers of Python or numpy
    skipped: str = ""  # why the model was not tried; empty: it was

    @property
    def keeps_batch(self) -> bool:
        """Whether no plan may share a batch out."""
        return self.undivided or self.unscaled or bool(self.compares) or bool(self.uncombined)

    def restrictions(self) -> Iterator[Restriction]:
        """Yield what rules plans out, in the order in which plans are checked."""
        yield from self._of_batch()
        yield from self._of_state()
        yield from self._of_parameters()

    def _has_few_samples(self, plan: Plan) -> bool:
        samples = plan.global_batch // plan.microbatches
        return shares_batch(plan) and any(
            samples // strategy.batch_degree < self.least_samples for strategy in _strategies(plan)
        )

    def _of_batch(self) -> Iterator[Restriction]:
        """Yield restrictions of losses and gradients that do not add up over shares of the batch."""
        if self.sparse:
            yield Restriction(
                lambda _: True, "parameters", _few(self.sparse),
                "Their gradients are sparse, which no plan can sum or shard. Pass sparse=False where the model calls "
                "torch.nn.functional.embedding (nn.Embedding and nn.EmbeddingBag need no change).",
            )  # fmt: skip
        if self.nondeterministic:
            yield Restriction(
                lambda plan: plan.devices > 1 or _repeats(plan, inside=True, around=True), "model", "its loss",
                "It differs in every pass over the same batch, even with the same random numbers of torch, numpy and "
                "Python: it depends on a generator or an iterator of its own, or on other state that changes from pass "
                "to pass. Ranks, micro-batches and recomputation would each continue from other values. Draw from "
                "torch's default generator, and keep changing numbers in attributes or buffers of modules. check=False "
                "trains anyway, each rank with its own values.",
            )  # fmt: skip
        if self.undivided and self.skipped:
            yield Restriction(
                shares_batch, "plan", "one that shares the batch",
                f"No part of the batch runs by itself: {self.skipped}. Rows of one tensor may number those of another, "
                f"as edges do nodes. {_KEEP_BATCH}; or give each sample rows of its own, padded to one shape.",
                fix=FULL_BATCH,
                reason="no part of the batch runs by itself",
                effect=_ONLY_FULL_BATCH,
                change="give each sample rows of its own, padded to one shape",
            )  # fmt: skip
        elif self.undivided:
            yield Restriction(
                shares_batch, "plan", "one that shares the batch",
                "The loss compares samples with one another, or depends on their number, so the loss of the batch is "
                f"not the mean of the losses of its shares, with which this plan would train. {_KEEP_BATCH}. If the "
                "loss is a mean over samples on your data, pass check=False.",
                fix=FULL_BATCH,
                reason="the loss compares samples with one another",
                effect=_ONLY_FULL_BATCH,
                change="" if self.buffers else
                "make the loss a mean over samples (for a loss that balances experts: over the tokens of each sample)",
            )  # fmt: skip
        if self.unscaled:
            yield Restriction(
                _shares_loss, "model", "gradients that do not scale with the loss",
                "A hook or the backward of a torch.autograd.Function adds to gradients, or clips them. The losses of "
                "shares of a batch or of its tokens are scaled before backward, so this plan would train with other "
                "gradients. Give a plan of tensor parallelism or stages with one micro-batch, "
                f"{_SEARCHED}; or add the term to the loss, and clip after backward (max_grad_norm).",
                forbid=tuple(name for name in SPLITS_SAMPLES if name != "tensor"), fix=FULL_BATCH,
                reason="a hook or the backward of a torch.autograd.Function adds to gradients, or clips them",
                effect=_ONLY_FULL_BATCH,
                change="add the term to the loss, and clip after backward (max_grad_norm)",
            )  # fmt: skip
        if self.compares:
            yield Restriction(
                shares_batch, "model", _few(self.compares),
                "There a number computed from all samples decides what runs. Each share of a batch would compute a "
                f"number of its own, and may decide otherwise. {_KEEP_BATCH}; or decide sample by sample with a mask "
                "(torch.where). If shares always decide alike, pass check=False.",
                fix=FULL_BATCH,
                reason=f"at {_few(self.compares)} a number computed from all samples decides what runs",
                effect=_ONLY_FULL_BATCH,
                change="decide sample by sample (torch.where)",
            )  # fmt: skip

    def _of_state(self) -> Iterator[Restriction]:
        """Yield restrictions of buffers and attributes that forward passes change."""
        if self.buffers:
            names = _few([name for name, _ in self.buffers])
            yield Restriction(
                _splits_samples, "buffers", names,
                "Forward passes update these buffers from the samples. Under this plan a rank computes only part "
                "of each sample, and would update them with other values. Give a plan of data parallelism, ZeRO or "
                f"stages, {_SEARCHED}.",
                forbid=SPLITS_SAMPLES,
                reason=f"forward passes update {names} from the samples, so every rank needs complete samples",
                change=f"let forward passes update {names} only after they have read them for the last time",
            )  # fmt: skip
        if self.uncombined:
            names = _few(self.uncombined)
            yield Restriction(
                shares_batch, "buffers", names,
                "Forward passes update these values from the samples, by neither a mean nor a sum over them, and the "
                "loss reads the result. Updates from shares of the batch cannot be combined to the update from the "
                f"full batch. {_KEEP_BATCH}. check=False lets each rank update its own copy.",
                fix=FULL_BATCH,
                reason=f"the loss reads {names}, which forward passes update from the full batch",
                effect=_ONLY_FULL_BATCH,
            )  # fmt: skip
        if self.attributes:
            names, inside, around = _few(self.attributes), self.attributes_inside, self.attributes_around
            limits = "".join([", one stage"] * around + [", without recomputation"] * inside)
            yield Restriction(
                lambda plan: _repeats(plan, inside, around), "attributes", names,
                f"Every forward pass changes {names}, and the loss reads the result. One process runs one pass a step; "
                "this plan runs several (micro-batches, recomputation), or runs the modules on different ranks "
                f"(stages). Use a buffer that the training loop updates; or give a plan of one micro-batch{limits}, "
                f"{_SEARCHED}.",
                forbid=("recompute",) * inside + ("pipeline",) * around, fix=("microbatches=1",),
                reason=f"every forward pass changes {names}, which the loss reads",
                effect="only plans of one micro-batch train like one process",
                change=f"use a buffer for {names} that the training loop updates",
            )  # fmt: skip
        if self.buffers_between:
            yield Restriction(
                lambda plan: len(plan.stages) > 1, "buffers", _few(self.buffers_between),
                "Code between layers updates these buffers. Only one stage runs that code, and the others would keep "
                f"the old values. Give a plan of one stage, {_SEARCHED}; or move the buffers and their update into a "
                "module that the model calls.",
                forbid=("pipeline",),
                reason=f"code between layers updates {_few(self.buffers_between)}, which only one stage runs",
            )  # fmt: skip

    def _of_parameters(self) -> Iterator[Restriction]:
        """Yield restrictions of values used outside of their layers, and of changes and gradients in forward."""
        # gradients that forward takes reach the loss past all outputs of layers: restricted below
        if self.leaking and not self.takes_gradients:
            names = _few(self.leaking)
            yield Restriction(
                _splits_parameters, "model", f"values not returned by {names}",
                "The loss depends on values that these layers write elsewhere (to a list, an attribute) instead of "
                "returning them. Such values do not reach other stages, and a rank may have only a part of them. "
                f"Return them; or give {_ONE_STAGE}, {_SEARCHED}.",
                forbid=SPLITS_PARAMETERS,
                reason=f"the loss depends on more than what {names} return",
                effect=_ALL_PARAMETERS,
                change="return from each layer all that the loss depends on",
            )  # fmt: skip
        if self.written:
            names = _few(self.written)
            yield Restriction(
                _loses_writes, "parameters", names,
                "Forward passes change these parameters. Further micro-batches and recomputation would change them "
                "again, and ranks that hold shards or some of the layers would change only these. Change them after "
                f"optimizer.step(), or give a plan of data parallelism alone with one micro-batch, {_SEARCHED}.",
                forbid=(*SPLITS_PARAMETERS, "recompute"), fix=("microbatches=1",),
                reason=f"forward passes change {names}",
                effect=f"{_ALL_PARAMETERS} and runs its samples once",
            )  # fmt: skip
        if self.takes_gradients:
            yield Restriction(
                _splits_or_recomputes, "model", "that calls torch.autograd.grad",
                "Forward passes take gradients, which backward differentiates again. Under this plan a rank has only "
                "shards or some of the layers, or frees what they need and restores it for one backward pass alone. "
                f"Give {_ONE_STAGE} and without recomputation, {_SEARCHED}.",
                forbid=(*SPLITS_PARAMETERS, "recompute"),
                reason="forward passes take gradients, and layers that are split cannot be differentiated twice",
                effect=f"{_ALL_PARAMETERS}, and none recomputes",
            )  # fmt: skip
        if self.bound:
            names = _few(self.bound)
            yield Restriction(
                _regroups_samples, "model", f"what {names} take or return beside rows of samples",
                "It depends on which samples are together (arange(len(batch)), offsets, their number, sums over them). "
                "Each rank computes it for its own share, and under this plan layers that share the batch among fewer "
                "or more ranks would take it for theirs. Compute numbers inside the layer, and return means or rows of "
                "samples; or give a plan under which all layers share the batch alike (--fix data=2 without branches), "
                f"{_SEARCHED}.",
                alike=f"what {names} take or return",
            )  # fmt: skip
        if self.bound_around:
            names = _few(self.bound_around)
            yield Restriction(
                lambda plan: bool(plan.branches) and _regroups_samples(plan), "model",
                f"branches at {names}",
                "What they take or return depends on which samples are together (their number, sums over them), and "
                "branches have other samples than the code around them. Return means or rows of samples; or give a "
                f"plan without branches (--forbid branches), {_SEARCHED}.",
                forbid=("branches",),
                reason=f"what {names} take or return depends on which samples are together",
            )  # fmt: skip
        if self.unrepeatable:
            yield Restriction(
                _recomputes, "model", "blocks that compute something else when they run again",
                "Recomputation runs blocks again in backward. By then their parameters, or values that they read from "
                "elsewhere (attributes, globals), are no longer those of the forward pass, as with "
                f"torch.func.functional_call and context managers. Give a plan without recomputation, {_SEARCHED}; or "
                "hand blocks all that they read as arguments.",
                forbid=("recompute",),
                reason="blocks compute something else when recomputation runs them again",
                change="hand blocks all that they read as arguments",
            )  # fmt: skip
        if self.outside:
            names = _few(self.outside)
            yield Restriction(
                _splits_parameters, "parameters", names,
                "Code outside of their layers reads these parameters. Under this plan a rank has a shard of them, or "
                f"none, and the code would compute something else. Give {_ONE_STAGE}, {_SEARCHED}; or move that "
                "code into the optimizer (weight_decay) or into their layers (for a head with the weights of an "
                "embedding: an nn.Linear with head.weight = embedding.weight).",
                forbid=SPLITS_PARAMETERS,
                reason=f"code outside of their layers reads {names}",
                effect=_ALL_PARAMETERS,
            )  # fmt: skip

    def pins(self) -> dict[str, tuple[str, ...]]:
        """Return the options ``fix`` and ``forbid`` of ``galvatron plan`` under which the planner finds right plans.

        Raises:
            InputError: the user must state something of the loss first.
        """
        if self.loss_error is not None:
            raise self.loss_error
        needs = self.needs()
        pins = {"fix": needs.fix, "forbid": needs.forbid}
        return {name: words for name, words in pins.items() if words}

    def needs(self) -> PlanNeeds:
        """Return what plans keep to, for a profile of the model."""
        restrictions = list(self.restrictions())
        return PlanNeeds(
            fix=tuple(dict.fromkeys(pin for restriction in restrictions for pin in restriction.fix)),
            forbid=tuple(dict.fromkeys(pin for restriction in restrictions for pin in restriction.forbid)),
            notes=tuple(self.notes()),
            alike=next((restriction.alike for restriction in restrictions if restriction.alike), ""),
            reasons=tuple(restriction.reason for restriction in restrictions if restriction.reason),
            least_samples=self.least_samples,
        )

    def notes(self) -> list[str]:
        """Return why plans are pinned, in words."""
        return [
            f"{restriction.reason}: {restriction.effect}" for restriction in self.restrictions() if restriction.effect
        ]

    def check(self, plan: Plan) -> None:
        """Refuse a plan under which the model trains otherwise than in one process.

        Raises:
            InputError: the plan breaks a restriction, or shares a batch though the user must state something of the
                loss first.
        """
        if self.loss_error is not None and shares_batch(plan):
            raise self.loss_error
        for restriction in self.restrictions():
            if restriction.refuses(plan):
                raise InputError(restriction.field, restriction.value, restriction.remedy)
        if self._has_few_samples(plan):
            remedy = (
                "The model does not run on a single sample, or trains otherwise on it than on several (squeeze() drops "
                "the dim of samples, or code asks for their number). Give a plan with fewer micro-batches or replicas, "
                f"or a larger batch, {_SEARCHED}."
            )
            raise InputError("plan", "one with shares of a single sample", remedy)

    def without_plan(self, devices: int, uncaptured: str = "", pins: str = "") -> InputError:
        """Return the error that no plan trains like one process: what rules plans out, and what to change.

        Args:
            devices: more than one.
            uncaptured: the module that does not run without data; empty: all of them do.
            pins: the user's pins, if they leave no plan; else empty.
        """
        restrictions = [restriction for restriction in self.restrictions() if restriction.reason]
        reasons = [restriction.reason for restriction in restrictions]
        remedies = [f"lift {pins}"] * bool(pins) + [
            restriction.change for restriction in restrictions if restriction.change
        ]
        if uncaptured:
            reasons.append(f"{uncaptured} does not run without data, so ranks can share nothing but the batch")
            remedies.append(
                "make it run without data, so that plans can keep the batch whole (with masks instead of branches on "
                "values; for experts with model.zoo.moe.Experts)"
            )
        remedies.append("train in one process; check=False trains the mean of the shares' losses")
        why, what = "; ".join(reasons), "; or ".join(remedies)
        remedy = f"On {devices} devices no plan trains like one process: {why}. {what[:1].upper()}{what[1:]}."
        if pins:
            return InputError("fix", pins, remedy)
        buffers = next((restriction for restriction in restrictions if restriction.field == "buffers"), None)
        field, value = ("devices", devices) if buffers is None else (buffers.field, buffers.value)
        return InputError(field, value, remedy)

    @property
    def synced(self) -> dict[str, str]:
        """The buffers that ranks synchronize after each step, with ``mean`` or ``sum``."""
        return {name: rule for name, rule in self.buffers if rule}

    def warnings(self) -> list[str]:
        """Return what could not be determined, or may train otherwise than intended, in words."""
        lines = []
        if local := [name for name, rule in self.buffers if not rule and name not in self.uncombined]:
            lines.append(
                f"Forward passes update {_few(local)} from the samples, by neither a mean nor a sum over them: each "
                "rank updates its own copy, by each micro-batch."
            )
        if self.guards:
            lines.append(
                f"Values of the samples decide what runs at {_few(self.guards)}, and each share of a batch decides by "
                "its own samples. That trains like one process if both branches compute the same for such samples."
            )
        if self.foreign:
            lines.append(
                f"Parameters that the model does not hold (of shape {_few(self.foreign)}) get gradients. They are not "
                "trained, and each rank has the gradient of its own samples. Make their module a submodule of the "
                "model (model.criterion = criterion), or freeze them (requires_grad_(False))."
            )
        if self.unused:
            lines.append(
                f"Neither the model's forward nor loss_fn takes {_few(self.unused)} of the batch: is an argument "
                "misspelled?"
            )
        if self.skipped and not self.undivided:  # which keeps the batch in one piece
            lines.append(
                "Whether the loss of a batch is the mean of the losses of its shares was not tried: "
                f"{self.skipped}. If it is a mean over samples, pass check=False to silence this."
            )
        return lines


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
