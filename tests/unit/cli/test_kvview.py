"""What people read of a daemon: sizes, spans, tables; durations and hashes that they type."""

import io

import pytest
from rich.console import Console, RenderableType

from services.cli import kv, kvview
from services.cli.adapters.kvbm import (
    Cleared,
    Explanation,
    GateRow,
    NodeStats,
    PeerRow,
    Scrubbed,
    TierRow,
    TierUse,
    Verdict,
)
from services.cli.errors import UsageError


def shown(view: RenderableType) -> str:
    file = io.StringIO()
    Console(file=file, width=200).print(view)
    return file.getvalue()


def test_sizes_and_spans_in_words() -> None:
    assert [kvview.size(n) for n in (0, 900, 1536, 150 << 20, 3 << 29)] == [
        "0 B", "900 B", "1.5 KiB", "150 MiB", "1.5 GiB",
    ]  # fmt: skip
    assert [kvview.span(s) for s in (0, 0.0021, 0.49, 40, 3600, 90000, 200000)] == [
        "0", "2.1 ms", "490 ms", "40 s", "60 min", "25 h", "2 d",
    ]  # fmt: skip


def test_tiers_say_how_full_and_how_well() -> None:
    text = shown(
        kvview.tier_table(
            [
                TierRow("g2", 5, 512 << 20, 1 << 30, "mmap(locked)", "ok", 0, "/dev/shm/x"),
                TierRow("g3", 9, 1 << 30, 4 << 30, "plain", "degraded: full", 2, "/disk"),
                TierRow("g4", 0, 0, 0, "nixl-obj", "ok", 0, "s3://b"),
            ]
        )
    )
    for word in ("512 MiB of 1.0 GiB", "50%", "degraded: full, 2 quarantined", "no cap", "s3://b"):
        assert word in text


def test_explanations_join_neighbours_that_are_alike() -> None:
    ready = Verdict(0, ("g2", "g3"), True, "ready", 0, 1, 3)
    blocks = (
        ready,
        Verdict(1, ("g2", "g3"), True, "ready", 0, 1, 4),
        Verdict(2, ("g3",), False, "slower-than-recompute", 0, 0, 0),
        Verdict(3, (), False, "missing", 0, 0, 0),
    )
    gate = (GateRow("g3", 0.002, 0.05, 12, True, 0.052),)
    text = shown(
        kvview.explanation_view(
            Explanation(blocks, gate, 0.008, "slower-than-recompute"), [bytes(32)] * 4, None
        )
    )
    assert "0-1" in text and "G2 G3" in text
    assert "slower-than-recompute" in text and "missing" in text
    assert "12 loads" in text and "refused" in text and "8 ms" in text


def test_blocks_of_other_nodes_are_named_with_their_node() -> None:
    blocks = (
        Verdict(0, ("g2",), True, "ready", 0, 0, 1),
        Verdict(1, (), True, "fetch", 0, 0, 0, "node-a"),
        Verdict(2, (), True, "fetch", 0, 0, 0, "node-a"),
        Verdict(3, (), True, "fetch", 0, 0, 0, "node-b"),
    )
    gate = (GateRow("peer node-a", 0.002, 0.05, 12, True, 0.052),)
    text = shown(
        kvview.explanation_view(Explanation(blocks, gate, 0.008, ""), [bytes(32)] * 4, None)
    )
    assert "1-2" in text and "at node-a" in text and "at node-b" in text
    assert "peer node-a" in text and "refused" in text
    stats = NodeStats(
        "n0", 1, (), (), (), {}, 0, "ok: nixl-ucx",
        (PeerRow("node-a", "10.0.0.2:8300", "avoided: timeout: no end", 7, 1),),
    )  # fmt: skip
    text = shown(kvview.stats_view(stats))
    assert "blocks of other nodes: ok: nixl-ucx" in text
    assert "10.0.0.2:8300" in text and "avoided: timeout" in text and "7" in text


def test_clearing_and_scrubbing_in_words() -> None:
    cleared = Cleared((TierUse("g2", 3, 3 << 20), TierUse("g3", 0, 0)), 1)
    assert "would be forgotten: G2 3 (3.0 MiB)" in shown(kvview.cleared_view(cleared, done=False))
    assert "1 of them are being read" in shown(kvview.cleared_view(cleared, done=True))
    assert "none" in shown(kvview.cleared_view(Cleared((), 0), done=False))
    assert "2 were bad" in shown(kvview.scrubbed_view(Scrubbed(9, 9, 2, True)))
    assert "ended early" in shown(kvview.scrubbed_view(Scrubbed(3, 9, 0, False)))


def test_a_scrub_has_a_bar_on_a_terminal() -> None:
    file = io.StringIO()
    with kvview.scrub_progress(Console(file=file, force_terminal=True, width=100)) as show:
        show(Scrubbed(5, 10, 1, False))
    assert "5/10" in file.getvalue()
    with kvview.scrub_progress(Console(file=io.StringIO())) as show:
        show(Scrubbed(5, 10, 1, False))


def test_durations_and_hashes_that_people_type() -> None:
    assert [kv.parse_duration(t) for t in ("90", "90s", "1.5m", "2h", "7d")] == [
        90.0, 90.0, 90.0, 7200.0, 604800.0,
    ]  # fmt: skip
    for wrong in ("", "0", "-1s", "soon", "3w"):
        with pytest.raises(UsageError, match="duration"):
            kv.parse_duration(wrong)
    assert kv.parse_key("AB" * 32) == b"\xab" * 32
    with pytest.raises(UsageError, match="64 hex digits"):
        kv.parse_key("ab")
