"""Fields of what layers share, and of those that carry no state: attention with positions, MLPs, experts."""
