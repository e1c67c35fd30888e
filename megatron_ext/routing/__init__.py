"""Routing: choice of the replica that runs a request, by the prefix cached there and by its load.

Standard library only: no sockets, no clocks, no torch. `router.Router` is the only object that other packages call.
"""
