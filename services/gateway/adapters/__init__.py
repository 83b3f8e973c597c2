"""The outside world of the gateway, one file for each thing."""
