"""Requests for a plan or a sweep of plans, from Python and from the command line.

``PlanRequest.parse`` parses and checks the arguments of callers. ``resolved`` finds the profile, the pins and the
budget that a search needs. Every command and function that plans does both once, and then searches
(``analysis.setting.ask``, or a sweep of it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from galvatron_lite.analysis.setting import PlanSetting, first_devices
from galvatron_lite.api_profile import find_profile
from galvatron_lite.calibration.store import load_calibration, margin_of
from galvatron_lite.cluster.budget import DEFAULT_BUDGET, budget_on
from galvatron_lite.errors import InputError, unknown
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.backends import Backend, backend_named, target_named
from galvatron_lite.plans.schema import Mode
from galvatron_lite.profiler.schema import PlanNeeds, Profile
from galvatron_lite.search.pin_names import check_backend, schedules_named
from galvatron_lite.search.pins import read_pins
from galvatron_lite.units import parse_bytes, parse_count, parse_seconds

if TYPE_CHECKING:
    from galvatron_lite.cluster.cluster import Cluster
    from galvatron_lite.plans.schema import Schedule

Progress = Callable[[int, int, str], None]
ProfileSource = Profile | str | Path | Callable[[int | None], Profile] | None
"""A profile, its file, or a function that returns the profile of a number of devices (None: of all)."""

_ALIASES = {
    "seq": "sequence", "seq_len": "sequence", "seq_length": "sequence", "budget": "mem", "global_batch": "batch",
}  # fmt: skip
"""Arguments by other names, for suggestions."""


class PlanArguments(TypedDict, total=False):
    """Arguments of ``plan`` besides the profile, and of every sweep; see ``plan``."""

    model: ModelGraph | str | Path | None
    shape: Mapping[str, str]
    image: str | None
    cluster: Cluster | str | Path | None
    gpus: int | None
    mem: str | int | float
    batch: int | None
    sequence: int | None
    precision: str | None
    trainable: str | None
    freeze: str | Sequence[str]
    fix: str | Sequence[str] | Mapping[str, object]
    forbid: str | Sequence[str]
    schedules: str | Sequence[Schedule | str] | None
    backend: str
    target: str | None
    mode: Mode | str
    allow_delay: bool
    margin: str | float | None
    progress: Progress | None


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The arguments of a plan or a sweep, with the right types; see ``plan``."""

    profile: ProfileSource = None
    model: ModelGraph | str | Path | None = None
    shape: Mapping[str, str] | None = None
    image: str | None = None
    cluster: Cluster | str | Path | None = None
    gpus: int | None = None
    sequence: int | None = None
    precision: str | None = None
    trainable: str | None = None
    freeze: tuple[str, ...] = ()
    mem: str | int = DEFAULT_BUDGET
    batch: int | None = None
    fix: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    backend: str = "galvatron"
    mode: Mode = Mode.TRAINING
    allow_delay: bool = False
    margin: float | None = None
    progress: Progress | None = None

    @classmethod
    def parse(
        cls, profile: ProfileSource | PlanRequest, arguments: PlanArguments, others: Sequence[str] = ()
    ) -> PlanRequest:
        """Parse the arguments of a caller.

        Args:
            profile: see ``plan``; a request is returned unchanged.
            arguments: see ``plan``.
            others: names of other arguments of the function, for errors.

        Raises:
            InputError: an unknown argument, or one that cannot be parsed; names it.
        """
        if isinstance(profile, PlanRequest):
            return profile
        for name in arguments:
            if name not in (allowed := ("profile", *PlanArguments.__annotations__, *others)):
                raise unknown("argument", name, allowed, others=_ALIASES)
        for name in ("model", "cluster", "precision", "trainable"):
            if isinstance(value := arguments.get(name), (int, float, list, tuple, dict)):
                raise InputError(name, value, "Give a name, or the path of a file.")
        delay = arguments.get("allow_delay", False)
        if not isinstance(delay, bool):
            raise InputError("allow_delay", delay, "Give True or False.")
        return cls(
            profile=profile,
            model=arguments.get("model"),
            shape=arguments.get("shape"),
            image=arguments.get("image"),
            cluster=arguments.get("cluster"),
            gpus=integer("gpus", arguments.get("gpus")),
            sequence=integer("sequence", arguments.get("sequence")),
            precision=arguments.get("precision"),
            trainable=arguments.get("trainable"),
            freeze=texts("freeze", arguments.get("freeze")),
            mem=memory_budget(arguments.get("mem", DEFAULT_BUDGET)),
            batch=integer("batch", arguments.get("batch")),
            fix=texts("fix", arguments.get("fix")),
            forbid=texts("forbid", arguments.get("forbid")),
            schedules=texts("schedules", arguments.get("schedules")),
            backend=_backend(arguments),
            mode=mode_named(arguments.get("mode", "training")),
            allow_delay=delay,
            margin=share("--margin", arguments.get("margin")),
            progress=arguments.get("progress"),
        )

    @property
    def estimated(self) -> bool:
        """Whether costs are estimated, for a model by name or shape."""
        return self.model is not None or bool(self.shape)

    def on(self, profile: Profile | str | Path) -> PlanRequest:
        """The same request for a profile, which determines the model and the cluster."""
        return replace(
            self, profile=profile, model=None, shape=None, image=None, cluster=None, gpus=None, sequence=None,
            precision=None, trainable=None, freeze=(),
        )  # fmt: skip

    def profile_on(self, devices: int | None, stack: str | None = None) -> Profile:
        """The profile of a number of devices (None: all); ``stack``: software that trains, by default the backend's."""
        if callable(self.profile):
            return self.profile(devices)
        return find_profile(
            self.profile, model=self.model, shape=self.shape, image=self.image, cluster=self.cluster, gpus=devices,
            sequence=self.sequence, precision=self.precision, trainable=self.trainable, freeze=self.freeze,
            stack=backend_named(self.backend).stack if stack is None else stack,
        )  # fmt: skip

    @cached_property
    def resolved(self) -> PlanSetting:
        """The profile, pins, schedules and budget of this request, for searches.

        Raises:
            InputError: no profile, or pins that the model or the backend does not have, or beside which no plan keeps
                to what the model needs (``Profile.needs``).
        """
        profile = self.profile_on(self.gpus)
        backend = backend_named(self.backend)
        user_pins = pins = read_pins(self.fix, self.forbid, profile.graph)
        needs = profile.needs if self.mode is Mode.TRAINING else PlanNeeds()
        pin_words = " ".join([*(f"--fix {word}" for word in self.fix), *(f"--forbid {word}" for word in self.forbid)])
        if needs.restrict:
            try:
                pins = read_pins((*needs.fix, *self.fix), (*needs.forbid, *self.forbid), profile.graph)
            except InputError as error:
                raise needs.without_plan(profile.cluster.devices, pin_words) from error
        schedules = schedules_named(self.schedules, pins.fixed.schedule)
        check_backend(self.fix, self.schedules, backend)
        _check_model(profile.graph, backend)
        margin = self.margin
        if margin is None:
            margin = margin_of(profile.origin.kind.value, load_calibration())
        return PlanSetting(
            profile=profile,
            budget=budget_on(first_devices(profile.cluster, 1), self.mem),
            pins=pins,
            user_pins=user_pins,
            pin_words=pin_words,
            needs=needs,
            schedules=schedules,
            backend=backend.name,
            memory=self.mem,
            # Fewer devices may be of one type and train in another precision, so their profile is made again.
            source=self.profile_on if callable(self.profile) or self.estimated else None,
            mode=self.mode,
            delay=pins.delay_where(allowed=self.allow_delay),
            margin=margin,
        )


