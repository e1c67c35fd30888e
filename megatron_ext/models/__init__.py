"""Models: built from flags, loaded and saved, and the one that comes with the package."""
