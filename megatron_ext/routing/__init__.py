"""Routing: choice of the replica that runs a request, by the prefix cached there and by its load.

Standard library only: no sockets, no clocks, no torch. Other packages call `router.Router` and its members.
"""
