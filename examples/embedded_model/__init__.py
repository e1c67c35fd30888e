"""How the embedded model was made: its corpus, its training, what it knows."""
