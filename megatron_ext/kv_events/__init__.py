"""KV events: changes of a prefix cache, published to routers in vLLM's format over ZeroMQ (docs/routing.md)."""
