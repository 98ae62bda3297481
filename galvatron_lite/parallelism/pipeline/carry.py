"""What a stage is given of layers before it, and what it hands on, where more than the chain of layers crosses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_places, places, tensors_of
from galvatron_lite.parallelism.pipeline.unknown import Output, UnknownTensor, shape_of, sources_of, unknown
from galvatron_lite.parallelism.sharded.tensor import locals_only

ENTRY = "entry"
"""Instead of an output's name: the hidden state that the first block is given."""


class Carrier:
    """The outputs that cross a stage's ends, by their names.

    Args:
        incoming: outputs of earlier layers that this stage or a later one reads.
        outgoing: outputs, of earlier layers or its own, that later stages read.
        leaves: whether the first block's input goes out, too.
    """

    def __init__(self, incoming: Sequence[Output], outgoing: Sequence[Output], leaves: bool) -> None:
        self._incoming = {name_of(one) for one in incoming}
        self._outgoing = [name_of(one) for one in outgoing] + [ENTRY] * leaves
        self._held: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._counts: Counter[str] = Counter()

    def begin(self, received: dict[str, Tensor] | None) -> None:
        """A micro-batch starts."""
        self.end()
        for name, tensor in (received or {}).items():
            self._hold(name, tensor)

    def end(self) -> None:
        """Let go of the micro-batch's tensors."""
        self._held, self._versions = {}, {}
        self._counts.clear()

    @property
    def entry(self) -> Tensor:
        """The first block's input, as it came in."""
        return self._held[ENTRY]

    def give(self, path: str, output: Any, device: torch.device) -> Any:
        """What an earlier layer's module returned, unknown where nobody reads it.

        Args:
            path: of the module.
            output: like it, on the meta device.
            device: where it would be.
        """
        call = self.count(path)

        def hand_over(place: str, tensor: Tensor) -> Tensor:
            one = Output(path, call, place)
            name = name_of(one)
            return self._held[name] if name in self._incoming else unknown(shape_of(tensor), frozenset([one]), device)

        return map_places(output, hand_over)

    def count(self, path: str) -> int:
        """How many times a module ran before in this pass; it has run once more now."""
        self._counts[path] += 1
        return self._counts[path] - 1

    def keep(self, path: str, call: int, output: Any) -> None:
        """One of the stage's own modules returned this."""
        for place, tensor in places(output):
            name = name_of(Output(path, call, place))
            if name in self._outgoing:
                self._hold(name, tensor)

    def keep_entry(self, arguments: Any) -> None:
        """The first block, of the next stage, was called with these."""
        self._hold(ENTRY, next(tensors_of(arguments)))

    @property
    def produced(self) -> dict[str, Tensor]:
        """What the next stage is sent.

        Raises:
            InputError: something was not made, or code between layers changed it in place since.
        """
        for name in self._outgoing:
            if name not in self._held:
                remedy = "It was not made on this batch, but on the example: give an example batch like all others."
                raise InputError("output of a layer", name, remedy)
            if _version(self._held[name]) != self._versions[name]:
                remedy = (
                    "Code behind the layer changes it in place, and a later pipeline stage reads it: do it on a copy."
                )
                raise InputError("output of a layer", name, remedy)
        return {name: self._held[name] for name in self._outgoing}

    def _hold(self, name: str, tensor: Tensor) -> None:
        self._held[name], self._versions[name] = tensor, _version(tensor)


def name_of(output: Output) -> str:
    """An output as a key: ``downs.0`` of its first call, ``downs.0 2.1`` of a tensor in what the third call gave."""
    return f"{output.path} {output.call}{output.place}" if output.call or output.place else output.path


def check_known(layer: str, value: Any) -> None:
    """Refuse what a layer of this stage is given, or the loss, where it is made of what the stage has not.

    Raises:
        InputError: names the layer, and what it is made of.
    """
    missing = [one.path for one in sorted(sources_of(value))]
    if missing or any(isinstance(tensor, UnknownTensor) for tensor in tensors_of(value)):
        remedy = (
            f"It reads what {', '.join(missing) or 'another layer'} made in an earlier pipeline stage, and does not do "
            "so in the example. Give an example batch like all others, or put the layers into one stage."
        )
        raise InputError("layer", layer, remedy)


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place ("In-place correctness checks" in torch's notes on autograd)."""
    with locals_only():
        return tensor._version
