"""Corpus, training and evaluation of the embedded model."""
