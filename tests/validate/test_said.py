import pytest

from galvatron_lite.cluster.catalog import device_named
from galvatron_lite.model.graph import Recompute
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.validate.checks import device_of
from galvatron_lite.validate.plans import argument, compute_precision, integer_argument, recompute_of, schedule_of

A100, V100 = device_named("A100"), device_named("V100")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16", "bf16"), (None, "bf16"), ("BF16", "bf16"), ("amp_bf16/DEFAULT", "bf16"), ("bf16/PURE", "bf16"),
        ("amp-fp16", "fp16"), ("fp16/bf16 mixed", "fp16"), ("bf16 (fp32 grad accumulation)", "bf16"),
        ("bf16 (fp32 grad accum)", "bf16"), ("fp32", "fp32"), ("tf32", "tf32"), ("fp8 (TE) + bf16", "fp8"),
        ("amp_fp8/DEFAULT", "fp8"), ("MXFP8", "mxfp8"), ("NVFP4", "nvfp4"), ("FP8-CS (FP8-MX)", "fp8"),
        ("fp8 rowwise + AsyncTP", "fp8-rowwise"), ("fp8 tensorwise", "fp8"),
    ],
)  # fmt: skip
def test_precision_of_matmuls(text: str | None, expected: str) -> None:
    assert compute_precision(text, A100) == expected


def test_tf32_only_where_the_device_has_it() -> None:
    assert compute_precision("fp32/tf32", A100) == "tf32"
    assert compute_precision("fp32/tf32", V100) == "fp32"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, Recompute.NONE), ("none stated", Recompute.NONE), ("unknown", Recompute.NONE),
        ("full (uniform, 1 layers)", Recompute.FULL), ("selective (per-op)", Recompute.SELECTIVE),
        ("selective (config default); 0 full layers", Recompute.SELECTIVE),
    ],
)  # fmt: skip
def test_recomputation(text: str | None, expected: Recompute) -> None:
    assert recompute_of(text) is expected


@pytest.mark.parametrize(
    ("text", "virtual", "expected"),
    [
        (None, 1, Schedule.ONE_F_ONE_B), (None, 4, Schedule.INTERLEAVED), ("1f1b", 1, Schedule.ONE_F_ONE_B),
        ("interleaved-1f1b (custom)", 1, Schedule.INTERLEAVED), ("gpipe", 1, Schedule.GPIPE),
        ("zb-1p", 1, Schedule.ZERO_BUBBLE_1P), ("zb-2p", 1, Schedule.ZERO_BUBBLE_2P),
        ("ZB-V", 1, Schedule.ZERO_BUBBLE_V), ("zbv", 2, Schedule.ZERO_BUBBLE_V),
    ],
)  # fmt: skip
def test_schedules(text: str | None, virtual: int, expected: Schedule) -> None:
    assert schedule_of(text, virtual) is expected


def test_arguments_quoted_in_notes() -> None:
    said = "special args: kv-channels=128, moe-layer-freq=([0]*3+[1]*12), x-kv-channels=3"
    assert integer_argument(said, "kv-channels") == 128
    assert argument(said, "moe-layer-freq") == "([0]*3+[1]*12)"
    assert integer_argument(said, "moe-layer-freq") is None
    assert argument(said, "channels") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('A100 ("NVIDIA Ampere")', "A100-SXM4-80GB"), ("LambdaCloud A100 40GB PCIe", "A100-PCIE-40GB"),
        ("Dell 8x H100 80GB SXM5", "H100-SXM5-80GB"), ("2x H100 80GB PCIe Gen5", "H100-PCIE-80GB"),
        ("H100-SXM 96GB HBM2e 500W (Grand Teton)", "H100-SXM-96GB"), ("LambdaCloud 4xV100 16GB", "V100-SXM2-16GB"),
        ("V100-SXM3-32GB (450W, DGX-2H)", "V100-SXM2-32GB"), ("GB200-192GB", "GB200-186GB"), ("Tesla P40-24GB", "P40"),
        ("GB300", "GB300-288GB"), ("B200-SXM", "B200-SXM6-180GB"), ("RTX 6000 Ada", "RTX-6000-Ada"),
    ],
)  # fmt: skip
def test_devices_by_what_publications_call_them(text: str, expected: str) -> None:
    device = device_of(text)
    assert device is not None
    assert device.name == expected


@pytest.mark.parametrize(
    "text", [None, "unknown (32GB-class; rates consistent with V100-32GB or A100-40)", "TPU v4", "H1000", "A1000"]
)
def test_devices_that_are_not_known(text: str | None) -> None:
    assert device_of(text) is None
