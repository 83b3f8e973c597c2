"""The offload demonstration's workload: several people with long documents who come back.

Pure: the same seed gives the same visits.
"""

import random
from dataclasses import dataclass

from services.cli.demo.prompt import PROMPT

_NAMES = (
    "Ada", "Bela", "Chen", "Dara", "Emil", "Fumi", "Gita", "Hugo", "Ines", "Jun", "Kofi", "Lena",
)  # fmt: skip
_QUESTIONS = (
    "Where does the old keeper look first?",
    "What is never thrown away without need?",
    "When do the pumps stand still?",
    "What does a broken gauge look like in the book?",
    "What happens when a turbine stops in the middle of a load?",
    "Why does the station not build larger turbines?",
)
MOST_USERS = len(_NAMES) - 1
"""One name is kept for `calibration_prompt`."""

LEAST_QPS, MOST_QPS = 0.12, 2.0


@dataclass(frozen=True, slots=True)
class Visit:
    """One request: when, by whom, for which time, and what is asked."""

    at_s: float
    """Seconds after the start."""
    user: int
    number: int
    """0: the user's first visit."""
    prompt: str


def plan_visits(users: int, visits_each: int, qps: float, *, seed: int = 7) -> list[Visit]:
    """Everybody comes `visits_each` times, one visit every 1/qps seconds, in shuffled rounds.

    A user's prompts begin with the same long document and end with another question. The rounds
    make some come back soon and others late: after none to twice as many others as there are.
    """
    if not 2 <= users <= MOST_USERS or visits_each < 2 or qps <= 0:
        raise ValueError(f"2 to {MOST_USERS} users, 2 or more visits each, and a rate above 0")
    rng = random.Random(seed)
    documents = [_document(user, rng) for user in range(users)]
    visits: list[Visit] = []
    for number in range(visits_each):
        order = list(range(users))
        rng.shuffle(order)
        for user in order:
            question = _QUESTIONS[(user + number) % len(_QUESTIONS)]
            prompt = f"{documents[user]}\nQuestion {number + 1}: {question}"
            visits.append(Visit(len(visits) / qps, user, number, prompt))
    return visits


def calibration_prompt(*, seed: int = 7) -> str:
    """A prompt as long as theirs that is nobody's, to see how long computing one takes."""
    return f"{_document(MOST_USERS, random.Random(seed))}\nQuestion: {_QUESTIONS[0]}"


def fitting_qps(compute_s: float) -> float:
    """Visits a second that keep an engine which computes each prompt anew busy, not swamped."""
    return min(MOST_QPS, max(LEAST_QPS, 0.6 / compute_s))


def _document(user: int, rng: random.Random) -> str:
    """A long text that no other user has: the handbook's sentences, in an order of its own."""
    sentences = list(handbook())
    pages = []
    for page in range(2):
        rng.shuffle(sentences)
        pages.append(f"Page {page + 1}. " + " ".join(sentences))
    return (
        f"{_NAMES[user]} keeps these notes on the station. Answer the question at their end in "
        f"one sentence.\n" + "\n".join(pages)
    )


def handbook() -> tuple[str, ...]:
    """The handbook's sentences, in their order."""
    words = " ".join(PROMPT.split()[18:])
    return tuple(f"{s.strip()}." for s in words.replace("?", ".").split(".") if len(s.split()) > 3)
