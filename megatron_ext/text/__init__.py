"""Text processing: tokenizers, chat templates, detokenization, stop words, grammars."""
