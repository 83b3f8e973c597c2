"""Which peers are used, which are avoided, and who is said to hold what."""

from services.kvbm.core.peers import MOST_ASKED, PeerBook, PeerId, PeerInfo

A, B = PeerId("a"), PeerId("b")


def book(*peers: str) -> PeerBook:
    made = PeerBook("me")
    for number, peer in enumerate(peers):
        made.record(PeerInfo(PeerId(peer), number + 1, f"{peer}:1"))
    return made


def test_a_daemon_is_no_peer_of_its_own() -> None:
    peers = book("me", "a")
    assert len(peers) == 1 and peers.info(PeerId("me")) is None
    peers.check_invariants()


def test_a_new_life_or_another_address_is_told_and_its_hints_are_void() -> None:
    peers = book("a")
    peers.hint(A, [1, 2], 0)
    assert not peers.record(PeerInfo(A, 1, "a:1"))
    assert peers.holder(1, 0) == A
    assert peers.record(PeerInfo(A, 2, "a:1"))
    assert peers.holder(1, 0) is None
    assert peers.record(PeerInfo(A, 2, "a:2"))
    peers.check_invariants()


def test_failures_in_a_row_are_avoided_longer_and_success_ends_that() -> None:
    peers = book("a")
    pauses = []
    now = 0.0
    for _ in range(9):
        peers.failed(A, "timeout", now)
        began = now
        while not peers.usable(A, now):
            now += 0.25
        pauses.append(now - began)
    assert pauses == sorted(pauses) and pauses[0] == 0.5 and pauses[-1] == 30.0
    peers.failed(A, "timeout", now)
    assert peers.standings(now)[0][1] == "timeout"
    peers.worked(A)
    assert peers.usable(A, now) and peers.standings(now)[0][1] == ""
    peers.failed(A, "again", now)
    assert peers.usable(A, now + 0.5)


def test_a_vanished_record_is_a_hint_and_a_failure_makes_it_sure() -> None:
    """etcd may come back empty while everybody lives."""
    peers = book("a", "b")
    peers.record_vanished(A, 7)
    assert not peers.failed(A, "another life's record", 0)
    peers.worked(A)
    peers.record_vanished(A, 1)
    assert peers.usable(A, 0)
    peers.hint(A, [1], 0)
    assert peers.failed(A, "unavailable", 0)
    assert not peers.usable(A, 100) and peers.holder(1, 0) is None
    peers.record_vanished(B, 2)
    peers.record(PeerInfo(B, 2, "b:1"))
    assert not peers.failed(B, "once", 0), "its record has come back"
    peers.check_invariants()


def test_hints_name_peers_that_are_of_use_and_end() -> None:
    peers = book("a", "b")
    peers.hint(A, [1, 2], 0)
    peers.hint(B, [2], 0)
    peers.hint(PeerId("nobody"), [3], 0)
    assert [peers.holder(key, 0) for key in (1, 2, 3)] == [A, B, None]
    peers.failed(A, "away", 0)
    assert peers.holder(1, 0.1) is None and peers.holder(1, 0.6) == A
    peers.unhint(B, 1)
    assert peers.holder(1, 1) == A
    peers.unhint(A, 1)
    assert peers.holder(1, 1) is None
    assert peers.holder(2, 29.9) == B and peers.holder(2, 30.0) is None
    peers.check_invariants()


def test_hints_and_absences_are_bounded() -> None:
    peers = book("a")
    for start in range(0, 200_000, 10_000):
        peers.hint(A, range(start, start + 10_000), 0)
    peers.check_invariants()
    assert peers.holder(199_999, 0) == A and peers.holder(0, 0) is None
    for key in range(10_000):
        peers.absent(key, 0)
    peers.check_invariants()


def test_nobody_is_asked_again_at_once_about_what_nobody_had() -> None:
    peers = book("a")
    peers.absent(1, 10)
    assert peers.is_absent(1, 11.9) and not peers.is_absent(1, 12.0) and not peers.is_absent(2, 10)


def test_few_are_asked_at_a_time_and_all_in_turn() -> None:
    peers = book(*(f"n{i}" for i in range(9)))
    asked = [peers.to_ask(0) for _ in range(9)]
    assert all(len(set(some)) == MOST_ASKED for some in asked)
    assert len({peer for some in asked for peer in some}) == 9
    peers.failed(PeerId("n3"), "away", 0)
    assert all(PeerId("n3") not in peers.to_ask(0.1) for _ in range(9))
    assert book("a", "b").to_ask(0) == [A, B]


def test_looking_whether_there_is_anybody_takes_nobodys_turn() -> None:
    peers = book(*(f"n{i}" for i in range(8)))
    asked = set()
    for _ in range(4):
        assert peers.any_usable(0)
        asked |= set(peers.to_ask(0))
    assert len(asked) == 8
    for number in range(8):
        peers.failed(PeerId(f"n{number}"), "away", 0)
    assert not peers.any_usable(0.1) and peers.to_ask(0.1) == []
