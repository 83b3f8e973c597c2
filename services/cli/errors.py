"""Errors that a person at the terminal sees: one line of what is wrong, one of what to do.

CliError
  PortTaken       a port that was asked for is in use
  ModelError      a model can't be found, read or prepared
  StateError      the state directory is in use, absent or unreadable
  StartFailed     a process of the cluster did not become ready
  RequestFailed   a request to the cluster failed
"""


class CliError(Exception):
    """Base: what is wrong, and in `hint` what to do. Ends the command with `exit_code`."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(CliError):
    """An option has a value that can't be right."""

    exit_code = 2


class PortTaken(CliError):
    """A port is in use by someone else."""


class ModelError(CliError):
    """The model can't be found, read or prepared."""


class StateError(CliError):
    """The state directory is in use by another cluster, absent, or not readable."""


class StartFailed(CliError):
    """A process ended, or was not ready in time. `tail` holds the last lines of its log."""

    def __init__(
        self, message: str, *, process: str = "", tail: tuple[str, ...] = (), hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.process = process
        self.tail = tail


class RequestFailed(CliError):
    """A request to the cluster failed."""
