"""The planner's decisions, pure: what workers tell and the time go in, moves come out.

`watch` keeps the read model, `windows` and `steps` measure, `predict` looks ahead, `policy`
decides.
"""
