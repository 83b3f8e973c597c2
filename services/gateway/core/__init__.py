"""The gateway's decisions, pure: what a request means, how text becomes of tokens, when it ends."""
