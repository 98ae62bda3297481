import subprocess
import sys
from dataclasses import replace

import pytest

from galvatron_lite.cluster.catalog import match_device
from galvatron_lite.cluster.cluster import Device
from galvatron_lite.files import from_data, to_data
from galvatron_lite.stacks.catalog import DEFAULT, GALVATRON, STACKS, match_stack
from galvatron_lite.stacks.schema import Stack, workspace_bytes
from galvatron_lite.units import ITEM_BYTES


@pytest.mark.parametrize(
    ("framework", "name"),
    [
        ("Megatron-DeepSpeed", "megatron-deepspeed"), ("llm-foundry/Composer FSDP", "llm-foundry"),
        ("Megatron-Bridge", "megatron-bridge"), ("NeMo", "nemo"), ("Megatron-Core r0.8", "megatron-core"),
        ("Megatron-LM", "megatron-lm"), ("Megatron-LM fork", "megatron-zero-bubble"),
        ("Megatron-LM CI golden values (lts)", "megatron-ci"), ("torchtitan FSDP2 torch.compile", "torchtitan"),
        ("torchtitan FSDP2", "torchtitan-eager"), ("NeMo AutoModel FSDP2", "automodel"), ("MaxText", "jax"),
        ("Meta internal 4D", "meta"), ("NGC TensorFlow 1.x w/XLA bsz=96", "tensorflow"),
        ("2] OneFlow W/O clip", "oneflow"),
        ("timm benchmark.py (PyTorch 1.12, cu113)", "timm"), ("torchgpipe 0.0.5 (PyTorch 1.3)", "torchgpipe"),
        ("Chainer/ChainerMN", "chainer"), ("NVIDIA DeepLearningExamples PyTorch (Lambda runs)", "pytorch-ddp"),
        ("MxNet", "mxnet"), ("NGC MXNet", "mxnet-ngc"), ("MXNet NVIDIA Release 20.06", "mxnet-release"),
        ("NGC MXNet 21.05", "mxnet-release"), ("InternEvo v0.2.1dev", "internevo"), ("nanotron", "nanotron"),
        ("Colossal-AI", "default"),
    ],
)  # fmt: skip
def test_frameworks_by_name(framework: str, name: str) -> None:
    assert match_stack(framework).name == name


def test_every_stack_has_sources_and_known_precisions() -> None:
    assert DEFAULT.name in STACKS
    assert GALVATRON.name in STACKS
    for name, stack in STACKS.items():
        assert stack.name == name
        assert stack.source
        states = stack.states
        assert {states.parameters, states.gradients, states.reduce, states.gather} <= ITEM_BYTES.keys()
        # A master copy is kept where, and only where, parameters are in half precision: moments alone take 8 bytes.
        # NeMo's optimizers keep of it what the bf16 parameters lack, their lower 16 bits; AutoModel's moments are bf16.
        master = 2 if name in ("nemo", "automodel") else 4
        moments = 4 if name == "automodel" else 8
        assert states.optimizer_bytes == moments + (master if ITEM_BYTES[states.parameters] == 2 else 0)
        assert from_data(Stack, to_data(stack), name) == stack


def test_bytes_a_parameter_item_are_the_published_ones() -> None:
    def at_rest(stack: Stack) -> int:
        states = stack.states
        return ITEM_BYTES[states.parameters] + ITEM_BYTES[states.gradients] + states.optimizer_bytes

    # Megatron-Core's distributed optimizer page: 18 for bf16 with fp32 gradients, 16 with bf16 gradients (as NeMo's
    # performance recipes sum them); Rajbhandari et al. 2020: 16.
    assert at_rest(STACKS["megatron-lm"]) == 18
    assert at_rest(STACKS["megatron-core"]) == 16
    assert at_rest(STACKS["megatron-deepspeed"]) == 16
    assert at_rest(STACKS["torchtitan"]) == 16


def test_torch_is_not_imported() -> None:
    words = (
        "import sys, galvatron_lite.stacks.catalog, galvatron_lite.validate.predict; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", words], check=True, timeout=240)


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


def test_workspaces_are_part_of_the_context() -> None:
    """What a device's sheet takes off before the first tensor is no less than the workspaces in it."""
    stack = replace(match_stack("nemo"), cublas_workspace=0)
    for gpu in ("V100-SXM2-16GB", "A100-SXM4-80GB", "H100-SXM5-80GB", "GB200", "RTX-3090"):
        assert workspace_bytes(stack, device(gpu)) < device(gpu).context
