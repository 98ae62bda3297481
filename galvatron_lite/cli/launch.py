"""``galvatron launch``: start the world that a plan is for."""

from __future__ import annotations

from pathlib import Path

import typer

from galvatron_lite.errors import unknown

WRONG = ("InputError: ", "FileFormatError: ", "InfeasibleError: ")
"""Errors that come again where nothing is changed."""
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""What follows the script is the script's."""


def launch_command(
    program: list[str] = typer.Argument(
        ..., help="SCRIPT with its arguments, -m MODULE, or `profile MODEL` to measure on these processes."
    ),
    plan: Path | None = typer.Option(
        None, "--plan", help="Plan file, which auto_parallelize then uses. Alternatively --gpus."
    ),
    gpus: int | None = typer.Option(
        None, "--gpus", help="Number of processes, for a script that plans when it starts."
    ),
    per_node: int | None = typer.Option(None, "--per-node", help="Processes per node."),
    hostfile: Path | None = typer.Option(
        None, "--hostfile", help="File of hosts, one `NAME slots=N` a line, reached by ssh."
    ),
    through: str | None = typer.Option(
        None, "--through", help="Launcher: local, ssh, slurm or ray. Default: slurm inside an allocation, else local."
    ),
    srun: list[str] | None = typer.Option(
        None, "--srun", help="Option passed to srun: --srun=--partition=gpu. Repeatable."
    ),
    port: int = typer.Option(29500, "--port", help="Port of the first node, for the rendezvous."),
    restarts: int = typer.Option(0, "--max-restarts", help="How often to restart the job after a process dies.", min=0),
    check: bool = typer.Option(True, "--check/--no-check", help="Check all nodes before the start."),
    timeout: float = typer.Option(60.0, "--timeout", min=1, max=86400, help="Seconds to wait for each node."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the command without running it."),
) -> None:
    """Start a training script under a plan, on one or many nodes.

    Starts processes on this machine, over ssh, by Slurm or by Ray.

    First checks that all nodes have the same plan, the same package versions and enough memory.
    """
    from galvatron_lite.launch.commands import Through, shown
    from galvatron_lite.launch.jobs import check_job, job_of, start_job

    choices = [one.value for one in Through]
    if through not in (None, *choices):
        raise unknown("--through", through, choices)
    chosen = None if through is None else Through(through)
    job = job_of(program, plan, gpus, per_node, hostfile, chosen, srun or (), port, restarts)
    for command in job.commands():
        typer.echo(shown(command, job.environment), err=not dry_run)
    if dry_run:
        return
    if check:
        check_job(job, timeout)
    status, words = start_job(job)
    if status:
        why = words or "The rank that failed first tells why, above; a process that was killed tells nothing."
        typer.echo(f"galvatron: the job ended with status {status}. {why}", err=True)
        if not any(kind in words for kind in WRONG):
            again = "A script that calls load_latest resumes from its last checkpoint; --max-restarts starts it again."
            typer.echo(again, err=True)
    raise typer.Exit(status)
