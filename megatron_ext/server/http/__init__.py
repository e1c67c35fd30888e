"""HTTP layer: connections, bodies, keys, origins, and pages."""
