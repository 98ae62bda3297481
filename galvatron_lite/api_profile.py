"""Find or estimate the profile for a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """Find or estimate the profile for ``plan``; see there for the arguments.

    Args:
        stack: training software whose costs are estimated (``stacks.catalog``); empty: our own runtime.

    Raises:
        InputError: neither a profile nor a model, a cluster with fewer devices, or a precision that its devices do not
            support.
    """
    if profile is not None and model is not None:
        raise InputError("--model", str(model), "Give a profile or a model, not both.")
    if model is not None or shape:
        training = Trainable.parse(trainable, freeze)
        return estimated(model, cluster, gpus, sequence, precision, stack, training, shape, image)
    if image is not None:
        raise InputError("--image", image, "Name the model with --model.")
    if trainable is not None or freeze:
        raise InputError("--trainable" if trainable else "--freeze", trainable or ", ".join(freeze), AS_IT_TRAINS)
    loaded = _read(profile)
    graph = loaded.graph
    for option, value, profiled in (("--seq", sequence, graph.sequence), ("--precision", precision, graph.precision)):
        if value not in (None, profiled):
            remedy = f"Profile {loaded.name} is of {profiled}: profile anew, or give a --model."
            raise InputError(option, value, remedy)
    return _on_cluster(loaded, cluster, gpus)


AS_IT_TRAINS = (
    "What was measured or captured tells nothing of other parameters training. Give a --model by name; or freeze "
    "parameters and add adapters in the module, and profile that."
)


def estimated(
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
    """Estimate the profile of a model on a cluster; see ``find_profile``."""
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
            raise InputError("--trainable", str(trainable), AS_IT_TRAINS)
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
    profile = estimate_profile(graph, machine, precision=graph.precision, name=graph.name, stack=software)
    return replace(profile, stack=stack)


def _described(shape: Mapping[str, str], sequence: int | None, **how: Any) -> ModelGraph:
    """The graph of a model by its shape."""
    from galvatron_lite.model.shapes import build_graph, shape_from_flags

    fields = {**shape, **({} if sequence is None else {"seq": str(sequence)})}
    transformer = fields.get("arch", "decoder") in ("decoder", "encoder", "moe")
    needed = ("layers", "hidden", "heads", "vocab", "seq") if transformer else ()
    if missing := ", ".join(f"--{name}" for name in needed if name not in fields):
        raise InputError(missing, None, "A model by its shape needs --layers, --hidden, --heads, --vocab and --seq.")
    return build_graph(shape_from_flags(fields), **how)


def precision_on(cluster: Cluster | str | Path | None, precision: str | None, gpus: int | None = None) -> str:
    """The precision in which a model's costs are estimated; see ``plan``.

    Raises:
        InputError: no such cluster, or a precision that its devices do not support.
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
        remedy = f"This profile is of {profile.cluster.devices} devices. Profile on {gpus}, or name a --cluster."
        raise InputError("--gpus", gpus, remedy)
    return profile


_SEQUENCES = (None, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens a sample at which a plan's model by name may have been estimated; None: its default."""


def profile_of(plan: Plan | None, *, named: bool = True) -> Profile:
    """Find the profile that a plan was made from, by its hash.

    It can be the last one made in this folder, one in ``profiles/``, or the estimate of a model and cluster by name.

    Args:
        plan: the plan; None: there is none.
        named: whether the user can give a model and a cluster by name instead, for the error.

    Raises:
        InputError: the plan names no profile, or it was not found.
    """
    from galvatron_lite.profiler.store import profile_hash

    source = None if plan is None else plan.provenance
    if plan is None or source is None:
        remedy = f"The plan names no profile: give --profile FILE{', or --model and --cluster' if named else ''}."
        raise InputError("--profile", None, remedy)
    for candidate in _candidates(plan, source):
        if profile_hash(candidate) == source.profile_hash:
            return candidate
    also = ", or --model and --cluster (--trainable, --freeze) as for the plan" if named else ""
    remedy = (
        f"The plan was made from {source.profile} ({source.profile_origin}), which is not here as it was then: "
        f"give --profile FILE{also}."
    )
    raise InputError("--profile", None, remedy)


def profile_if_here(plan: Plan) -> Profile | None:
    """Find the profile that a plan was made from; None if it was not found."""
    with suppress(GalvatronError, OSError):
        return profile_of(plan)
    return None


def _candidates(plan: Plan, source: Provenance) -> Iterator[Profile]:
    """The last profile, those in the folder of profiles with its name, and estimates at usual sequence lengths."""
    from galvatron_lite.profiler.store import read_profile

    with suppress(GalvatronError):
        yield find_profile()
    for path in sorted(PROFILES.glob(f"*/{Path(source.profile).name}*.yaml")):
        with suppress(GalvatronError):
            yield read_profile(path)
    with suppress(GalvatronError):  # of models that cannot be estimated
        for sequence in _SEQUENCES if source.profile_origin.startswith("estimated") else ():
            yield find_profile(
                model=plan.model, cluster=source.cluster, gpus=plan.devices, sequence=sequence,
                precision=plan.precision, stack=source.stack, trainable=next(iter(source.trains), None),
                freeze=source.trains[1:],
            )  # fmt: skip
