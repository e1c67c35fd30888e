"""One's own figures: a model in an engine of ours, or any OpenAI server, under prompts that share, chat or do not."""
