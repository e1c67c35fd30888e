"""Several ranks: who is who, what rank 0 tells the others, and what becomes of a world in which one of them fails."""
