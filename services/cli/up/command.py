"""`forebay up` itself: foreground or background, a first question, the closing words."""

import asyncio
import json
from pathlib import Path

from rich.text import Text

from services.cli import config, console
from services.cli.adapters.http import open_chat
from services.cli.errors import StateError
from services.cli.up import state
from services.cli.up.daemon import start_daemon
from services.cli.up.options import UpOptions
from services.cli.up.run import Cluster, StopRequests, run_cluster
from services.cli.up.state import ClusterState
from services.cli.up.view import Reporter, make_reporter

_ANSWER_TOKENS = 64


def run_up(options: UpOptions, *, detach: bool, question: str) -> None:
    """Starts the cluster, asks `question` if there is one, and stays (or returns, detached).

    Raises CliError when it does not start or the question fails.
    """
    out = console.stdout()
    reporter = make_reporter(out)
    if not detach:
        asyncio.run(_foreground(options, reporter, question))
        return
    try:
        start_daemon(options, reporter)
    finally:
        reporter.close()
    now = state.load(Path(options.state_dir))
    if now is None:
        raise StateError(f"{state.cluster_file(Path(options.state_dir))} vanished")
    if question:
        asyncio.run(_ask(now, question, reporter))
    out.print(closing_words(now, options, detached=True), soft_wrap=True)


async def _foreground(options: UpOptions, reporter: Reporter, question: str) -> None:
    stop = StopRequests()
    stop.on_signals()

    async def serve(cluster: Cluster) -> None:
        if question:
            await _ask(cluster.state, question, reporter)
        reporter.note(closing_words(cluster.state, options, detached=False).plain)
        await stop.asked.wait()

    try:
        await run_cluster(options, reporter, stop, serve)
    finally:
        reporter.close()


async def _ask(now: ClusterState, question: str, reporter: Reporter) -> None:
    async with open_chat(now.gateway_url, api_key=config.api_key()) as chat:
        answer = await chat.ask(now.model, question, max_tokens=_ANSWER_TOKENS, temperature=0)
    reporter.note(f"> {question}")
    reporter.note(answer.text.strip())
    by = f" by {answer.worker}" if answer.worker else ""
    reporter.note(
        f"({answer.prompt_tokens} prompt tokens, {answer.cached_tokens} of them from the cache, "
        f"{answer.completion_tokens} new{by}, {answer.ttft_s:.1f} s)"
    )


def closing_words(now: ClusterState, options: UpOptions, *, detached: bool) -> Text:
    """Where it serves, how to ask it, how to stop it."""
    body = json.dumps(
        {"model": now.model, "messages": [{"role": "user", "content": "What is a forebay?"}]}
    )
    key = ' -H "Authorization: Bearer $FOREBAY_API_KEY"' if options.api_keys_file else ""
    default = options.state_dir == str(config.DEFAULT_STATE_DIR.absolute())
    where = "" if default else f" --state-dir {options.state_dir}"
    end = f"Stop it with: forebay down{where}" if detached else "Ctrl-C stops it."
    what = now.model
    if options.simulated:
        what += f" is SIMULATED by {options.workers} worker(s): its answers are no model's. It"
    return Text(
        f"\n{what} is served at {now.gateway_url}/v1\n\n"
        f"  curl {now.gateway_url}/v1/chat/completions{key} \\\n"
        f"    -H 'Content-Type: application/json' \\\n"
        f"    -d '{body}'\n\n"
        f"State: forebay status{where}    Logs: {options.state_dir}/logs    {end}"
    )
