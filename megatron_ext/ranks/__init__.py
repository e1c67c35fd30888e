"""Several ranks: who is who, and what they tell each other."""
