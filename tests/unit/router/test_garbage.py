"""Large things that live long are taken out of the collector's way."""

import gc
from collections.abc import Iterator

import pytest

from services.router.adapters.garbage import Collections, watched_collections


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_nothing_is_frozen_while_collections_are_short() -> None:
    before = gc.get_freeze_count()
    with watched_collections() as collections:
        gc.collect(0)
        assert not collections.tend()
    assert gc.get_freeze_count() == before


def test_what_took_long_is_frozen_once() -> None:
    large = {i: [i] for i in range(1000)}
    collections = Collections(long_s=0.0)
    gc.callbacks.append(collections.watch)
    try:
        gc.collect()
        assert collections.tend()
        assert gc.get_freeze_count() > len(large)
        assert not collections.tend()
    finally:
        gc.callbacks.remove(collections.watch)


def test_watching_ends() -> None:
    before = list(gc.callbacks)
    with watched_collections():
        assert len(gc.callbacks) == len(before) + 1
    assert gc.callbacks == before
