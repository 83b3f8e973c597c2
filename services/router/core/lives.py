"""Whether a process lives, and in which life: for workers and kvbm daemons alike. No tables.

Two sources speak of a process: its discovery record (a hint that it exists) and its own event
stream (proof of life). A vanished record removes nobody by itself; silence, a refused connection or
a new incarnation do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

_QUARANTINE_S = 0.5
"""Who refused must be heard this much later (two heartbeats): older words may be under way."""
_LONGEST_QUARANTINE_S = 10.0
_STRIKES_FORGOTTEN_S = 60.0
_OLD_LIVES = 8
_LATE_WORDS_S = 1.0
"""Words of an ended life may be under way for so long."""


class Status(StrEnum):
    """How the router regards a process."""

    JOINING = "joining"
    """Known; what it holds is not."""
    READY = "ready"
    SUSPECT = "suspect"
    """Silent: avoided; its blocks are kept."""
    UNREACHABLE = "unreachable"
    """Refused a connection: out of use until it is heard again; its blocks are kept."""
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Liveness:
    """When silence means what, in seconds."""

    suspect_after_s: float = 1.0
    gone_after_s: float = 30.0
    remember_model_s: float = 300.0
    """How long a model without workers is "no worker now" rather than "no such model"."""


class Word(StrEnum):
    """Whose word it is that came."""

    FORMER = "former"
    """Of a life that has ended: it says nothing of the living one."""
    PRESENT = "present"
    NEXT = "next"
    """Of a new life: what is known of the old one is void."""


@dataclass(slots=True, kw_only=True)
class Life:
    """One process, through its lives."""

    incarnation: int
    heard_at: float
    record_incarnation: int | None
    """Incarnation in its discovery record; None when the record vanished."""
    sequence: int = 0
    """Last number of its stream that was applied."""
    known: bool = False
    """Whether a snapshot of this life was taken."""
    refused: bool = False
    """Whether it refused a connection and was not heard again since."""
    refused_at: float = 0.0
    strikes: int = 0
    """Refusals in a row; each doubles the time it must wait."""
    old_lives: deque[int] = field(default_factory=lambda: deque(maxlen=_OLD_LIVES))

    @property
    def starting(self) -> bool:
        """Whether this life has only been heard so far.

        A process's ports are open long before it is ready; then come snapshot and record.
        """
        return not self.known and self.record_incarnation != self.incarnation

    @property
    def heard_since_refusal(self) -> bool:
        """Whether it spoke after it refused a connection, too late for words under way then."""
        return self.heard_at - self.refused_at >= _QUARANTINE_S

    def silence_s(self, now: float) -> float:
        """Seconds since it was last heard (or appeared)."""
        return max(0.0, now - self.heard_at)

    def status(self, draining: bool, liveness: Liveness, now: float) -> Status:
        """How it is regarded at `now`; `draining` is what its record says."""
        if draining:
            return Status.DRAINING
        if self.refused:
            return Status.UNREACHABLE
        if self.silence_s(now) > liveness.suspect_after_s:
            return Status.SUSPECT
        return Status.READY if self.known else Status.JOINING

    def gone(self, draining: bool, liveness: Liveness, now: float) -> bool:
        """Whether it is to be forgotten: without a record, and silent for long.

        A short silence will do for one that refused a connection or said that it was leaving.
        """
        if self.record_incarnation is not None:
            return False
        leaving = self.refused or draining
        limit = liveness.suspect_after_s if leaving else liveness.gone_after_s
        return self.silence_s(now) > limit

    # Events.

    def recorded(self, incarnation: int) -> Word:
        """A discovery record came or changed. A NEXT life is for the caller to `begin`."""
        news = self.record_incarnation != incarnation
        self.record_incarnation = incarnation
        if incarnation in self.old_lives:
            # A late record of a life that has ended; the living one will write its own.
            return Word.FORMER
        return Word.NEXT if news and incarnation != self.incarnation else Word.PRESENT

    def record_vanished(self, incarnation: int) -> None:
        """A discovery record went: a hint only."""
        if self.record_incarnation == incarnation:
            self.record_incarnation = None

    def heard(self, incarnation: int, now: float) -> Word:
        """Its stream spoke. A NEXT life has begun by that."""
        if incarnation in self.old_lives:
            if now - self.heard_at <= _LATE_WORDS_S:
                return Word.FORMER
            # The one that seems to live is silent: its words were late ones of a former life that
            # had not been heard before.
            self.old_lives.remove(incarnation)
        word = Word.PRESENT
        if incarnation != self.incarnation:
            self.begin(incarnation, now)
            word = Word.NEXT
        self.heard_at = now
        if self.refused:
            wait = min(_QUARANTINE_S * 2.0 ** (self.strikes - 1), _LONGEST_QUARANTINE_S)
            self.refused = now - self.refused_at < wait
        return word

    def answered(self, sequence: int) -> None:
        """It answered a call with its snapshot: it can be reached."""
        self.known = True
        self.sequence = sequence
        self.refused = False

    def refuse(self, incarnation: int, now: float) -> bool:
        """It refused a connection (`incarnation` 0: whichever life). True if that is news."""
        if incarnation not in (0, self.incarnation) or self.refused:
            return False
        if now - self.refused_at > _STRIKES_FORGOTTEN_S:
            self.strikes = 0
        self.strikes = min(self.strikes + 1, 16)
        self.refused, self.refused_at = True, now
        return True

    def begin(self, incarnation: int, now: float) -> None:
        """Another life starts."""
        if self.incarnation != incarnation:
            self.old_lives.append(self.incarnation)
        self.incarnation = incarnation
        self.heard_at = now
        self.known = False
        self.sequence = 0
        self.refused = False
        self.strikes = 0