def _check_model(graph: ModelGraph, backend: Backend) -> None:
    """Refuse a convolutional network for software that only trains transformers."""
    blocks = (graph.kind_of(layer) for layer in graph.layers if layer.role is Role.BLOCK)
    if not backend.pictures and any(kind.dims.height for kind in blocks):
        remedy = f"It trains no convolutional networks, as {graph.name} is: plan for deepspeed or accelerate."
        raise InputError("--for", backend.name, remedy)


def _backend(arguments: PlanArguments) -> str:
    """The name of the backend, or of the target software."""
    target, backend = arguments.get("target"), arguments.get("backend")
    if target is None:
        return backend or "galvatron"
    if backend not in (None, "galvatron"):
        raise InputError("--for", target, f"--backend {backend} says otherwise: leave one out.")
    return target_named(target).name


def texts(name: str, value: object) -> tuple[str, ...]:
    """Parse a text, a list of texts, or a mapping of names to values (``{"pp": 2}``), as texts."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (_word(value),)
    if isinstance(value, Mapping):
        return tuple(f"{key}={_word(setting)}" for key, setting in value.items())
    words = list(value) if isinstance(value, Iterable) else [None]
    if not all(isinstance(word, str) for word in words):
        raise InputError(name, value, "Give a text, or a list of texts.")
    return tuple(map(_word, words))


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value.value if isinstance(value, Enum) else value)


def mode_named(value: object) -> Mode:
    """Parse the name of a mode."""
    names = [mode.value for mode in Mode]
    if not isinstance(value, str) or value not in names:
        raise unknown("--mode", value, names)
    return Mode(value)


def memory_budget(value: object, name: str = "mem") -> str | int:
    """Parse a budget a device: bytes, a text, or a share of each device's memory (0.8)."""
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, float) and 0 < value <= 1:
        return f"{100 * value:g}%"
    if isinstance(value, float) and value.is_integer() and value > 1:
        return int(value)
    raise InputError(name, value, "Give bytes (40e9), a text ('40GB', '40GiB', '80%') or a share of the memory (0.8).")


def integer(name: str, value: object) -> int | None:
    """Check a whole number, or None."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise InputError(name, value, "Give a whole number.")


def number(name: str, value: object, read: Callable[[str, str], float] = parse_count) -> float | None:
    """Parse a number, or a text by ``read``; None stays None."""
    if isinstance(value, str):
        return read(value, name)
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)):
        return value
    raise InputError(name, value, "Give a number, or a text with a unit.")


def seconds(name: str, value: object) -> float | None:
    """Parse seconds, as a number or a text such as ``130ms``; None stays None."""
    return number(name, value, parse_seconds)


def share(name: str, value: object) -> float | None:
    """Parse a share from 0 to below 1, as a number (0.01) or a text (``1%``, ``0.01``); None stays None."""
    if value is None:
        return None
    try:
        text = str(value).strip()
        fraction = float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        fraction = -1.0
    if isinstance(value, bool) or not 0.0 <= fraction < 1.0:
        raise InputError(name, value, "Give a share from 0 to below 1: 0.01, or 1%.")
    return fraction


def size(name: str, value: object) -> int | None:
    """Parse bytes, as a number or a text such as ``400MB``; None stays None."""
    return integer(name, parse_bytes(value, name) if isinstance(value, str) else value)
