"""A run without a server: prompts, submission, results, what a person sees of it."""
