"""``galvatron profile``: measure or estimate what a model's layers cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from galvatron_lite.capture.named import load_factory
from galvatron_lite.cli.terminal import interruptible, print_json, progress_bar
from galvatron_lite.limits import SAMPLES

if TYPE_CHECKING:
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
