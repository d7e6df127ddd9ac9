"""Arguments, the run, and its report."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from loadtest.machine import describe
from loadtest.quality.measure import readings, texts
from loadtest.quality.summary import Quality, quality, render, verdict
from pdbus.errors import PdbusError
from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.default import default_checkpoint

TEXTS = Path(__file__).parents[2] / "tests" / "data" / "quality"
"""English that was written for this purpose, and chapters of Carroll (1865) and Darwin (1859)."""
PRECISIONS = ("fp32", "int8", "int4")
KV_DTYPES = ("fp32", "fp16", "int8")


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest quality",
        description="Perplexity, and the share of greedy tokens equal to fp32, of each precision of weights and KV. "
        "Exit code 1 where the default precision is worse than it may be.",
    )
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--kv-dtypes", nargs="+", choices=KV_DTYPES, default=list(KV_DTYPES))
    parser.add_argument("--texts", nargs="+", type=Path, metavar="FILE", help="(default: those of tests/data/quality)")
    parser.add_argument("--window", type=int, default=1536, help="tokens that are read as one (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="(default: %(default)s)")
    parser.add_argument("--model", type=Path, help="folder or GGUF file (default: the stack's default model)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args(argv)
    if given.window < 2 or given.threads < 1:
        parser.error("a window has at least 2 tokens, and threads must be positive")
    return given


def main(argv: list[str]) -> int:
    given = arguments(argv)
    checkpoint = open_checkpoint(given.model or default_checkpoint())
    windows = texts(checkpoint, given.texts or sorted(TEXTS.glob("*.txt")), given.window)
    tokens = sum(map(len, windows))
    print(f"{tokens} tokens in {len(windows)} windows", file=sys.stderr, flush=True)
    # fp32 comes first: what the others are held against.
    precisions, kv_dtypes = (list(dict.fromkeys(("fp32", *chosen))) for chosen in (given.precisions, given.kv_dtypes))
    rows: list[Quality] = []
    reference = None
    try:
        for reading in readings(checkpoint, windows, precisions, kv_dtypes, given.threads):
            reference = reference or reading
            rows.append(quality(reading, reference))
            print(rows[-1], file=sys.stderr, flush=True)
    except PdbusError as error:
        print(error.message, file=sys.stderr)
        return 1
    said, keeps = verdict(rows)
    print(f"{render(rows)}\n\n{tokens} tokens of English; {said}")
    if given.json:
        known = {"machine": describe(), "tokens": tokens, "rows": [asdict(row) for row in rows]}
        given.json.write_text(json.dumps(known, indent=2) + "\n")
    return 0 if keeps else 1
