"""At which positions a step leaves states, and which of them get a slot."""
