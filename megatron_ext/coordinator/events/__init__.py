"""KV events of replicas: subscriptions, streams, and the contents of caches that they report."""
