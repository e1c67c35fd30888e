"""The routes of a coordinator, by who asks them."""
