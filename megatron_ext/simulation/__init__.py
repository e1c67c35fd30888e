"""Simulation of the scheduler and its cache on recorded or generated requests, in simulated time. No model, no torch.
"""
