"""Steps padded to sizes, in places that never move, computed by programs: CUDA graphs, or the same code uncaptured."""
