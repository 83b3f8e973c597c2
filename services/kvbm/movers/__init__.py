"""How bytes get between memory and files or objects: NIXL, and plain I/O behind it."""
