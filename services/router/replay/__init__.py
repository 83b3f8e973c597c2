"""Offline replay: a trace's requests, placed by the router's own core over modelled workers.

Simulated time, no sockets: `trace` reads requests, `simple` is the small worker model, `run` lets
time pass between workers, event streams and routers, `measure` makes figures of it.
"""
