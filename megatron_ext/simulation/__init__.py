"""Simulation of the scheduler and its cache on recorded or generated requests. No model, no torch."""
