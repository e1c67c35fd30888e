"""What is cached. Standard library only. In this version: the pool of KV blocks that everything else will build on."""
