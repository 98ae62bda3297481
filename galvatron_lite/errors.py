"""Every error this package raises on purpose, and its log.

GalvatronError
├── InputError (ValueError)      a value from the user is wrong: names the field, the value, the remedy
│   ├── UnknownNameError         a name that does not exist: suggests the nearest
│   ├── UnitError                a size or a share that cannot be read
│   ├── FileFormatError          a plan, profile, cluster or model file that is corrupt or of another version
│   └── TraceError               a model, or a block of it, that cannot be captured
├── InfeasibleError              no plan fits: names the smallest budget that would
├── LaunchError (RuntimeError)   the launched world does not fit the plan (size, device)
│   └── PeerError                another process is gone, failed or hangs: names its rank and its operation
├── VerificationError            a plan does not do what it says, found before training
├── ExhaustedError (MemoryError) memory ran out where training cannot go on in this process
├── SwitchError (RuntimeError)   the plan could not be changed while training runs; training goes on under the old one
└── NonFiniteLossError           training produced a loss or a gradient that is NaN or infinite
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from enum import Enum
from pathlib import PurePath
from reprlib import Repr

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 400
_SHORT.maxlong = 60


class _Lines(logging.Handler):
    """Prints records to standard error, in colour on a terminal, unless the program has configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        root, line = logging.getLogger(), record.getMessage()
        if root.handlers and root.isEnabledFor(record.levelno):
            root.handle(record)
        elif sys.stderr.isatty():
            from rich.console import Console
            from rich.text import Text

            Console(stderr=True, soft_wrap=True).print(Text("galvatron: ", "bold cyan").append(line, "default"))
        else:
            print(f"galvatron: {line}", file=sys.stderr, flush=True)


LOG = logging.getLogger("galvatron_lite")
"""Messages on the chosen plan and on measurements; ``setLevel(logging.WARNING)`` silences them."""
LOG.addHandler(_Lines())
LOG.propagate = False  # ``_Lines`` passes records on
LOG.setLevel(logging.INFO)


class GalvatronError(Exception):
    """Base class of every error this package raises on purpose."""


def _shown(value: object) -> str:
    """A value as text, shortened."""
    if type(value) is int and value.bit_length() > 4096:  # Python does not print longer ones
        return f"an integer of {value.bit_length()} bits"
    return _SHORT.repr(str(value) if isinstance(value, (PurePath, Enum)) else value)


class InputError(GalvatronError, ValueError):
    """A value from the user is wrong.

    Args:
        field: name of the value, as the user wrote it (``--mem``, ``stages[2].layers``).
        value: the value; None: it is missing.
        remedy: what to give instead.
    """

    verdict = "cannot be used."

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        problem = f"{field} is missing." if value is None else f"{field}: {_shown(value)} {self.verdict}"
        if value is True and type(self) is InputError:  # of an option that takes no value
            problem = f"{field} cannot be used here."
        super().__init__(f"{problem} {remedy}")

    def __reduce__(self) -> tuple[type[InputError], tuple[str, object, str]]:
        """Support pickling, to send the error to another process."""
        return type(self), (self.field, self.value, self.remedy)


class UnknownNameError(InputError):
    """A name that does not exist; made by ``unknown``."""

    verdict = "is unknown."


_SHORT_LIST = 160  # characters up to which a list of names is printed beside a suggestion


def unknown(
    field: str, name: object, names: Iterable[str], besides: str = "", others: Mapping[str, str] | None = None
) -> UnknownNameError:
    """Make the error for a name that does not exist, with the nearest names, or all if there are few or none is near.

    Args:
        field: name of the value, as the user wrote it.
        name: the unknown name.
        names: names that exist.
        besides: a sentence on what can be given instead of a name.
        others: other words for names, and the names that they mean.
    """
    names = list(dict.fromkeys(names))
    hint, listed = suggestion(str(name), names, others), f"Known: {', '.join(names)}."
    sentences = (hint, "" if hint and len(listed) > _SHORT_LIST else listed, besides)
    return UnknownNameError(field, name, " ".join(filter(None, sentences)))


def suggestion(name: str, names: Iterable[str], others: Mapping[str, str] | None = None) -> str:
    """``Did you mean X or Y?`` with the nearest names; empty if none is near."""
    names = list(names)
    if others and name in others:
        return f"Did you mean {others[name]}?"
    longer = [candidate for candidate in names if candidate.startswith(name)] if name else []
    close = get_close_matches(name, names, n=3)
    ratios = {candidate: SequenceMatcher(None, candidate, name).ratio() for candidate in close}
    near = longer[:3] or [candidate for candidate in close if ratios[candidate] > 0.95 * max(ratios.values())]
    return f"Did you mean {' or '.join(near)}?" if near else ""


class UnitError(InputError):
    """A size or a share that cannot be read."""


class FileFormatError(InputError):
    """A file that is corrupt, truncated, or of another version."""


class TraceError(InputError):
    """A model, or a block of it, that cannot be captured."""


class InfeasibleError(GalvatronError):
    """No plan fits the budget.

    Args:
        message: what does not fit, and what to change.
        smallest_budget: bytes a device that the plan of least memory needs; None if no budget is enough.
    """

    def __init__(self, message: str, smallest_budget: int | None = None) -> None:
        self.smallest_budget = smallest_budget
        super().__init__(message)


class LaunchError(GalvatronError, RuntimeError):
    """The launched world does not fit the plan."""


class PeerError(LaunchError):
    """An operation of several processes failed because of other processes.

    Args:
        message: which ranks failed, where, and what to do.
        ranks: ranks that failed, as far as known.
        operation: operation of the first of them.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), operation: str = "") -> None:
        self.ranks, self.operation = ranks, operation
        super().__init__(message)


class VerificationError(GalvatronError):
    """A plan does not do what it says: checks of it failed before training.

    Args:
        failed: name and message of each failed check.
    """

    def __init__(self, failed: Sequence[tuple[str, str]]) -> None:
        self.failed = tuple(failed)
        messages = " ".join(f"{name}: {message}" for name, message in failed)
        super().__init__(f"The plan does not do what it says. {messages} Run galvatron verify for all that was found.")

    def __reduce__(self) -> tuple[type[VerificationError], tuple[Sequence[tuple[str, str]]]]:
        """Support pickling, to send the error to another process."""
        return type(self), (self.failed,)


class ExhaustedError(GalvatronError, MemoryError):
    """Memory ran out where training cannot go on in this process."""


class SwitchError(GalvatronError, RuntimeError):
    """The plan could not be changed during training; every rank keeps the old plan and can train on.

    Args:
        phase: of the change, in which it failed.
        rank: the first rank that failed.
        cause: the error there.
    """

    def __init__(self, phase: str, rank: int, cause: str) -> None:
        self.phase, self.rank, self.cause = phase, rank, cause
        super().__init__(
            f"Changing the plan failed on rank {rank} ({phase}): {cause}. Every rank is on the plan it had and can "
            "train on; change the plan again once the cause is gone, or keep it."
        )


class NonFiniteLossError(GalvatronError, ArithmeticError):
    """Training produced a loss or a gradient that is NaN or infinite.

    Args:
        message: what is not finite, where, and what to do.
        ranks: ranks where it is not, as far as known.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        self.ranks = ranks
        super().__init__(message)
