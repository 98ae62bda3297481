"""Where the shipped model and cluster files are."""

from __future__ import annotations

from pathlib import Path

from galvatron_lite.errors import InputError

_PACKAGE = Path(__file__).resolve().parent


def config_folder(kind: str) -> Path:
    """The folder of shipped files of one kind (``models``, ``clusters``).

    In an installed wheel it lies inside the package, in a checkout beside it.

    Raises:
        InputError: the installation holds no such folder.
    """
    for root in (_PACKAGE / "configs", _PACKAGE.parent / "configs"):
        if (root / kind).is_dir():
            return root / kind
    raise InputError("configs", kind, f"The folder {_PACKAGE / 'configs' / kind} is missing; install the package anew.")
