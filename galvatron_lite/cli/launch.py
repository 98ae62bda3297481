"""``galvatron launch``: start the processes of a plan."""

from __future__ import annotations

from pathlib import Path

import typer

from galvatron_lite.errors import unknown

LASTING_ERRORS = ("InputError: ", "FileFormatError: ", "InfeasibleError: ")  # that a restart does not help
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}  # options after the script are its own


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

    launchers = [launcher.value for launcher in Through]
    if through not in (None, *launchers):
        raise unknown("--through", through, launchers)
    launcher = None if through is None else Through(through)
    job = job_of(program, plan, gpus, per_node, hostfile, launcher, srun or (), port, restarts)
    for command in job.commands():
        typer.echo(shown(command, job.environment), err=not dry_run)
    if dry_run:
        return
    if check:
        check_job(job, timeout)
    status, errors = start_job(job)
    if status:
        reason = errors or "The rank that failed first tells why, above; a process that was killed tells nothing."
        typer.echo(f"galvatron: the job ended with status {status}. {reason}", err=True)
        if not any(kind in errors for kind in LASTING_ERRORS):
            remedy = "A script that calls load_latest resumes from its last checkpoint; --max-restarts starts it again."
            typer.echo(remedy, err=True)
    raise typer.Exit(status)
