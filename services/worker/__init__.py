"""Worker: one engine, its G1 blocks and its running requests; tokens in, tokens out."""
