"""Watching training: where ranks are, what steps take, and adapting the plan."""
