"""Text of requests: pieces as tokens come, stop words, streams."""
