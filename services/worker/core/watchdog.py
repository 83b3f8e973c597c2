"""Is the engine stuck? It has requests, and no step has ended for too long. Time is an argument."""


class Watchdog:
    """Judges progress. `limit_s` must be longer than the longest honest step."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._progress: int | None = None
        self._since_s = 0.0
        self.stuck = False

    def observe(self, now_s: float, *, busy: bool, progress: int) -> bool:
        """Takes what is seen at `now_s` (monotonic); returns whether the engine counts as stuck.

        Idle time never counts; a stuck engine is well again at its next step.
        """
        if not busy or progress != self._progress:
            self._progress = progress
            self._since_s = now_s
            self.stuck = False
        elif now_s - self._since_s >= self._limit_s:
            self.stuck = True
        return self.stuck
