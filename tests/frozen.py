"""Imported last by the server whose forks are the ranks of jobs: what is imported by then stays as it is.

A rank imports nothing of the package by itself. A fork's garbage collections would visit every object of torch, and in
doing so copy all their pages.
"""

import gc
import importlib
import pkgutil

import torch._inductor.compile_fx  # noqa: F401 - what compiles, and DeepSpeed, take a second to import it

import galvatron_lite
from galvatron_lite.files import to_data
from galvatron_lite.parallelism.strategy import Strategy
from tests.pool import GARBAGE
from tests.runtime.plans import make_plan

for module in pkgutil.walk_packages(galvatron_lite.__path__, "galvatron_lite."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
to_data(make_plan([["layer"]], [[Strategy()]], 1))  # imports pydantic, and makes what reads and writes plans
gc.collect()
gc.freeze()
gc.set_threshold(*GARBAGE)
