"""Which replica runs a request: by what it would skip there, and by what is to be computed there before.

Standard library only: no sockets, no clocks, no torch. `router.Router` is the one object that others talk to.
"""
