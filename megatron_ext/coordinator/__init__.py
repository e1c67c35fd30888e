"""An OpenAI server in front of replicas of `megatron_ext.server`; see docs/fleet.md."""
