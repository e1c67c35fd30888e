"""One file a family: which fields of its configuration mean what, and which of its tensors goes where."""
