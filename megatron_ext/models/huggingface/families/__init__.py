"""Family definitions, one file each: the meaning of configuration fields and the mapping of tensors."""
