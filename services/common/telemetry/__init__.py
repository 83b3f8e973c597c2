"""Logs, metrics and traces, the same in every service."""
