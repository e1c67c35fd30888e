"""Routes of a coordinator, by purpose."""
