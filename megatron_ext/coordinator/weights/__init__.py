"""New weights of a fleet: updates of all replicas, requests that wait for them, and groups of samples."""
