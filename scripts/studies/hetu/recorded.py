"""Recorded searches of Hetu-Galvatron: what it was asked, the plan it found, and how long that took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from galvatron_lite.files import STRICT, from_data, parse_line
from galvatron_lite.peers.hetu.files import Sizes, read_hardware, read_model
from galvatron_lite.peers.hetu.model import Engine, HetuHardware, HetuModel
from galvatron_lite.peers.hetu.plan import HetuPlan, read_hetu_plan
from studies.hetu.formulas import Rules, usable_mb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pydantic import ConfigDict


@dataclass(frozen=True, slots=True)
class RecordedSearch:
    """One search; ``profiles/hetu/README.md`` says how they were recorded."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    engine: str  # ``main`` or ``v240``
    model: str  # folder of its profile
    nodes: int  # the cluster
    gpus: int
    budget_gb: int  # memory a GPU
    batch: int  # samples a step
    layers: tuple[tuple[int, int, int], ...]  # (layers, hidden, sequence) of each layer type
    sequence_parallel: bool  # see ``HetuModel`` and ``Rules``
    async_reduce: bool
    tables: bool
    per_layer: bool  # whether each layer has a strategy of its own
    off: tuple[str, ...]  # dimensions it was told to leave out (``tp``, ``sp``, ``pp``, ``ckpt``, ``fsdp``)
    status: str  # ``ok``, ``infeasible`` or ``error``
    modified: str  # what was changed in its engine; empty where nothing was
    # whether the CPU time is that of its engine as shipped; a faster core with the same answers else
    shipped_core: bool
    search_cpu_seconds: float | None  # of the search alone
    chunks: int = 0  # micro-batches, where they were given; 0: searched
    most_tensor: int = 8  # largest tensor degree, where it was less than 8
    plan: dict[str, Any] = field(default_factory=dict)  # its plan file
    seconds: float = 0.0  # what it predicts for it: a step, samples a second, MB of each stage
    throughput: float = 0.0
    memory_mb: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """For people: ``main llama2-7b 1x8 16GB``, with what was left out."""
        left = "".join(f" -{one}" for one in self.off) + ("" if self.per_layer else " one strategy")
        changed = " (modified)" if self.modified else ""
        return f"{self.engine} {self.model} {self.nodes}x{self.gpus} {self.budget_gb}GB{left}{changed}"

    @property
    def devices(self) -> int:
        """GPUs."""
        return self.nodes * self.gpus

    @property
    def rules(self) -> Rules:
        """What its command line says to the formulas."""
        return Rules(Engine(self.engine), self.async_reduce, self.tables)

    @property
    def usable(self) -> int:
        """MB that its search fills."""
        return usable_mb(self.budget_gb)

    def hetu_plan(self) -> HetuPlan:
        """The plan it found."""
        return read_hetu_plan(self.plan, self.name, self.devices, self.batch)

    def profiles(self, folder: Path) -> tuple[HetuModel, HetuHardware]:
        """The profiles it was given, from the folder that holds one folder a model and ``hardware``."""
        sizes = [Sizes(*one) for one in self.layers]
        engine = Engine(self.engine)
        model = read_model(folder / self.model, sizes, self.sequence_parallel, engine)
        return model, read_hardware(folder / "hardware", self.nodes, self.gpus)


def read_searches(path: Path) -> Iterator[RecordedSearch]:
    """Recorded searches, one a line of JSON."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        yield from_data(RecordedSearch, parse_line(line, f"{path}, line {number}"), f"{path}, line {number}")
