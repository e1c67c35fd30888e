"""Scripts and lessons around the package."""
