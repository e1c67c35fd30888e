"""Offline runs, without a server: prompts, submission, results, and console output."""
