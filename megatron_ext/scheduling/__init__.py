"""Who runs next: the life of a request on the host. Standard library only."""
