"""Memory is counted as a run measured it."""

from dataclasses import replace

import pytest

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.stacks.catalog import match_stack
from galvatron_lite.stacks.schema import Stack

from .runs import gpt, predicted

CALIBRATION = load_calibration()
MIB = 2**20


def test_allocated_memory_holds_workspaces_and_no_driver_context() -> None:
    own = predicted(gpt())
    assert own.peak_memory == own.device_memory - own.memory.context + 2 * (8 * MIB + 128 * 1024)


def test_nvidia_smi_shows_what_is_reserved() -> None:
    own, smi = predicted(gpt()), predicted(gpt(notes="Mem = nvidia-smi max"))
    tensors, buffers = own.device_memory - own.memory.context, own.memory.gradients  # Megatron's main gradients
    assert smi.peak_memory == pytest.approx((tensors - buffers) / 0.85 + buffers + own.memory.context, abs=1)
    tight = predicted(gpt(notes="Mem = nvidia-smi max", gpu="V100-SXM2-16GB", micro_batch=16))
    assert tight.peak_memory == max(tight.device_memory, min(tight.peak_memory, tight.capacity))


def test_torchtitan_reports_what_is_reserved() -> None:
    run = gpt(framework="torchtitan FSDP2", pp=1, dp=4, zero_stage=3, global_batch=8)
    own = predicted(run)
    tensors = own.device_memory - own.memory.context
    assert own.peak_memory == pytest.approx(tensors / 0.85 + 2 * (8 * MIB + 128 * 1024), abs=1)


def test_which_devices_a_run_speaks_of() -> None:
    own = predicted(gpt())
    assert predicted(gpt(notes="max allocated on the LAST rank")).peak_memory <= own.peak_memory
    every = predicted(gpt(notes="SUM over all GPUs"))
    assert own.peak_memory < every.peak_memory <= 8 * own.peak_memory


def test_buckets_and_passing_gradients_cost_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes an item of buckets where replicas sum gradients, none on a single replica."""

    def peak(states: dict[str, int], **changes: object) -> int:
        def stack_of(framework: str) -> Stack:
            plain = match_stack("Megatron-LM")
            return replace(plain, states=replace(plain.states, **states))  # type: ignore[arg-type]

        monkeypatch.setattr("galvatron_lite.validate.checks.match_stack", stack_of)
        return predicted(gpt(pp=1, **changes)).memory.gradients

    items = peak({}, dp=4) // 4
    assert peak({"bucket_bytes": 2}, dp=4) == pytest.approx(6 * items, rel=1e-6)
    alone = {"dp": 1, "n_gpus": 2, "global_batch": 8}
    assert peak({"bucket_bytes": 2}, **alone) == peak({}, **alone)


def test_inputs_are_gathered_again_only_where_they_would_not_fit_otherwise() -> None:
    run = gpt(framework="nanotron", tp=8, dp=1, pp=1, seq_parallel=True, grad_accum=1, seq_len=16384)
    small, large = (predicted(replace(run, micro_batch=batch, global_batch=batch)) for batch in (40, 48))
    # 8 layers keep two gathered inputs of 2 bytes an item each, the head one; 7/8 of them for other devices' sake.
    spared = (8 * 2 + 1) * 2 * 1024 * 16384 * 7 // 8
    assert small.device_memory <= small.capacity
    assert large.device_memory <= large.capacity < large.device_memory + 48 * spared
    assert large.memory.activations == pytest.approx(1.2 * small.memory.activations - 48 * spared, rel=1e-3)
