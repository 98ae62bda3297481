"""Where the shipped model and cluster files and profiles are."""

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
    return _shipped("configs", kind)


def profile_folder(kind: str) -> Path:
    """The folder of shipped profiles of one kind (``paradl``); see ``config_folder``.

    Raises:
        InputError: the installation holds no such folder.
    """
    return _shipped("profiles", kind)


def _shipped(folder: str, kind: str) -> Path:
    for root in (_PACKAGE / folder, _PACKAGE.parent / folder):
        if (root / kind).is_dir():
            return root / kind
    raise InputError(folder, kind, f"The folder {_PACKAGE / folder / kind} is missing; install the package anew.")
