"""An engine in a thread of its own, which makes every call of it: what the server and the Python interface share."""
