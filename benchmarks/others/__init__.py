"""Modules as people write them elsewhere, by which ``benchmarks.plan`` judges the planner."""
