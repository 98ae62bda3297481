"""Which modules of a branch are called, trees that hold them alone, and what stands in their place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.branches.parts import StandIn, entrances, replace_module, skeleton


class Lists(nn.Module):
    """Calls what its lists hold one by one, and one of them as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.loose = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.steps = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.whole = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
        self.idle = nn.Linear(2, 2)

    def forward(self, values: Tensor) -> Tensor:
        for module in [*self.loose, *self.steps]:
            values = module(values)
        return self.whole(values)


def test_entrances_are_what_others_call() -> None:
    roots = ("loose", "steps", "whole", "idle")
    found = entrances(Lists(), roots, torch.zeros(1, 2))
    assert found == ("loose.0", "loose.1", "steps.0", "steps.1", "whole", "idle")
    assert entrances(Lists(), roots, None) == ("loose.0", "loose.1", "steps", "whole", "idle")


def test_an_unknown_root_is_named() -> None:
    with pytest.raises(InputError, match="absent"):
        entrances(Lists(), ("absent",), None)


def test_a_skeleton_holds_the_same_modules_at_the_same_paths() -> None:
    model = Lists()
    tree = skeleton(model, ["loose.1", "whole"])
    assert tree.get_submodule("loose.1") is model.loose[1]
    assert set(tree.state_dict()) == {"loose.1.weight", "loose.1.bias", "whole.0.weight", "whole.0.bias"}


def test_a_stand_in_tells_what_the_module_tells_and_holds_nothing() -> None:
    model = Lists()
    module = model.whole
    stand = StandIn("whole", module, lambda one, args, _: (one.path, args))
    replace_module(model, module, stand)
    assert model.whole is stand
    assert not list(stand.parameters())
    assert stand.extra_repr() == module.extra_repr()
    assert stand.insert == module.insert
    assert stand(1) == ("whole", (1,))
    model.eval()
    assert not module.training
