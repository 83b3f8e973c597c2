"""Errors of the worker.

ForebayError
  EngineStartError     UNAVAILABLE           the engine can't be started as asked
  EngineStopped        UNAVAILABLE           the engine died; the process ends with exit code 1
"""

from services.common.errors import Unavailable


class EngineStartError(Unavailable):
    """The engine can't be started with these settings; the message names what is wrong."""

    default_reason = "ENGINE_START"


class EngineStopped(Unavailable):
    """The engine died while it served."""

    default_reason = "ENGINE_DEAD"
