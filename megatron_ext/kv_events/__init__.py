"""What a cache holds, told to routers as it changes: vLLM's KV events over ZeroMQ (docs/routing.md)."""
