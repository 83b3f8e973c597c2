"""What people see of a node's block daemon: tables, bars, words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from services.cli.adapters.kvbm import (
        BlockList,
        Cleared,
        Explanation,
        NodeStats,
        Scrubbed,
        TierRow,
        TierUse,
        Verdict,
    )
    from services.cli.adapters.prompt import HashedPrompt

_STATE_STYLES = {"ok": "green", "off": "dim"}
_BAR = 20


def size(count: int) -> str:
    """Bytes in words: "1.5 GiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def span(seconds: float) -> str:
    """A time in words: "2.1 ms", "40 s", "3 h"."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds else "0"
    for limit, unit, length in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def _table(*columns: str, right: str = "") -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right.split(",") else "left")
    return table


def _bar(share: float | None) -> Text:
    if share is None:
        return Text("no cap", style="dim")
    full = min(_BAR, round(share * _BAR))
    style = "yellow" if share > 0.95 else "cyan"
    return Text.assemble(("━" * full, style), ("━" * (_BAR - full), "dim"), f" {share:4.0%}")


def tier_table(tiers: Sequence[TierRow]) -> Table:
    """Tiers of a daemon: how full, how bytes move, how it does."""
    table = _table("tier", "used", "", "blocks", "state", "by", "at", right="blocks,used")
    for tier in tiers:
        cap = f" of {size(tier.capacity_bytes)}" if tier.capacity_bytes else ""
        state = Text(tier.state, style=_STATE_STYLES.get(tier.state.split(":")[0], "yellow"))
        if tier.quarantined:
            state.append(f", {tier.quarantined} quarantined", style="yellow")
        table.add_row(
            tier.tier.upper(),
            f"{size(tier.used_bytes)}{cap}",
            _bar(tier.share),
            f"{tier.blocks}",
            state,
            tier.backend,
            Text(tier.place, style="dim", overflow="fold"),
        )
    return table


def uses(tiers: Sequence[TierUse]) -> str:
    """Blocks by tier in one line."""
    words = [f"{t.tier.upper()} {t.blocks} ({size(t.bytes)})" for t in tiers if t.blocks]
    return ", ".join(words) or "none"


def stats_view(found: NodeStats) -> RenderableType:
    """All figures of a daemon."""
    parts: list[RenderableType] = [
        Text(f"{found.node}, {found.adopted_blocks} blocks adopted at its start", style="bold"),
        Text(),
        tier_table(found.tiers),
    ]
    if found.namespaces:
        spaces = _table(
            "namespace", "model", "block", "blocks", "workers", "leases", "pins", "granted",
            right="leases,pins,granted",
        )  # fmt: skip
        for space in found.namespaces:
            spaces.add_row(
                space.namespace[:12],
                space.model,
                f"{space.block_size_tokens} tokens, {size(space.block_bytes)}",
                uses(space.tiers),
                ", ".join(space.workers) or "-",
                str(space.leases),
                str(space.pins),
                str(space.granted),
            )
        parts += [Text(), spaces]
    if found.peers_state:
        parts += [Text(), Text(f"blocks of other nodes: {found.peers_state}")]
    if found.peers:
        peers = _table("peer", "at", "state", "fetched", "failed", right="fetched,failed")
        for peer in found.peers:
            style = "yellow" if peer.state.startswith("avoided") else "green"
            state = Text(peer.state, style=style, overflow="fold")
            counts = str(peer.fetched_blocks), str(peer.failures or "")
            peers.add_row(peer.node, peer.address, state, *counts)
        parts.append(peers)
    charged = [t for t in found.tenants if any(use.blocks for use in t.tiers)]
    if charged:
        tenants = _table("tenant", "blocks")
        for tenant in charged:
            tenants.add_row(tenant.tenant or "-", uses(tenant.tiers))
        parts += [Text(), tenants]
    if found.counters:
        counters = _table("counter", "value", right="value")
        for name, value in sorted(found.counters.items()):
            if value:
                counters.add_row(name, f"{value:g}" if value % 1 else f"{value:.0f}")
        parts += [Text(), counters]
    return Group(*parts)


def blocks_view(found: BlockList, *, full: bool) -> RenderableType:
    """Blocks, one a row."""
    table = _table(
        "block", "no.", "tiers", "hits", "idle", "age", "leases", "pins", "tenant", "namespace",
        right="no.,hits,idle,age,leases,pins",
    )  # fmt: skip
    for block in found.blocks:
        table.add_row(
            Text(block.key if full else block.key[:16], no_wrap=True),
            str(block.position),
            " ".join(t.upper() for t in block.tiers),
            str(block.hits),
            span(block.idle_s),
            span(block.age_s),
            str(block.leases or ""),
            str(block.pins or ""),
            block.tenant,
            block.namespace if full else block.namespace[:12],
        )
    return Group(table, Text(f"{len(found.blocks)} of {found.total} blocks", style="dim"))


def explanation_view(
    answer: Explanation, hashes: Sequence[bytes], prompt: HashedPrompt | None
) -> RenderableType:
    """A verdict for each block, runs of like ones in one row, and the gate's figures."""
    parts: list[RenderableType] = []
    if prompt is not None:
        rest = prompt.tokens - len(hashes) * prompt.block_size
        parts.append(
            Text(
                f"{prompt.model}: {prompt.tokens} tokens, {len(hashes)} full blocks of "
                f"{prompt.block_size}; the last {rest} tokens are always computed"
            )
        )
        own = ", ".join(f"{id} {count}" for id, count in prompt.own_blocks.items())
        parts += [Text(f"leading blocks in the engines' own caches (G1): {own}"), Text()]
    blocks = _table(
        "blocks", "tiers", "load", "why", "hits", "leases", "pins", right="hits,leases,pins"
    )
    for run in _runs(answer.blocks):
        first, last = run[0], run[-1]
        blocks.add_row(
            f"{first.position}" if first is last else f"{first.position}-{last.position}",
            " ".join(t.upper() for t in first.tiers) or (f"at {first.peer}" if first.peer else "-"),
            Text("yes", style="green") if first.load else Text("no", style="yellow"),
            first.reason,
            str(sum(v.hits for v in run)),
            str(sum(v.leases for v in run) or ""),
            str(sum(v.pins for v in run) or ""),
        )
    parts.append(blocks)
    parts.append(Text(f"\na block takes {span(answer.recompute_block_s)} to compute", style="bold"))
    gate = _table(
        "from", "latency", "a block", "measured", "predicted", "",
        right="latency,a block,measured,predicted",
    )  # fmt: skip
    for row in answer.gate:
        gate.add_row(
            row.tier if "peer" in row.tier else row.tier.upper(),
            span(row.latency_s),
            span(row.block_s),
            f"{row.samples} loads" if row.samples else "defaults",
            span(row.predicted_s),
            Text("refused: slower than computing", style="yellow") if row.refused else "",
        )
    parts.append(gate)
    if answer.reason:
        parts.append(Text(f"no more is taken because: {answer.reason}", style="dim"))
    return Group(*parts)


