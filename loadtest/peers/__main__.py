"""One engine in a process of its own: `python -m loadtest.peers prepare|serve NAME …`.

Requests and replies are lines of JSON on stdin and stdout; what the engine itself prints goes to stderr. It ends with
its stdin, so that it never outlives the comparison.

    prepare   ->  {"path": …}                                            converted, or there already
    serve     ->  {"weights": …}, then for each {"prompts": …, "new_tokens": …} a timing and the peak memory so far
    either    ->  {"unusable": reason}
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from loadtest.memory import peak_bytes
from loadtest.peers.base import Peer, Sources, Unusable
from loadtest.peers.catalog import CATALOG


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.peers", description=__doc__)
    parser.add_argument("what", choices=["prepare", "serve"])
    parser.add_argument("name", choices=sorted(CATALOG))
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--path", type=Path, help="what `prepare` told")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(argv)
    sources = Sources(given.gguf, given.folder, given.cache)
    replies = _own_stdout()
    try:
        peer = _peer(given.name)
        if given.what == "prepare":
            _tell(replies, {"path": str(peer.prepare(sources))})
        else:
            _serve(peer, given.path, sources, given.threads, replies)
    except Unusable as error:
        _tell(replies, {"unusable": str(error)})
    except Exception as error:  # whatever an engine raises is a reason to leave it out, never to end the comparison
        _tell(replies, {"unusable": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
    return 0


def _peer(name: str) -> Peer:
    entry = CATALOG[name]
    try:
        module = importlib.import_module(f"loadtest.peers.{entry.module}")
    except ImportError as error:
        raise Unusable(f"{entry.package} is not installed ({error})") from None
    peer: Peer = getattr(module, entry.factory)(*entry.arguments)
    return peer


def _serve(peer: Peer, path: Path, sources: Sources, threads: int, replies: IO[str]) -> None:
    engine = peer.open(path, sources, threads)
    _tell(replies, {"weights": asdict(engine.weights), "peak_bytes": peak_bytes()})
    for line in sys.stdin:
        asked = json.loads(line)
        timing = engine.generate(asked["prompts"], asked["new_tokens"])
        _tell(replies, asdict(timing) | {"peak_bytes": peak_bytes()})


def _own_stdout() -> IO[str]:
    """The real stdout, for replies only; everything else that writes to file descriptor 1 ends up in stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _tell(replies: IO[str], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    raise SystemExit(main())
