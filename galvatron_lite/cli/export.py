"""``galvatron export``, ``plan import``, ``plan export`` and ``profile import``: files of other software."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.cli import options
from galvatron_lite.cli.terminal import print_json
from galvatron_lite.errors import InputError, unknown
from galvatron_lite.units import parse_bytes

if TYPE_CHECKING:
    from galvatron_lite.peers.hetu.model import Engine


def export_command(
    plan: options.OurPlan,
    tool: str = typer.Option(
        ...,
        "--for",
        "--to",
        help="Software to write settings for: deepspeed, megatron, torchtitan, accelerate or nemo.",
    ),
    output: options.Output = None,
    strict: bool = typer.Option(False, "--strict", help="Fail if the settings cannot express all of the plan."),
    as_json: options.Json = False,
) -> None:
    """Write a plan as settings of other training software.

    Lists what those settings cannot express.
    """
    from galvatron_lite.files import write_text
    from galvatron_lite.plans.export.tools import export
    from galvatron_lite.plans.io import read_plan

    exported = export(read_plan(plan), tool, strict=strict)
    if output is not None:
        write_text(output, exported.text)
    if as_json:
        where = None if output is None else str(output)
        lists = {"left_out": list(exported.left_out), "by_hand": list(exported.by_hand)}
        print_json({"tool": exported.tool, "file": where, "text": exported.text, **lists})
        return
    for line in exported.left_out:
        typer.echo(f"not expressed for {tool}: {line}", err=True)
    for line in exported.by_hand:
        typer.echo(f"left to you, {line}", err=True)
    typer.echo(exported.text if output is None else f"Written to {output}.", nl=output is not None)


PEERS = ("hetu",)

From = Annotated[str, typer.Option("--from", help="Software that wrote the files: hetu (Hetu-Galvatron).")]
EngineName = Annotated[
    str, typer.Option("--engine", help="Version whose communication volumes to use: main or v2.4.0.")
]


def profile_import_command(
    folder: Annotated[Path, typer.Argument(help="Folder with the computation and memory profile of a model.")],
    peer: From,
    hardware: Path | None = typer.Option(
        None, "--hardware", help="Folder of the hardware profile. Default: searched for nearby."
    ),
    nodes: int = typer.Option(1, "--nodes", help="Number of nodes.", min=1),
    gpus: int = typer.Option(8, "--gpus-per-node", help="GPUs per node.", min=1),
    layers: str = typer.Option(
        "",
        "--layers",
        help="Number of layers of each layer type (24,24). Not needed for models that ship with Hetu-Galvatron.",
    ),
    hidden: str = typer.Option("", "--hidden", help="Hidden size of each layer type."),
    sequence: str = typer.Option(
        "", "--seq", help="Sequence length of each layer type. Default: the shortest one profiled."
    ),
    engine: EngineName = "main",
    memory: str = typer.Option("80GiB", "--device-memory", help="Memory of one GPU (not in the files)."),
    output: options.ProfileOutput = None,
    profiles: options.Folder = options.PROFILES,
    as_json: options.Json = False,
) -> None:
    """Convert the measurements of another planner to a profile."""
    from galvatron_lite.cli.profile import show_profile
    from galvatron_lite.peers.hetu.profile import import_profile, sizes_for
    from galvatron_lite.profiler.store import save_profile, write_profile

    _check_peer(peer)
    sizes = sizes_for(folder, layers, hidden, sequence)
    device_memory = parse_bytes(memory, "--device-memory")
    imported = import_profile(folder, sizes, nodes, gpus, hardware, _engine(engine), device_memory)
    if output is None:
        where = save_profile(imported, profiles, f"{imported.cluster.name}-hetu")
    else:
        where = output
        write_profile(imported, output)
    show_profile(imported, where, as_json)
    if output is None and not as_json:
        typer.echo("It is the last profile made here: galvatron plan and evaluate take it where none is named.")


def plan_import_command(
    path: Annotated[Path, typer.Argument(help="The plan's JSON file (galvatron_config_*.json).")],
    peer: From,
    profile: Path | None = typer.Option(
        None, "--profile", help="Profile of the model, for layer names and predictions."
    ),
    gpus: int = typer.Option(0, "--gpus", help="Number of GPUs, for files without world_size."),
    batch: int = typer.Option(0, "--batch", help="Global batch size, for files without global_bsz."),
    output: Path = typer.Option(Path("plan.yaml"), "-o", "--output", help="Write the plan to this file."),
) -> None:
    """Convert a plan of another planner."""
    from galvatron_lite.files import read_data
    from galvatron_lite.peers.hetu.plan import read_hetu_plan, to_plan
    from galvatron_lite.peers.plan_files import priced
    from galvatron_lite.plans.describe import headline
    from galvatron_lite.plans.io import write_plan
    from galvatron_lite.profiler.store import read_profile

    _check_peer(peer)
    priced_with = None if profile is None else read_profile(profile)
    data = read_data(path)
    if not isinstance(data, dict):
        raise InputError(str(path), type(data).__name__, "It must hold a JSON object.")
    devices = gpus or (priced_with.cluster.devices if priced_with else 0)
    hetu_plan = read_hetu_plan(data, str(path), devices, batch)
    for option, value, stated in (("--gpus", gpus, hetu_plan.devices), ("--batch", batch, hetu_plan.batch)):
        if value not in (0, stated):
            raise InputError(option, value, f"The file says {stated}: leave it out.")
    converted = to_plan(hetu_plan, priced_with)
    converted = converted if priced_with is None else priced(converted, priced_with)
    write_plan(converted, output)
    typer.echo(f"{headline(converted)}\nWritten to {output}.")


def plan_export_command(
    path: options.OurPlan,
    peer: str = typer.Option(..., "--to", help="Software to write for: hetu (Hetu-Galvatron)."),
    output: Path = typer.Option(..., "-o", "--output", help="Write the JSON to this file."),
) -> None:
    """Convert a plan for another planner, if its files can express it."""
    from galvatron_lite.files import write_data
    from galvatron_lite.peers.hetu.plan import exported
    from galvatron_lite.plans.io import read_plan

    _check_peer(peer, "--to")
    write_data(output, exported(read_plan(path)))
    typer.echo(f"Written to {output}.")


def _check_peer(peer: str, option: str = "--from") -> None:
    if peer not in PEERS:
        raise unknown(option, peer, PEERS)


def _engine(name: str) -> Engine:
    from galvatron_lite.peers.hetu.model import Engine

    engines = {"main": Engine.MAIN, "v2.4.0": Engine.V240}
    if name not in engines:
        raise unknown("--engine", name, engines)
    return engines[name]
