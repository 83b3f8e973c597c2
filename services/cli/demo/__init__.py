"""Demonstrations: each starts its own cluster, measures, and shows what it saw."""
