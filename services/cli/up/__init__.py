"""`forebay up` and `forebay down`: a supervised cluster on one machine."""
