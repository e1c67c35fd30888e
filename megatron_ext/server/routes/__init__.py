"""Routes of the server, one file per concern."""
