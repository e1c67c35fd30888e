"""Simulation: the scheduler and the cache without a model or with a tiny one, and sizes by formula."""
