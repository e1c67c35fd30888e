"""Steps padded to bucket sizes in static buffers: replayed as CUDA graphs, or run as the same code uncaptured."""
