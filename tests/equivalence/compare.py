"""What "equal" means for tensors computed in another order of float32 sums."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

RELATIVE = 1e-5
EPSILON = torch.finfo(torch.float32).eps


def assert_equal_tensors(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], relative: float = RELATIVE
) -> None:
    """Every tensor equals its reference: largest difference <= relative x largest entry of the reference.

    Some gradients are zero in exact arithmetic (a bias of attention keys shifts every score alike) and rounding noise
    in float32. So one float32 epsilon of the largest entry of all the references is allowed as well.
    """
    assert set(actual) == set(expected), f"differ in names: {sorted(set(actual) ^ set(expected))}"
    noise = EPSILON * max((float(tensor.abs().max()) for tensor in expected.values()), default=0.0)
    wrong = []
    for name, reference in expected.items():
        assert actual[name].shape == reference.shape, f"{name}: {actual[name].shape} is not {reference.shape}"
        error, scale = float((actual[name] - reference).abs().max()), float(reference.abs().max())
        if not error <= relative * scale + noise:
            wrong.append(f"{name}: off by {error:.3g} where the largest entry is {scale:.3g}")
    assert not wrong, "\n".join(wrong)
