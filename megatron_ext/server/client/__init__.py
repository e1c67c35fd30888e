"""Engine requests of the server: handles, and groups of one HTTP request."""
