"""Measure or estimate the profile of a model, and what plans of it keep to. torch is only imported for modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galvatron_lite.api_profile import AS_IT_TRAINS, PROFILES, estimated
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.trainable import Trainable
from galvatron_lite.profiler.schema import PlanNeeds
from galvatron_lite.profiler.store import save_profile

if TYPE_CHECKING:
    from torch import nn

    from galvatron_lite.cluster.cluster import Cluster
    from galvatron_lite.profiler.schema import Profile

Progress = Callable[[int, int, str], None]


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
    check: bool = True,
) -> Profile:
    """Measure the costs of a model's layers and of this machine's links, or estimate them from data sheets.

    Args:
        model: an ``nn.Module``; with ``estimate`` also a model's name, YAML file or graph.
        batch: an example batch; not needed for models that make their own, or by name.
        cluster: for estimates, the cluster. Measurements are of this machine.
        gpus: for estimates, the number of devices.
        estimate: estimate from data sheets, without running anything.
        loss_fn: ``loss_fn(output, batch)``, for a model whose output does not hold its loss.
        blocks: the repeated blocks, if they are not found.
        sequence: tokens a sample, for a model by name.
        precision: of compute; by default that of the parameters, or for a model by name the best that the devices
            support: bf16, else fp16, else fp32.
        trainable: for estimates of a model by name, what trains, as for ``plan``.
        freeze: for estimates of a model by name, names of layers without gradients.
        name: of the profile; by default made from the model's name.
        folder: of profiles.
        max_samples: largest number of samples on one device to measure.
        progress: called with (done, total, label).
        check: also try a module on a small copy, in seconds, as ``auto_parallelize(check=True)`` does: plans made from
            the profile are then those that it does not refuse.

    Raises:
        InputError: a model that cannot be captured, an unknown name, or, for estimates, a precision that the devices do
            not support; or no plan would train the model as one process does.
    """
    training = Trainable.parse(trainable, freeze)
    if isinstance(model, (str, Path, ModelGraph)):
        result = estimated(model, cluster, gpus, sequence, precision, trainable=training)
        return _saved(result, name, Path(folder))
    from galvatron_lite.model.example import example_batch

    batch = batch if batch is not None else example_batch(model)
    find_needs = partial(_find_needs, model, batch, loss_fn, check)
    if estimate:
        from galvatron_lite.capture.trace import trace

        graph = trace(model, batch, loss_fn=loss_fn, blocks=blocks, precision=precision, name=name)
        result = estimated(graph, cluster, gpus, sequence, precision, trainable=training)
        return _saved(replace(result, needs=find_needs(graph)), name, Path(folder))
    if training is not None:
        raise InputError("--trainable" if trainable else "--freeze", trainable or ", ".join(freeze), AS_IT_TRAINS)
    from galvatron_lite.profiler.measure import measure_profile
    from galvatron_lite.runtime.branches.engine import branch_seconds

    return measure_profile(
        model, batch, loss_fn=loss_fn, blocks=blocks, precision=precision, name=name, folder=Path(folder),
        max_samples=max_samples, progress=progress, branch_seconds=branch_seconds, find_needs=find_needs,
    )  # fmt: skip


def _saved(profile: Profile, name: str | None, folder: Path) -> Profile:
    profile = replace(profile, name=name or profile.name)
    save_profile(profile, folder, profile.cluster.name)
    return profile


def _find_needs(
    model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Any] | None, check: bool, graph: ModelGraph
) -> PlanNeeds:
    """Try a model as ``auto_parallelize`` does, on rank 0, and return on every rank what plans of it keep to.

    Without ``check``, parameters that train or data, they are not known, and empty.

    Raises:
        InputError: no plan trains the model.
    """
    from torch import distributed as dist

    from galvatron_lite.model.batch import tensors_of
    from galvatron_lite.runtime.checkpoint.plain import generators, put_generators
    from galvatron_lite.runtime.peers import from_rank_zero
    from galvatron_lite.verify.trial.check import try_model

    trains = any(parameter.requires_grad for parameter in model.parameters())
    if not (check and trains) or any(tensor.is_meta for tensor in tensors_of(batch)):
        return PlanNeeds()

    def find() -> PlanNeeds:
        findings = try_model(model, batch, graph.layers, loss_fn=loss_fn)
        needs = findings.needs()
        for one in findings.restrictions():
            if not (one.fix or one.forbid or one.alike):
                raise InputError(one.field, one.value, one.remedy)
        if findings.loss_error is None:
            return needs
        more = f"auto_parallelize refuses plans that share the batch as long as {findings.loss_error.field} is open: "
        return replace(needs, notes=(*needs.notes, more + findings.loss_error.remedy.rstrip(".")))

    random_states = generators()
    needs: PlanNeeds = from_rank_zero(find) if dist.is_initialized() else find()
    put_generators(random_states)
    return needs
