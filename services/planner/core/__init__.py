"""The planner's decisions, pure: what workers tell and the time go in, moves come out.

`watch` keeps the read model, `measuring` sums it up (`windows`, `steps`, `legs`), `predict` looks
ahead, `policy` decides.
"""
