"""Small things the supervisor stands on: backoff, ready files, tails of logs."""

import json
from pathlib import Path

from services.cli.up.spec import Backoff, Ready, exit_text, read_ready, tail


def test_backoff_doubles_up_to_its_limit() -> None:
    backoff = Backoff(first_s=0.5, longest_s=3.0)
    assert [backoff.pause(n) for n in (1, 2, 3, 4, 500)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_ready_file_counts_for_its_own_process(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert read_ready(path, 7) is None
    path.write_text('{"pid": ')
    assert read_ready(path, 7) is None
    said = {"pid": 7, "address": "h:1", "events_address": "tcp://h:2", "metrics_address": "h:3"}
    path.write_text(json.dumps({**said, "incarnation": 2**63 + 1}))
    assert read_ready(path, 7) == Ready("h:1", "tcp://h:2", "h:3", 2**63 + 1)
    assert read_ready(path, 8) is None
    several = [{"id": "w.0", "incarnation": 5}, {"id": "w.1", "incarnation": 6}, {}]
    path.write_text(json.dumps({**said, "instances": several}))
    ready = read_ready(path, 7)
    assert ready is not None and ready.instances == (("w.0", 5), ("w.1", 6))


def test_tail_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail(path) == ()
    path.write_bytes(b"x" * 200_000 + b"\n" + b"\n".join(b"%d" % i for i in range(100)) + b"\xff\n")
    assert tail(path, 3) == ("97", "98", "99\N{REPLACEMENT CHARACTER}")


def test_exits_in_words() -> None:
    assert exit_text(2) == "exit code 2"
    assert exit_text(-9) == "killed by signal 9"
