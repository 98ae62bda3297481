"""Where the shipped configuration files lie: beside the package in a checkout, inside it once installed."""

from __future__ import annotations

from pathlib import Path


def config_folder(kind: str) -> Path:
    """The folder of shipped configurations of one kind (``models``, ``clusters``)."""
    package = Path(__file__).parent
    installed = package / "configs"
    return (installed if installed.is_dir() else package.parent / "configs") / kind
