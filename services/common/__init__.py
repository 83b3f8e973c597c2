"""What must be identical in every service.

Hashing, ids, settings, lifecycle, RPC, discovery, events, telemetry. Nothing here decides
anything, and nothing used by one service alone belongs here.
"""
