"""Workspaces of libraries against what PyTorch and TransformerEngine document."""

from dataclasses import replace

import pytest

from galvatron_lite.cluster.catalog import match_device
from galvatron_lite.cluster.cluster import Device
from galvatron_lite.stacks.catalog import match_stack
from galvatron_lite.stacks.schema import workspace_bytes

MIB = 2**20


def device(name: str) -> Device:
    found = match_device(name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("framework", "gpu", "mib"),
    [
        ("nanotron", "A100-SXM4-80GB", 2 * 8.125),
        ("nanotron", "H100-SXM5-80GB", 2 * 32),
        ("nanotron", "L40S", 2 * 8.125),  # fp8, but no Hopper
        ("NeMo/Megatron-Core", "A100-SXM4-80GB", 2 * 8.125 + 4),
        ("NeMo/Megatron-Core", "GB200", 2 * 32 + 32),
        ("Megatron-LM CI golden values (dev)", "A100-SXM4-80GB", 2 * 32 + 4),
        ("Megatron-LM CI golden values (dev)", "H100-SXM5-80GB", 2 * 32 + 32),
    ],
)
def test_bytes_by_software_and_generation(framework: str, gpu: str, mib: float) -> None:
    assert workspace_bytes(match_stack(framework), device(gpu)) == mib * MIB


def test_they_are_part_of_the_context() -> None:
    """What a device's sheet takes off before the first tensor is no less than the workspaces in it."""
    stack = replace(match_stack("nemo"), cublas_workspace=0)
    for gpu in ("V100-SXM2-16GB", "A100-SXM4-80GB", "H100-SXM5-80GB", "GB200", "RTX-3090"):
        assert workspace_bytes(stack, device(gpu)) < device(gpu).context
