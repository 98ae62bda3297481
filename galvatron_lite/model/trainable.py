"""Which parameters of a model train: all, those outside of frozen ones, or low-rank adapters alone.

Adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) are added to linear layers of the repeated blocks: a layer of m inputs
and n outputs gets two matrices (m, r) and (r, n) that train; all other parameters are frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, ModelGraph, OperatorClass, Role


@dataclass(frozen=True, slots=True)
class Trainable:
    """What trains. Patterns are shell patterns (``layers.[0-9].*``); a module's name stands for all inside it."""

    rank: int = 0  # of the adapters; 0: there are none
    targets: tuple[str, ...] = ("*",)  # last parts of the names of linear layers that get adapters
    freeze: tuple[str, ...] = ()  # names of what gets no gradient

    @classmethod
    def parse(cls, trainable: str | None, freeze: Sequence[str] = ()) -> Trainable | None:
        """Parse two options; None if everything trains.

        Args:
            trainable: ``all``, or ``lora:r=16`` for adapters of all linear layers of blocks, or of some
                (``lora:r=16,targets=q+v``).
            freeze: patterns of names.

        Raises:
            InputError: another value, or a rank that is no positive number.
        """
        if trainable in (None, "all"):
            return cls(freeze=tuple(freeze)) if freeze else None
        kind, _, options = trainable.partition(":")
        fields = dict(field.partition("=")[::2] for field in options.split(",") if field)
        if kind != "lora" or not fields.keys() <= {"r", "targets"} or not all(fields.values()):
            raise InputError("--trainable", trainable, "Give all, lora:r=16 or lora:r=16,targets=q+v.")
        rank = fields.get("r", "8")
        if not rank.isdecimal() or int(rank) < 1:
            raise InputError("--trainable", trainable, "The rank r is a whole number from 1: lora:r=16.")
        return cls(int(rank), tuple(fields.get("targets", "*").split("+")), tuple(freeze))

    @property
    def options(self) -> tuple[str, ...]:
        """The value of ``--trainable``, then the patterns of ``--freeze``."""
        targets = "" if self.targets == ("*",) else f",targets={'+'.join(self.targets)}"
        return (f"lora:r={self.rank}{targets}" if self.rank else "all", *self.freeze)

    def freezes(self, name: str) -> bool:
        """Whether a parameter or module of the original model is frozen."""
        return self.rank > 0 or any(_covers(pattern, name) for pattern in self.freeze)

    def adapts(self, name: str) -> bool:
        """Whether a linear layer of a block gets an adapter."""
        last = name.rpartition(".")[2]
        chosen = self.rank > 0 and last != "router" and any(fnmatchcase(last, target) for target in self.targets)
        return chosen and not any(_covers(pattern, name) for pattern in self.freeze)

    def check(self, names: Sequence[str], adapted: int) -> None:
        """Refuse patterns that match none of a model's names, and a rank if no layer gets an adapter."""
        for pattern in self.freeze:
            if not any(_covers(pattern, name) for name in names):
                raise InputError(
                    "--freeze", pattern, f"The model has nothing of that name: {', '.join(names[:6])}, ..."
                )
        if self.rank and not adapted:
            remedy = "No linear layer of a block has such a name; leave targets out to adapt all of them."
            raise InputError("--trainable", "+".join(self.targets), remedy)


def _covers(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


@dataclass(frozen=True, slots=True)
class LayerTraining:
    """What trains in one layer of a closed form."""

    frozen: frozenset[str] = frozenset()  # operators whose weights are frozen
    adapted: frozenset[str] = frozenset()  # linear layers with adapters
    rank: int = 0
    returns: bool = True  # whether gradients flow on to earlier layers


_RUNNING: ContextVar[LayerTraining | None] = ContextVar("galvatron_layer_training", default=None)


def layer_training() -> LayerTraining | None:
    """Return what trains in the layers that are being built; None if everything does."""
    return _RUNNING.get()


def with_trainable(build: Callable[[], ModelGraph], trainable: Trainable) -> ModelGraph:
    """Build a closed form's graph of which only some parameters train.

    Args:
        build: makes the graph; called once more for each different ``LayerTraining``.
        trainable: matched with names of layers and operators (``layers.3.attention.q``).
    """
    graph = build()
    settings = list(_settings(graph, trainable))
    names = [f"{layer.name}.{name}" for layer in graph.layers for name in _names(graph.kind_of(layer))]
    trainable.check(names, sum(len(setting.adapted) for setting in settings))
    graphs: dict[LayerTraining, ModelGraph] = {}
    kinds: dict[str, LayerKind] = {}
    labels: dict[tuple[str, LayerTraining], str] = {}
    layers = []
    for layer, setting in zip(graph.layers, settings, strict=True):
        if setting not in graphs:
            before = _RUNNING.set(setting)
            try:
                graphs[setting] = build()
            finally:
                _RUNNING.reset(before)
        if (layer.kind, setting) not in labels:
            kind = graphs[setting].kinds[layer.kind]
            alike = (label for label, other in kinds.items() if replace(other, name=kind.name) == kind)
            label = next(alike, layer.kind if layer.kind not in kinds else f"{layer.kind}{len(kinds)}")
            labels[layer.kind, setting], kinds[label] = label, replace(kind, name=label)
        layers.append(replace(layer, kind=labels[layer.kind, setting]))
    frozen = {layer.name for layer, setting in zip(layers, settings, strict=True) if "embedding" in setting.frozen}
    ties = tuple(replace(tie, frozen=tie.parameters if tie.first in frozen else 0) for tie in graph.ties)
    return replace(graph, layers=tuple(layers), kinds=kinds, ties=ties, trains=trainable.options)


def _settings(graph: ModelGraph, trainable: Trainable) -> Iterator[LayerTraining]:
    """What trains in each layer, in order; a tied head is frozen if its table is."""
    returns, tables = False, dict[str, bool]()
    tied = {tie.second: tie.first for tie in graph.ties if tie.parameters}
    for layer in graph.layers:
        kind = graph.kind_of(layer)
        weighted = [operator for operator in kind.operators if operator.weight_bytes]
        frozen = {name for name in _names(kind) if trainable.freezes(f"{layer.name}.{name}")}
        tables[layer.name] = "embedding" in frozen
        if layer.name in tied:
            frozen = (frozen | {"head"}) if tables[tied[layer.name]] else frozen - {"head"}
        # linear layers of a block, those of experts left out
        linear = (
            operator.name for operator in weighted if operator.kind is OperatorClass.MATMUL and operator.count == 1
        )
        blocks = layer.role is Role.BLOCK
        adapted = {name for name in linear if blocks and trainable.adapts(f"{layer.name}.{name}")}
        yield LayerTraining(frozenset(frozen), frozenset(adapted), trainable.rank, returns)
        held = {name for operator in weighted for name in operator.name.split("+")}
        returns = returns or bool(adapted) or bool((held | ({"embedding"} & set(_names(kind)))) - frozen)


def _names(kind: LayerKind) -> list[str]:
    """Names of operators; those that a compiler fused count separately."""
    return [name for operator in kind.operators for name in operator.name.split("+")]
