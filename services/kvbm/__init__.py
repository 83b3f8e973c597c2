"""kvbm: one node's KV blocks below the engine, in host memory, on disk and in remote storage."""
