"""How layers compute: one folder an operator, each with a plain-torch reference that runs on any device."""
