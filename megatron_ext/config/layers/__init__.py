"""Fields common to all layers, and those of stateless ones: attention with positions, MLPs, experts."""
