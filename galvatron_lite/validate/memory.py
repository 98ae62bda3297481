"""Peak memory as a published run measured it: which devices it speaks of, and what it counts."""

from __future__ import annotations

from galvatron_lite.cluster.cluster import Device
from galvatron_lite.cost.memory import reserved
from galvatron_lite.plans.schema import MemoryBreakdown, Plan
from galvatron_lite.stacks.schema import Stack
from galvatron_lite.stacks.workspaces import workspace_bytes
from galvatron_lite.validate.rows import PublishedRun


def peak_of(run: PublishedRun, stack: Stack, plan: Plan, device: Device) -> tuple[MemoryBreakdown, int]:
    """The stage that a run speaks of, and the bytes that it would have measured there.

    The last rank's stage, all devices together, or the fullest stage. What is counted: what ``nvidia-smi`` shows, what
    PyTorch reserved, or (where nothing is said) what it allocated, libraries' workspaces included.

    Args:
        run: what was published.
        stack: its software.
        plan: priced.
        device: of its cluster.
    """
    memories = [stage.memory for stage in plan.stages[-plan.pipeline :]]
    workspaces = workspace_bytes(stack, device)

    def counted(memory: MemoryBreakdown) -> int:
        if "nvidia-smi" in run.said:
            return reserved(memory, device.memory)
        if stack.reports_reserved:
            return reserved(memory, device.memory) - memory.context + workspaces
        return memory.total - memory.context + workspaces

    fullest = max(memories, key=counted)
    if "last rank" in run.said:
        return memories[-1], counted(memories[-1])
    if "sum over all gpus" in run.said:
        return fullest, sum(counted(memory) for memory in memories) * plan.stage_devices
    return fullest, counted(fullest)