def _runs(verdicts: Sequence[Verdict]) -> list[list[Verdict]]:
    """Neighbours that are alike in place and verdict, together."""
    runs: list[list[Verdict]] = []
    for verdict in verdicts:
        if runs and _alike(runs[-1][0], verdict):
            runs[-1].append(verdict)
        else:
            runs.append([verdict])
    return runs


def _alike(a: Verdict, b: Verdict) -> bool:
    return (a.tiers, a.load, a.reason, a.peer) == (b.tiers, b.load, b.reason, b.peer)


def cleared_view(found: Cleared, *, done: bool) -> RenderableType:
    """What is, or would be, forgotten."""
    verb = "forgotten" if done else "would be forgotten"
    text = Text(f"{verb}: {uses(found.tiers)}")
    if found.leased_blocks:
        text.append(
            f"\n{found.leased_blocks} of them are being read and go when their readers are done; "
            "no new request finds them"
        )
    return text


@contextmanager
def scrub_progress(console: Console) -> Iterator[Callable[[Scrubbed], None]]:
    """A bar that follows a scrub; nothing off a terminal."""
    if not console.is_terminal:
        yield lambda now: None
        return
    progress = Progress(
        TextColumn("verifying"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[bad]}"),
        console=console,
        transient=True,
    )
    task = progress.add_task("", total=None, bad="")
    with progress:
        yield lambda now: progress.update(
            task,
            total=now.total,
            completed=now.scanned,
            bad=f"[red]{now.corrupt} bad" if now.corrupt else "",
        )


def scrubbed_view(found: Scrubbed) -> RenderableType:
    """How a scrub ended."""
    text = Text(f"{found.scanned} blocks verified, ")
    if found.corrupt:
        text.append(f"{found.corrupt} were bad and will not be served", style="bold red")
    else:
        text.append("all good", style="green")
    if not found.done:
        text.append("; it ended early", style="yellow")
    return text
