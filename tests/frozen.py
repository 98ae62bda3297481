"""Imported last by the server whose forks are the ranks of jobs: what is imported by then stays as it is.

A fork's garbage collections would visit every object of torch, and in doing so copy all their pages.
"""

import gc

gc.collect()
gc.freeze()
