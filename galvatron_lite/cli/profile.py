"""``galvatron profile``: measure or estimate what a model's layers cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from galvatron_lite.capture.named import load_factory
from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import interruptible, print_json, progress_bar
from galvatron_lite.limits import SAMPLES

if TYPE_CHECKING:
    from galvatron_lite.cluster.cluster import Cluster
    from galvatron_lite.profiler.schema import Profile


INTERRUPTED = "interrupted; finished measurements are kept, the same command goes on from there"


def profile_command(
    model: Annotated[
        str,
        typer.Argument(help="FILE.py:FACTORY returning the model, (model, batch) or (model, batch, loss_fn); "
                            "or a name (gpt-tiny, llama2-7b) or YAML file."),
    ],
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="With --estimate: name (a100-80gb) or YAML file.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="With --estimate: devices.")] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="From data sheets, without running anything.")
    ] = False,
    sequence: Annotated[int | None, typer.Option("--seq", help="Tokens a sample, for a model by name.")] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="Of compute: fp32, bf16, fp16.")] = None,
    samples: Annotated[
        int | None, typer.Option("--max-samples", min=1, max=SAMPLES, help="Most samples on one device to measure.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Of the profile; from the model if not given.")] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where profiles are kept.")] = Path("profiles"),
    calibration: options.Calibration = None,  # noqa: ARG001  its callback chooses the constants
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:  # fmt: skip
    """Measure or estimate what each layer costs.

    Measures on this machine, alone or under torchrun; with --estimate costs come from data sheets.
    """
    import os

    # memory tracking makes the allocator warn of every tensor that is older than it; nothing a user can act on
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from galvatron_lite import api
    from galvatron_lite.profiler.store import last_profile

    target, batch, loss_fn = _target(model, estimate, sequence)
    with interruptible(INTERRUPTED), progress_bar("Profiling", quiet=as_json) as progress:
        made = api.profile(
            target,
            batch,
            loss_fn=loss_fn,
            cluster=cluster,
            gpus=gpus,
            estimate=estimate,
            sequence=sequence,
            precision=precision,
            name=name,
            folder=folder,
            max_samples=samples,
            progress=progress,
        )
    if _first_rank():
        _print(made, last_profile(folder), as_json)


def _target(model: str, estimate: bool, sequence: int | None) -> tuple[Any, Any, Any]:
    if ".py:" in model:
        return load_factory(model)
    if estimate:
        return model, None, None
    from galvatron_lite.verify.source import build_named

    return build_named(model, sequence), None, None


def _first_rank() -> bool:
    import os

    return os.environ.get("RANK", "0") == "0"


def _print(profile: Profile, where: Path, as_json: bool) -> None:
    from galvatron_lite.cli.tables import print_profile

    if as_json:
        print_json(profile)
    else:
        print_profile(profile, str(where))


def profile_transfer_command(
    profile: Annotated[Path, typer.Argument(help="A measured profile (YAML or JSON).")],
    target: Annotated[str, typer.Option("--to", help="Cluster (h100, FILE.yaml) or device (RTX-4090).")],
    gpus: Annotated[int | None, typer.Option("--gpus", help="Devices there; the profile's if not given.")] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="Of matmuls, where the profile does not say: tf32.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write it here; else among the profiles, as the last one.")
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where profiles are kept.")] = Path("profiles"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Carry a measured profile to another device, by operator class, from both data sheets."""
    from galvatron_lite.cli.tables import print_profile
    from galvatron_lite.cli.terminal import plain_table, wide_console
    from galvatron_lite.profiler.store import read_profile, save_profile, write_profile
    from galvatron_lite.profiler.transfer import class_ratios, machines, transfer_profile

    known = read_profile(profile)
    cluster = _target_cluster(target, gpus or known.cluster.devices)
    made = transfer_profile(known, cluster, precision=precision)
    where = output or save_profile(made, folder, cluster.name)
    if output is not None:
        write_profile(made, output)
    if as_json:
        print_json(made)
        return
    print_profile(made, str(where))
    here, there = machines(known, cluster, precision)
    table = plain_table("class", "part here", "seconds there / here")
    ratios = class_ratios(known, here, there)
    for one in ratios:
        table.add_row(one.kind.value, f"{one.here / sum(each.here for each in ratios):.0%}", f"{one.ratio:.2f}")
    wide_console().print(table)


def _target_cluster(target: str, gpus: int) -> Cluster:
    """A cluster by name or file; of a device without a cluster of its name, its vendor's reference design."""
    from galvatron_lite.calibration.store import load_calibration
    from galvatron_lite.cluster.catalog import known_clusters, load_cluster, match_device
    from galvatron_lite.cluster.links import cluster_from_links

    device = None if target.lower() in known_clusters() else match_device(target)
    if device is None:
        return load_cluster(target, gpus)
    return cluster_from_links(device, gpus, None, None, None, None, load_calibration())
