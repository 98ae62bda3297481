"""Imported last by the server whose forks are the ranks of jobs: what is imported by then stays as it is.

A rank imports nothing of the package by itself. A fork's garbage collections would visit every object of torch, and in
doing so copy all their pages.
"""

import gc
import importlib
import pkgutil

import galvatron_lite
from tests.pool import GARBAGE

for module in pkgutil.walk_packages(galvatron_lite.__path__, "galvatron_lite."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
gc.collect()
gc.freeze()
gc.set_threshold(*GARBAGE)
