"""Making a profile: everything there is to measure, in one order, resumable, written by one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.cluster.probe import probe
from galvatron_lite.files import to_data
from galvatron_lite.model.batch import LossFn, batch_size
from galvatron_lite.model.discover_blocks import BlockNames
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.trace_meta import precision_of
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.profiler.measure_assemble import assemble, software
from galvatron_lite.profiler.measure_bench import BranchTimer, LayerBench
from galvatron_lite.profiler.measure_scope import Scope, make_tasks
from galvatron_lite.profiler.measure_tasks import Journal, Progress, agree, first_rank, run_tasks
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import data_hash, journal_path, save_profile, unwritable
from galvatron_lite.profiler.timing import BRIEF_RULE, DEFAULT_RULE, TimingRule
from galvatron_lite.world import join, pick_device

USUAL_SAMPLES = 16
"""Most samples on one device that are measured unless asked for more; beyond them time grows in a straight line."""


def measure_profile(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    cluster: Cluster | None = None,
    loss_fn: LossFn | None = None,
    blocks: BlockNames | None = None,
    precision: str | None = None,
    max_samples: int | None = None,
    tensor_degrees: Sequence[int] | None = None,
    name: str | None = None,
    folder: Path | str = Path("profiles"),
    progress: Progress | None = None,
    resume: bool = True,
    remember: bool = True,
    device: str = "auto",
    rule: TimingRule = DEFAULT_RULE,
    brief: bool = False,
    graph: ModelGraph | None = None,
    branch_seconds: BranchTimer | None = None,
) -> Profile:
    """Measure what a model's layers and this world's links cost, and write it down.

    Called alone or, under torchrun, by every rank alike. Each finished point is kept in a journal beside the
    profile-to-be, so a call that was interrupted goes on where it stopped. Rank 0 writes.

    Args:
        model: an ``nn.Module`` (perhaps on meta; it is not changed) or a function that makes it.
        batch: example batch; rows are repeated where more samples are measured than it has.
        cluster: what this world is; probed if not given.
        loss_fn: see ``model.batch.loss_of``.
        blocks: where the repeated blocks are, if they are not found.
        precision: of compute; that of the parameters if not given.
        max_samples: the largest number of samples on one device; the batch's, at most 16, if not given.
        tensor_degrees: degrees to measure; all that the world and the model allow if not given.
        name: of the profile; the model's if not given.
        folder: where profiles are kept.
        progress: called on rank 0 with (done, total, label).
        resume: whether to go on from a journal.
        remember: whether it is the last profile made here, where there is one already.
        device: ``auto``, ``cpu`` or ``cuda``.
        rule: how long to time one point.
        brief: measure for plans of one device: the fewest and the most samples, each point for a moment, and no
            shares of pixels.
        graph: of the model, where it was traced already.
        branch_seconds: measures what a call of a branch with devices of its own costs; data sheets' if not given.
    """
    place = pick_device(device)
    if "RANK" in os.environ:
        join(place)
    whole = model if isinstance(model, nn.Module) else model()
    if graph is None:
        graph = trace(whole, batch, loss_fn=loss_fn, blocks=blocks, precision=precision)
    machine = agree(cluster or probe(_world(), place.type))
    counts = sample_counts(max_samples or min(batch_size(batch), USUAL_SAMPLES))
    rule = BRIEF_RULE if brief and rule is DEFAULT_RULE else rule
    scope = Scope(
        graph=graph,
        parameter_precision=precision_of(whole),
        samples=tuple(dict.fromkeys((counts[0], counts[-1]))) if brief else counts,
        degrees=tuple(tensor_degrees or divisors(_world())),
        world=_world(),
        cluster=machine,
        device=place,
        rule=rule,
        whole=brief,
    )
    tasks = make_tasks(scope, LayerBench(whole, graph, batch, loss_fn, place, rule, branch_seconds))
    title, root = name or graph.name, Path(folder)
    if (refused := agree(unwritable(root) if first_rank() else None)) is not None:
        raise refused
    journal = _open_journal(journal_path(root, machine_name(machine), title), scope, resume)
    profile = assemble(title, scope, run_tasks(tasks, journal, progress))
    if journal is not None:
        save_profile(profile, root, machine_name(machine), remember=remember)
        journal.remove()
    agree(None)  # the files are there when any rank returns
    return profile


def sample_counts(most: int) -> tuple[int, ...]:
    """1, 2, 4 ... up to and including ``most``."""
    powers = [2**power for power in range(most.bit_length())]
    return tuple(sorted({*powers, most}))


def machine_name(cluster: Cluster) -> str:
    """Name of the folder for profiles made on a machine."""
    host = cluster.fingerprint.get("host", "")[:6]
    return " ".join(part for part in (cluster.device.name, f"x{cluster.devices}", host) if part)


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _open_journal(path: Path, scope: Scope, resume: bool) -> Journal | None:
    """Rank 0's journal; a rerun with anything else to measure, on another machine or software, begins anew."""
    if not first_rank():
        return None
    about = [
        to_data(scope.graph),
        scope.samples,
        scope.degrees,
        scope.cluster.fingerprint,
        str(scope.device),
        software(),
    ]
    return Journal(path, data_hash(about), resume)
