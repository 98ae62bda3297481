"""How the compute of a layer divides into classes of operation, by the rooflines of data sheets. No torch here.

Where layers were measured whole, that is all there is to say which operation took the time: seconds of classes are
then shared out, and called so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from galvatron_lite.calibration.store import constants_for_device, load_calibration
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, OperatorClass
from galvatron_lite.parallelism.channel.sliced import sliced_kind
from galvatron_lite.parallelism.spatial.cost import samples_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.estimate import stack_constants
from galvatron_lite.profiler.roofline import Machine, machine_of, operator_seconds
from galvatron_lite.profiler.schema import OriginKind
from galvatron_lite.stacks.catalog import GALVATRON

NAMES = {
    OperatorClass.MATMUL: "matmul",
    OperatorClass.ATTENTION: "attention",
    OperatorClass.CONVOLUTION: "convolution",
    OperatorClass.MEMORY: "memory-bound",
}
OTHER = "other"
Shares = Mapping[str, float]
"""Share of a pass's compute by class of operation; they add up to 1."""


@dataclass(slots=True)
class Operations:
    """Shares of the classes of operation of layers on the devices of a pricer; answers are remembered.

    Attributes:
        pricer: of the layers' devices.
    """

    pricer: LayerPricer
    _known: dict[tuple[str, Strategy, int], tuple[Shares, Shares]] = field(default_factory=dict)
    _machines: list[Machine] = field(default_factory=list)

    @property
    def origin(self) -> str:
        """How seconds by class of operation are known."""
        return "estimated" if self.pricer.profile.origin.kind is OriginKind.ESTIMATED else "shared out"

    def shares(self, kind: str, strategy: Strategy, microbatch: int) -> tuple[Shares, Shares]:
        """Shares of forward and of backward of a layer of a kind."""
        key = (kind, strategy, microbatch)
        if key not in self._known:
            self._known[key] = self._new(self.pricer.profile.graph.kinds[kind], strategy, microbatch)
        return self._known[key]

    def _new(self, kind: LayerKind, strategy: Strategy, microbatch: int) -> tuple[Shares, Shares]:
        samples = float(samples_of(kind, strategy, microbatch))
        seconds: tuple[dict[str, float], dict[str, float]] = (defaultdict(float), defaultdict(float))
        machine = self._machine()
        if machine is None:
            return {OTHER: 1.0}, {OTHER: 1.0}
        for operator in _sliced(kind, strategy).operators:
            own = operator_seconds(
                machine, operator, samples, strategy.tensor, strategy.sequence_parallel, strategy.expert
            )
            seconds[0][NAMES[operator.kind]] += own.forward
            seconds[1][NAMES[operator.kind]] += own.backward
        return _shares(seconds[0]), _shares(seconds[1])

    def _machine(self) -> Machine | None:
        """The device at the model's precision; None where the data sheet has no figures for it."""
        if not self._machines:
            profile, calibration = self.pricer.profile, load_calibration()
            device = profile.cluster.device
            host, reached = stack_constants(GALVATRON, calibration), constants_for_device(calibration, device)
            try:
                self._machines.append(machine_of(device, profile.graph.precision, reached, host))
            except InputError:
                return None
        return self._machines[0]


def _sliced(kind: LayerKind, strategy: Strategy) -> LayerKind:
    for by in ("filters", "channels"):
        if getattr(strategy, by) > 1:
            return sliced_kind(kind, by, getattr(strategy, by))
    return kind


def _shares(seconds: Mapping[str, float]) -> Shares:
    whole = sum(seconds.values())
    return {name: own / whole for name, own in seconds.items() if own} if whole else {OTHER: 1.0}
