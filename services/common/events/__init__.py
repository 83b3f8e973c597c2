"""Numbered event streams over ZMQ: publisher, subscriber with gap detection, snapshot join."""
