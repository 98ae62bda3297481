"""What a published run measured, as seconds a step and bytes."""

from __future__ import annotations

from galvatron_lite.validate.outcome import Measured
from galvatron_lite.validate.plans import Batch
from galvatron_lite.validate.rows import PublishedRun

_GIB = 2**30
_GB = 10**9


def measured_of(run: PublishedRun, batch: Batch) -> Measured:
    """Step time as it is printed, else from tokens or samples a second; peak memory in bytes.

    Memory is printed in GiB under either name by PyTorch and nvidia-smi; rows that say they were converted are in GB.
    """
    memory = run.peak_mem_gb
    unit = _GB if "gib->gb" in run.said or "x1.0737" in run.said else _GIB
    return Measured(_seconds(run, batch), None if memory is None else round(memory * unit))


def _seconds(run: PublishedRun, batch: Batch) -> float | None:
    if run.iter_time_s is not None and run.global_batch is not None:
        return run.iter_time_s if run.iter_time_s > 0 else None
    if run.tokens_per_s_per_gpu and run.seq_len and run.n_gpus:
        return batch.size * run.seq_len / (run.tokens_per_s_per_gpu * run.n_gpus)
    if run.samples_per_s:
        return batch.size / run.samples_per_s
    return None


def scored_for_time(run: PublishedRun) -> bool:
    """Whether the step time counts: grades A and B, not those whose memory alone is meant."""
    return run.quality in ("A", "B", None)


def scored_for_memory(run: PublishedRun) -> bool:
    """Whether the peak memory counts."""
    return run.quality in ("A", "B", "A-mem", None)
