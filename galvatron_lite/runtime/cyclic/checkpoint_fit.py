"""Whether a checkpoint fits a plan and a model. No torch here."""

from __future__ import annotations

from pathlib import Path

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cyclic.rules import CyclicRule
from galvatron_lite.runtime.cyclic.manifest import CyclicManifest, StageRecord

FIELD = "checkpoint"
"""What errors name."""


def check_rule(folder: Path, manifest: CyclicManifest, rule: CyclicRule, workers: int) -> None:
    """Refuse a checkpoint of another rule or number of workers.

    Raises:
        InputError: says how to go on with the model alone.
    """
    if (manifest.rule, manifest.workers) != (rule, workers):
        remedy = (
            f"It was written under {manifest.rule.value} with {manifest.workers} workers; this plan has {rule.value} "
            f"with {workers}. To go on with its model, without its delay and optimizer states: "
            "load_full_state_dict(flushed_state(folder))."
        )
        raise InputError(FIELD, folder, remedy)


def check_stage(stage: int, written: StageRecord, record: StageRecord) -> None:
    """Refuse a stage of other parameters, optimizer or scheduler.

    Args:
        stage: its number.
        written: what the checkpoint has.
        record: what this process has.

    Raises:
        InputError: names the first that differs.
    """
    for name in sorted(written.parameters.keys() ^ record.parameters.keys()):
        where = "the checkpoint" if name in written.parameters else "this plan"
        remedy = f"Only {where} has it in stage {stage}. Use the same model, cut into the same stages."
        raise InputError("parameter", name, remedy)
    for name, described in record.parameters.items():
        if written.parameters[name] != described:
            remedy = f"{name} is {described} in this model. Use the same model and precision."
            raise InputError("parameter", written.parameters[name], remedy)
    for what, there, here in (
        ("optimizer", written.optimizer, record.optimizer),
        ("scheduler", written.scheduler, record.scheduler),
    ):
        if there is not None and there != here:
            remedy = f"The checkpoint has the states of a {there}. Make one with optimizer(factory, ...) before load."
            raise InputError(what, here, remedy)
