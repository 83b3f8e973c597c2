"""The planner's errors: it adds none to the common tree. What it meets, and what becomes of it:

FailedPrecondition (NO_TRANSFER)  the worker's engine hands nothing on: left alone for a while
Unavailable, DeadlineExceeded     the worker did not answer SetRole: the same
EtcdUnavailable, EtcdRefused      nobody can be elected: no planner moves anything meanwhile
SettingsError                     a setting is wrong: the start stops
"""
