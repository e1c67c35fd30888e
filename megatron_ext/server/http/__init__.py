"""HTTP: connections, bodies, keys, origins, and pages."""
