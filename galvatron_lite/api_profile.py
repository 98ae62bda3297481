"""The profile that plans are made from: measured, estimated or read. No torch until something is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.model.trainable import Trainable

if TYPE_CHECKING:
    from galvatron_lite.cluster.cluster import Cluster
    from galvatron_lite.model.graph import ModelGraph
    from galvatron_lite.plans.schema import Plan, Provenance
    from galvatron_lite.profiler.schema import Profile

PROFILES = Path("profiles")

Progress = Callable[[int, int, str], None]


def find_profile(
    profile: Profile | str | Path | None = None,
    *,
    model: ModelGraph | str | Path | None = None,
    shape: Mapping[str, str] | None = None,
    image: str | None = None,
    cluster: Cluster | str | Path | None = None,
    gpus: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    stack: str = "",
    trainable: str | None = None,
    freeze: Sequence[str] = (),
) -> Profile:
    """The profile that ``plan`` works from; see there for the arguments.

    Args:
        stack: training software whose costs are estimated (``stacks.catalog``); empty: our own runtime.

    Raises:
        InputError: nothing to plan from, a cluster that does not have the devices asked for, or a precision that its
            devices have no units for.
    """
    if profile is not None and model is not None:
        raise InputError("--model", str(model), "Give a profile or a model, not both.")
    if model is not None or shape:
        training = Trainable.parse(trainable, freeze)
        return _estimate(model, cluster, gpus, sequence, precision, stack, training, shape, image)
    if image is not None:
        raise InputError("--image", image, "Name the model with --model.")
    if trainable is not None or freeze:
        raise InputError("--trainable" if trainable else "--freeze", trainable or ", ".join(freeze), _AS_IT_TRAINS)
    known = _read(profile)
    graph = known.graph
    for option, wanted, has in (("--seq", sequence, graph.sequence), ("--precision", precision, graph.precision)):
        if wanted not in (None, has):
            raise InputError(option, wanted, f"Profile {known.name} is of {has}: profile anew, or give a --model.")
    return _on_cluster(known, cluster, gpus)


_AS_IT_TRAINS = (
    "What was measured or captured tells nothing of other parameters training. Give a --model by name; or freeze "
    "parameters and add adapters in the module, and profile that."
)


def _estimate(
    model: ModelGraph | str | Path | None,
    cluster: Cluster | str | Path | None,
    gpus: int | None,
    sequence: int | None,
    precision: str | None,
    stack: str = "",
    trainable: Trainable | None = None,
    shape: Mapping[str, str] | None = None,
    image: str | None = None,
) -> Profile:
    from galvatron_lite.capture.named import graph_named
    from galvatron_lite.cluster.precisions import check_precision
    from galvatron_lite.model.graph import ModelGraph
    from galvatron_lite.model.shapes import load_model, load_shape
    from galvatron_lite.model.shapes.fields import sizes_of
    from galvatron_lite.profiler.estimate import estimate_profile
    from galvatron_lite.stacks.catalog import STACKS

    if stack and stack not in STACKS:
        raise InputError("stack", stack, f"Give one of {', '.join(STACKS)}.")
    software = STACKS[stack] if stack else None
    machine = _machine(cluster, gpus)
    if isinstance(model, ModelGraph):
        check_precision(model.precision, machine)
        if precision not in (None, model.precision):
            raise InputError("--precision", precision, f"The model was captured in {model.precision}; capture it anew.")
        if trainable is not None:
            raise InputError("--trainable", str(trainable), _AS_IT_TRAINS)
        graph = model
    else:
        chosen, kernels = precision_on(machine, precision), None if software is None else software.kernels
        if shape:
            if model is not None:
                raise InputError("--model", model, f"Give a model or its shape (--{', --'.join(shape)}), not both.")
            graph = _described(shape, sequence, precision=chosen, kernels=kernels, trainable=trainable)
        elif image is not None:
            sizes = sizes_of(load_shape(str(model)), str(model), image)
            graph = load_model(str(model), overrides=sizes, precision=chosen, trainable=trainable)
        else:
            graph = graph_named(str(model), sequence=sequence, precision=chosen, kernels=kernels, trainable=trainable)
    known = estimate_profile(graph, machine, precision=graph.precision, name=graph.name, stack=software)
    return replace(known, stack=stack)


def _described(shape: Mapping[str, str], sequence: int | None, **how: Any) -> ModelGraph:
    """The graph of a model that is described by its shape."""
    from galvatron_lite.model.shapes import build_graph, shape_from_flags

    fields = {**shape, **({} if sequence is None else {"seq": str(sequence)})}
    transformer = fields.get("arch", "decoder") in ("decoder", "encoder", "moe")
    needed = ("layers", "hidden", "heads", "vocab", "seq") if transformer else ()
    if missing := ", ".join(f"--{name}" for name in needed if name not in fields):
        raise InputError(missing, None, "A model by its shape needs --layers, --hidden, --heads, --vocab and --seq.")
    return build_graph(shape_from_flags(fields), **how)


def precision_on(cluster: Cluster | str | Path | None, precision: str | None, gpus: int | None = None) -> str:
    """The precision that a model's costs are estimated in; see ``plan``.

    Raises:
        InputError: no such cluster, or a precision that its devices have no units for.
    """
    from galvatron_lite.cluster.precisions import best_precision, check_precision

    machine = _machine(cluster, gpus)
    if precision is None:
        return best_precision(machine)
    check_precision(precision, machine)
    return precision


def _machine(cluster: Cluster | str | Path | None, gpus: int | None) -> Cluster:
    from galvatron_lite.cluster.catalog import load_cluster
    from galvatron_lite.cluster.cluster import Cluster

    if cluster is None:
        raise InputError("--cluster", None, "Say where the model is to run: a name such as a100-80gb, or a YAML file.")
    return cluster if isinstance(cluster, Cluster) else load_cluster(str(cluster), gpus)


def _read(profile: Profile | str | Path | None) -> Profile:
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.profiler.store import last_profile, read_profile

    if isinstance(profile, Profile):
        return profile
    return read_profile(Path(profile) if profile is not None else last_profile(PROFILES))


def _on_cluster(profile: Profile, cluster: Cluster | str | Path | None, gpus: int | None) -> Profile:
    if cluster is not None:
        from galvatron_lite.profiler.transfer import device_type, scale_up

        machine = _machine(cluster, gpus)
        if not machine.alike:
            remedy = (
                "It has devices of several types, a profile the figures of one: plan a --model, which is estimated."
            )
            raise InputError("--cluster", machine.name, remedy)
        names = dict.fromkeys(group.device.name for group in profile.cluster.groups)
        if device_type(machine.device.name) not in map(device_type, names):
            remedy = (
                f"Layers of the profile are of {', '.join(names)}. Carry it over first (galvatron profile transfer "
                f"PROFILE --to {machine.name}), or plan a --model, which is estimated."
            )
            raise InputError("--cluster", machine.name, remedy)
        return scale_up(profile, machine)
    if gpus is not None and gpus != profile.cluster.devices:
        raise InputError(
            "--gpus",
            gpus,
            f"This profile is of {profile.cluster.devices} devices. Profile on {gpus}, or name a --cluster.",
        )
    return profile


def profile(
    model: Any,
    batch: Any = None,
    *,
    cluster: Cluster | str | Path | None = None,
    gpus: int | None = None,
    estimate: bool = False,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    blocks: Any = None,
    sequence: int | None = None,
    precision: str | None = None,
    trainable: str | None = None,
    freeze: Sequence[str] = (),
    name: str | None = None,
    folder: Path | str = PROFILES,
    max_samples: int | None = None,
    progress: Progress | None = None,
) -> Profile:
    """What a model's layers and this cluster's links cost: measured here, or estimated from data sheets.

    Args:
        model: an ``nn.Module``; or, with ``estimate``, also a model's name, YAML file or graph.
        batch: an example batch; not needed for a model that can make its own or is named.
        cluster: for estimates: where it is to run. Measurements are of the machine at hand.
        gpus: for estimates: how many devices.
        estimate: from data sheets, without running anything.
        loss_fn: ``loss_fn(output, batch)``, for a model whose output is not or does not hold its loss.
        blocks: where the repeated blocks are, if they are not found.
        sequence: tokens a sample, for a model by name.
        precision: of compute; that of the parameters if not given; for a model by name the best that the
            devices train in: bf16, else fp16, else fp32.
        trainable: for estimates of a model by name: which parameters train, as for ``plan``.
        freeze: the same: names of what gets no gradient.
        name: of the profile; made from the model's name if not given.
        folder: where profiles are kept.
        max_samples: the largest number of samples on one device to measure.
        progress: called with (done, total, label).

    Raises:
        InputError: a model that cannot be captured, an unknown name; for estimates, a precision that the devices have
            no units for.
    """
    from galvatron_lite.model.graph import ModelGraph
    from galvatron_lite.profiler.store import save_profile

    training = Trainable.parse(trainable, freeze)
    if estimate or isinstance(model, (str, Path)):
        if not isinstance(model, (str, Path, ModelGraph)):
            from galvatron_lite.capture.trace import trace
            from galvatron_lite.model.example import example_batch

            given = batch if batch is not None else example_batch(model)
            model = trace(model, given, loss_fn=loss_fn, blocks=blocks, precision=precision, name=name)
        known = _estimate(model, cluster, gpus, sequence, precision, trainable=training)
        named = replace(known, name=name or known.name)
        save_profile(named, Path(folder), named.cluster.name)
        return named
    if training is not None:
        raise InputError("--trainable" if trainable else "--freeze", trainable or ", ".join(freeze), _AS_IT_TRAINS)
    from galvatron_lite.model.example import example_batch
    from galvatron_lite.profiler.measure import measure_profile
    from galvatron_lite.runtime.branches.engine import branch_seconds

    return measure_profile(
        model, batch if batch is not None else example_batch(model), loss_fn=loss_fn, blocks=blocks,
        precision=precision, name=name, folder=Path(folder), max_samples=max_samples, progress=progress,
        branch_seconds=branch_seconds,
    )  # fmt: skip


_SEQUENCES = (None, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens a sample that are tried where a plan's model by name was planned at a length of its own."""


