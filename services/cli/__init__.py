"""The `forebay` command: starts, shows and demonstrates a whole cluster on one machine."""
