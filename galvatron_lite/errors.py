"""Every error this package raises on purpose, and the log of what it tells a training script's user unasked.

GalvatronError
├── InputError (ValueError)      a value the user gave is wrong: names the field, the value, the remedy
│   ├── UnknownNameError         a name that does not exist: suggests the nearest
│   ├── UnitError                a size or a share that cannot be read
│   ├── FileFormatError          a plan, profile, cluster or model file that is corrupt or of another version
│   └── TraceError               a model, or a block of it, that cannot be captured
├── InfeasibleError              no plan fits: names the smallest budget that would
├── LaunchError (RuntimeError)   the launched world does not fit the plan (size, device)
│   └── PeerError                another process is gone, failed or hangs: names its rank and what it was at
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
    """Prints lines to standard error, in colour on a terminal, unless the program has set up logging for them."""

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
"""Which plan was chosen, that something is measured; ``setLevel(logging.WARNING)`` silences it."""
LOG.addHandler(_Lines())
LOG.propagate = False  # ``_Lines`` hands lines on
LOG.setLevel(logging.INFO)


class GalvatronError(Exception):
    """Base class of every error this package raises on purpose."""


def _shown(value: object) -> str:
    """A value as it was written, shortened: paths and choices as their text."""
    if type(value) is int and value.bit_length() > 4096:  # longer ones may not be written in decimal
        return f"an integer of {value.bit_length()} bits"
    return _SHORT.repr(str(value) if isinstance(value, (PurePath, Enum)) else value)


class InputError(GalvatronError, ValueError):
    """A value the user gave is wrong.

    Args:
        field: what the value was for, as the user wrote it (``--mem``, ``stages[2].layers``).
        value: what was given.
        remedy: what to give instead.
    """

    verdict = "cannot be used."

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        said = f"{field} is missing." if value is None else f"{field}: {_shown(value)} {self.verdict}"
        if value is True and type(self) is InputError:  # an option that is on has no value of its own to show
            said = f"{field} cannot be used here."
        super().__init__(f"{said} {remedy}")

    def __reduce__(self) -> tuple[type[InputError], tuple[str, object, str]]:
        """So that one process can tell another of it."""
        return type(self), (self.field, self.value, self.remedy)


class UnknownNameError(InputError):
    """A name that does not exist; ``unknown`` makes it."""

    verdict = "is unknown."


_FEW = 160  # characters of a list of names that is printed beside a suggestion


def unknown(
    field: str, name: object, names: Iterable[str], besides: str = "", others: Mapping[str, str] | None = None
) -> UnknownNameError:
    """The error for a name that does not exist, with the nearest ones; a long list only where none is near.

    Args:
        field: what the name was for, as the user wrote it.
        name: what was written.
        names: those that exist.
        besides: a sentence on what may be written instead of a name.
        others: words that people may write, and the name that they mean.
    """
    known = list(dict.fromkeys(names))
    hint, every = suggestion(str(name), known, others), f"Known: {', '.join(known)}."
    words = (hint, "" if hint and len(every) > _FEW else every, besides)
    return UnknownNameError(field, name, " ".join(filter(None, words)))


def suggestion(name: str, names: Iterable[str], others: Mapping[str, str] | None = None) -> str:
    """``Did you mean X or Y?`` with the nearest of some names; empty where none is near."""
    known = list(names)
    if others and name in others:
        return f"Did you mean {others[name]}?"
    longer = [one for one in known if one.startswith(name)] if name else []
    ratios = {
        get_close_match: SequenceMatcher(None, get_close_match, name).ratio()
        for get_close_match in get_close_matches(name, known, n=3)
    }
    near = longer[:3] or [ratio for ratio in ratios if ratios[ratio] > 0.95 * max(ratios.values())]
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
        message: what was asked for and what would have to give.
        smallest_budget: bytes a device that the plan of least memory needs; None where no budget would do.
    """

    def __init__(self, message: str, smallest_budget: int | None = None) -> None:
        self.smallest_budget = smallest_budget
        super().__init__(message)


class LaunchError(GalvatronError, RuntimeError):
    """The launched world does not fit the plan."""


class PeerError(LaunchError):
    """An operation of several processes could not be finished because of others.

    Args:
        message: who is why, where they were, what to do.
        ranks: those that are why, as far as it is known.
        operation: what the first of them was at.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), operation: str = "") -> None:
        self.ranks, self.operation = ranks, operation
        super().__init__(message)


class VerificationError(GalvatronError):
    """A plan does not do what it says: checks of it failed before training.

    Args:
        failed: name of each check, and what it says.
    """

    def __init__(self, failed: Sequence[tuple[str, str]]) -> None:
        self.failed = tuple(failed)
        told = " ".join(f"{name}: {said}" for name, said in failed)
        super().__init__(f"The plan does not do what it says. {told} Run galvatron verify for all that was found.")

    def __reduce__(self) -> tuple[type[VerificationError], tuple[Sequence[tuple[str, str]]]]:
        """So that one process can tell another of it."""
        return type(self), (self.failed,)


class ExhaustedError(GalvatronError, MemoryError):
    """Memory ran out where training cannot go on in this process."""


class SwitchError(GalvatronError, RuntimeError):
    """The plan could not be changed while training runs; every rank is on the plan it had, and can train on.

    Args:
        phase: in which it failed.
        rank: the first rank that did.
        cause: what went wrong there.
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
        ranks: where it is not, as far as it is known.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        self.ranks = ranks
        super().__init__(message)
