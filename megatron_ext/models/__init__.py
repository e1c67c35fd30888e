"""Models: building from flags, loading and saving, and the embedded model of the package."""
