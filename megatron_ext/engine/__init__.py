"""Requests in, one step at a time, records out; without torch or megatron, which `mcore` brings."""
