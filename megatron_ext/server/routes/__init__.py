"""What the server answers, a file a concern."""
