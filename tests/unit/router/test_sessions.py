"""The session book: the latest sessions, for a while; and where unknown ones belong."""

from collections import Counter

from services.router.core.sessions import SessionBook, home_of, session_key


def test_the_latest_ones_for_a_while() -> None:
    book = SessionBook(limit=3, ttl_s=10)
    keys = [session_key(str(i), "m", "") for i in range(4)]
    for i, key in enumerate(keys):
        book.went(key, ("w", i), now=i)
        book.check_invariants()
    assert len(book) == 3
    assert book.place(keys[0], 4) is None
    assert book.place(keys[1], 4) == ("w", 1)
    book.went(keys[1], ("v", 0), now=5)
    assert book.place(keys[1], 14) == ("v", 0)
    assert book.place(keys[2], 14) is None
    book.expire(14)
    assert len(book) == 1


def test_sessions_of_others_are_others() -> None:
    keys = {session_key(*one) for one in [("a", "m", "t"), ("a", "m", ""), ("a", "n", "t")]}
    assert len(keys) == 3


def test_homes_are_spread_and_one_that_leaves_moves_its_own_only() -> None:
    places = [(f"w{i}", 0) for i in range(4)] + [("w0", 1)]
    keys = [session_key(str(i), "m", "") for i in range(500)]
    homes = [places[home_of(key, places)] for key in keys]
    assert min(Counter(homes).values()) > 60
    fewer = places[1:]
    after = [fewer[home_of(key, fewer)] for key in keys]
    assert all(a == b for a, b in zip(homes, after, strict=True) if a != places[0])
