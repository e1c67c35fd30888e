"""Engine: add requests, compute one step at a time, return records; does not import torch or megatron."""
