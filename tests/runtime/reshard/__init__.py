"""Tests of changing the plan while training runs."""
