"""Policy of routing in the Python interface."""

from __future__ import annotations

POLICY = "inference_dynamic_batching_prefix_caching_coordinator_policy"


def test_one_replica_has_nothing_to_choose(load, caplog):
    """KV-7: a policy without replicas has no effect, which is said once; without one nothing is said."""
    load(**{POLICY: "longest_prefix"})
    assert sum("policy that chooses replicas has no effect" in record.message for record in caplog.records) == 1
    caplog.clear()
    load()
    assert not [record for record in caplog.records if "policy" in record.message]
