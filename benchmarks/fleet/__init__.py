"""A fleet that is simulated, for `benchmarks.routing`: traffic, replicas with caches, and other routers' rules."""