def profile_of(plan: Plan | None, *, named: bool = True) -> Profile:
    """The profile that a plan says it was made from: the last one made here, one in ``profiles/``, or the estimate of
    its model by name on its cluster by name; taken only where its digest is the plan's.

    Args:
        plan: None: there is none.
        named: whether the user may give the model and the cluster by name instead.

    Raises:
        InputError: the plan names none, or none that is here is the one.
    """
    from galvatron_lite.profiler.store import profile_hash

    made_from = None if plan is None else plan.provenance
    if plan is None or made_from is None:
        remedy = f"The plan names no profile: give --profile FILE{', or --model and --cluster' if named else ''}."
        raise InputError("--profile", None, remedy)
    for candidate in _candidates(plan, made_from):
        if profile_hash(candidate) == made_from.profile_hash:
            return candidate
    also = ", or --model and --cluster (--trainable, --freeze) as for the plan" if named else ""
    remedy = (
        f"The plan was made from {made_from.profile} ({made_from.profile_origin}), which is not here as it was then: "
        f"give --profile FILE{also}."
    )
    raise InputError("--profile", None, remedy)


def profile_if_here(plan: Plan) -> Profile | None:
    """The same; None where the profile is not here."""
    with suppress(GalvatronError, OSError):
        return profile_of(plan)
    return None


def _candidates(plan: Plan, made_from: Provenance) -> Iterator[Profile]:
    """The last profile, those in the folder of profiles with its name, estimates at the usual lengths of samples."""
    from galvatron_lite.profiler.store import read_profile

    with suppress(GalvatronError):
        yield find_profile()
    for path in sorted(PROFILES.glob(f"*/{Path(made_from.profile).name}*.yaml")):
        with suppress(GalvatronError):
            yield read_profile(path)
    with suppress(GalvatronError):  # those that there is no estimate of
        for sequence in _SEQUENCES if made_from.profile_origin.startswith("estimated") else ():
            yield find_profile(
                model=plan.model, cluster=made_from.cluster, gpus=plan.devices, sequence=sequence,
                precision=plan.precision, stack=made_from.stack,
                trainable=next(iter(made_from.trains), None), freeze=made_from.trains[1:],
            )  # fmt: skip
