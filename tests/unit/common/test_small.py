"""Ids, host:port, and etcd's view of a prefix: small pure things."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.etcd.client import prefix_end
from services.common.etcd.config import EtcdConfig
from services.common.etcd.watch import Deleted, Listed, PrefixView, Put
from services.common.ids import new_id, new_incarnation
from services.common.net import host_port


def test_ids_and_incarnations_are_random_and_well_formed() -> None:
    assert len({new_incarnation() for _ in range(100)}) == 100
    assert all(0 < new_incarnation() < 2**64 for _ in range(100))
    assert new_id("att").startswith("att-") and len(new_id("att")) == 4 + 16


@pytest.mark.parametrize(
    ("host", "text"),
    [("h", "h:5"), ("1.2.3.4", "1.2.3.4:5"), ("::1", "[::1]:5"), ("[::1]", "[::1]:5")],
)
def test_host_port(host: str, text: str) -> None:
    assert host_port(host, 5) == text


@given(st.binary(min_size=1, max_size=4).filter(lambda p: p.strip(b"\xff")), st.binary(max_size=3))
def test_prefix_end_bounds_exactly_the_prefix(prefix: bytes, key: bytes) -> None:
    end = prefix_end(prefix)
    assert prefix <= prefix + key < end
    assert (prefix <= key < end) == key.startswith(prefix)


def test_etcd_config_does_not_show_its_password() -> None:
    assert "hunter2" not in repr(EtcdConfig(("a:1",), user="u", password="hunter2"))


def test_a_first_list_is_told_whole() -> None:
    view = PrefixView()
    assert view.listed(5, [(b"a", b"1")]) == [Put(b"a", b"1"), Listed()]
    assert view.revision == 5


def test_later_lists_tell_differences_only() -> None:
    view = PrefixView()
    view.listed(5, [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")])
    events = view.listed(2, [(b"a", b"1"), (b"b", b"9"), (b"d", b"4")])
    assert events == [Deleted(b"c"), Put(b"b", b"9"), Put(b"d", b"4")]
    assert view.listed(2, view.known.items()) == []


def test_changes_that_change_nothing_are_not_told() -> None:
    view = PrefixView()
    view.listed(5, [(b"a", b"1")])
    assert view.changed(b"a", b"1", 6) == []
    assert view.changed(b"x", None, 7) == []
    assert view.changed(b"a", None, 8) == [Deleted(b"a")]
    assert view.revision == 8
