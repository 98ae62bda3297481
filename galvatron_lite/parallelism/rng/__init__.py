"""Random numbers that do not depend on how work is split: each is decided by what it is for."""
