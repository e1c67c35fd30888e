"""Several ranks: their layout, rank 0's commands to the others, and shutdown after a rank fails."""
