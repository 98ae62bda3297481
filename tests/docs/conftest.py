"""The folder that pages are run in, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import distributed as dist

from tests.docs.place import make_place


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See ``tests/docs/place.py``; it is copied before it is used."""
    place = tmp_path_factory.mktemp("made")
    make_place(place)
    if dist.is_initialized():
        dist.destroy_process_group()
    return place
