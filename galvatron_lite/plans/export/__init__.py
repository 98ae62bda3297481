"""A plan in other tools' words: one module a tool, each with ``exported(plan)``."""
