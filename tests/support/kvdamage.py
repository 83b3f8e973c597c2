"""Stored blocks of a running cluster, seen and damaged from outside: arena, files, objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.arena import (
    HEADER_BYTES,
    Arena,
    CorruptHeader,
    Geometry,
    SlotHeader,
    SlotState,
    checksum,
)
from services.common.blocks import block_hashes
from services.kvbm.tiers.runs import head_bytes, object_bytes, unpack_head
from tests.support.corrupt import Record


class ArenaRecords:
    """Blocks in an arena, as a process beside daemon and engines sees them."""

    def __init__(self, path: Path) -> None:
        self.arena = Arena.open(path)
        self.namespace = self.arena.namespace

    def sealed(self) -> dict[bytes, int]:
        """Slots of whole blocks, by key."""
        return {
            header.key: slot
            for slot, header in enumerate(self.arena.headers())
            if isinstance(header, SlotHeader) and header.state is SlotState.SEALED
        }

    def read(self, slot: int) -> Record:
        """Header and payload."""
        at = self.arena._header_at(slot)
        return bytes(self.arena._view[at : at + HEADER_BYTES]), bytes(self.arena.payload(slot))

    def write(self, slot: int, header: bytes, payload: bytes) -> None:
        """Overwrites both, without a word to anybody."""
        at = self.arena._header_at(slot)
        self.arena._view[at : at + HEADER_BYTES] = header
        self.arena.payload(slot)[:] = payload

    def bad(self) -> list[int]:
        """Slots that claim to hold a block, and don't."""
        found = []
        for slot, header in enumerate(self.arena.headers()):
            if isinstance(header, CorruptHeader) or (
                header.state is SlotState.SEALED and self.arena.checksums(slot) != header.checksums
            ):
                found.append(slot)
        return found

    def owners(self) -> set[int]:
        """Owners of slots that are being filled."""
        return {
            header.owner
            for header in self.arena.headers()
            if isinstance(header, SlotHeader) and header.state is SlotState.FILLING
        }

    def close(self) -> None:
        self.arena.close()


@contextmanager
def arena_records(path: Path) -> Iterator[ArenaRecords]:
    """Maps an arena while the context lasts."""
    records = ArenaRecords(path)
    try:
        yield records
    finally:
        records.close()


class DiskRecords:
    """Blocks in a namespace's files on disk."""

    def __init__(self, folder: Path, namespace: bytes, geometry: Geometry) -> None:
        self.folder = folder / namespace.hex()
        self.namespace = namespace
        self.geometry = geometry
        self._places: list[tuple[Path, Path, int]] = []
        for headers in sorted(self.folder.glob("segment-*.headers")):
            count = headers.stat().st_size // HEADER_BYTES
            data = headers.with_suffix(".data")
            self._places += [(headers, data, number) for number in range(count)]

    def sealed(self) -> dict[bytes, int]:
        """Slots of whole blocks, by key."""
        found = {}
        for slot, (headers, _, number) in enumerate(self._places):
            with headers.open("rb") as file:
                file.seek(number * HEADER_BYTES)
                raw = file.read(HEADER_BYTES)
            try:
                header = SlotHeader.unpack(raw, self.namespace)
            except CorruptHeader:
                continue
            if header.state is SlotState.SEALED:
                found[header.key] = slot
        return found

    def read(self, slot: int) -> Record:
        """Header and payload."""
        headers, data, number = self._places[slot]
        with headers.open("rb") as h, data.open("rb") as d:
            h.seek(number * HEADER_BYTES)
            d.seek(number * self.geometry.stride)
            return h.read(HEADER_BYTES), d.read(self.geometry.payload_bytes)

    def write(self, slot: int, header: bytes, payload: bytes) -> None:
        """Overwrites both; the disk has it when this returns."""
        headers, data, number = self._places[slot]
        for path, at, raw in (
            (headers, number * HEADER_BYTES, header),
            (data, number * self.geometry.stride, payload),
        ):
            with path.open("r+b") as file:
                file.seek(at)
                file.write(raw)
                file.flush()
                os.fdatasync(file.fileno())

    def cut(self, slot: int) -> None:
        """Ends the payloads' file in the middle of a slot."""
        _, data, number = self._places[slot]
        os.truncate(data, number * self.geometry.stride + self.geometry.payload_bytes // 2)


def objects(folder: Path, namespace: bytes) -> dict[bytes, Path]:
    """Objects of a namespace in a shared folder, by the hash that names them."""
    return {
        bytes.fromhex(path.name): path
        for path in (folder / namespace.hex()).iterdir()
        if len(path.name) == 64
    }


def object_is_sound(path: Path, namespace: bytes, blocks: int, geometry: Geometry) -> bool:
    """Whether an object holds the run that its name says, whole."""
    raw = path.read_bytes()
    if len(raw) != object_bytes(blocks, geometry):
        return False
    try:
        headers = unpack_head(raw, namespace, blocks, geometry)
    except ValueError:
        return False
    start = head_bytes(blocks)
    for number, header in enumerate(headers):
        if isinstance(header, CorruptHeader):
            return False
        at = start + number * geometry.stride
        if header.checksums != (checksum(raw[at : at + geometry.payload_bytes]),):
            return False
    last = headers[-1]
    return isinstance(last, SlotHeader) and last.key.hex() == path.name


def earlier_record(good: Record, namespace: bytes, random: Any) -> Record:
    """A sound record of another block, as it may have lain in the same place before."""
    header = SlotHeader.unpack(good[0], namespace)
    payload = random.randbytes(len(good[1]))
    older = replace(
        header,
        key=random.randbytes(32),
        generation=max(header.generation - 1, 0),
        checksums=(checksum(payload),),
    )
    return older.pack(namespace), payload


Damaging = Callable[[bytes], bytes]


def object_damages(blocks: int, geometry: Geometry, random: Any) -> Mapping[str, Damaging]:
    """Ways to damage one object, by name."""
    start, whole = head_bytes(blocks), object_bytes(blocks, geometry)
    used = 64 + blocks * HEADER_BYTES

    def flip(raw: bytes, low: int, high: int) -> bytes:
        bad = bytearray(raw)
        bad[random.randrange(low, high)] ^= 1 << random.randrange(8)
        return bytes(bad)

    def zero(raw: bytes) -> bytes:
        at = start + random.randrange(blocks) * geometry.stride
        return raw[:at] + bytes(geometry.payload_bytes) + raw[at + geometry.payload_bytes :]

    def foreign(raw: bytes) -> bytes:
        return raw[:8] + random.randbytes(32) + raw[40:]

    def crossed(raw: bytes) -> bytes:
        """Two payloads of the run have changed places."""
        one, other = random.sample(range(blocks), 2)
        a, b = start + one * geometry.stride, start + other * geometry.stride
        size = geometry.payload_bytes
        bad = bytearray(raw)
        bad[a : a + size], bad[b : b + size] = raw[b : b + size], raw[a : a + size]
        return bytes(bad)

    return {
        "payload": lambda raw: flip(raw, start, whole),
        "head": lambda raw: flip(raw, 0, used),
        "zeros": zero,
        "cut": lambda raw: raw[: random.randrange(whole)],
        "foreign": foreign,
        "crossed": crossed,
    }


def keys_of(prompts: Iterable[Any], block: int) -> list[bytes]:
    """Keys of all full blocks of some prompts."""
    return [key for prompt in prompts for key in block_hashes(prompt, block)]
