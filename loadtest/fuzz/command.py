"""Arguments, the runs, and their table."""

from __future__ import annotations

import argparse
import sys

from loadtest.fuzz.kinds import KINDS
from loadtest.fuzz.supervise import SHARES, Result, fuzz
from loadtest.markdown import markdown

_TOLD = 20


def arguments(argv: list[str]) -> argparse.Namespace:
    known = "\n".join(f"  {name:12} {kind.about}" for name, kind in KINDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m loadtest fuzz",
        description="Garbage of every kind at length, each kind in a process of its own that is watched: crashes "
        "(an exception that nothing expected, the log's included), hangs, memory, and good requests at the end.",
        epilog=f"kinds:\n{known}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--inputs", type=int, default=100_000, help="of each kind (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--seed", type=int, default=0, help="the same inputs for the same seed (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="begin with input N, to see one again")
    given = parser.parse_args(argv)
    if given.inputs < 1 or given.first < 0:
        parser.error("--inputs must be above 0, and --first not below")
    return given


def main(argv: list[str]) -> int:
    given = arguments(argv)
    results = []
    for kind in given.only:
        print(f"{kind}: {given.inputs} inputs", file=sys.stderr, flush=True)
        results.append(fuzz(kind, given.inputs, given.seed, given.first))
        for line in results[-1].told[:_TOLD]:
            print(line, file=sys.stderr, flush=True)
    print(render(results))
    return 0 if all(result.sound for result in results) else 1


def render(results: list[Result]) -> str:
    shares = " / ".join(f"{share:.0%}" for share in SHARES)
    head = ["kind", "inputs", "refused", "accepted", "crashes", "hangs", "slowest ms", f"memory at {shares}", "peak"]
    head += ["grown by", "s"]
    rows = [
        [
            result.kind,
            str(result.inputs),
            str(result.refused),
            str(result.accepted),
            str(result.crashes),
            str(result.hangs),
            f"{result.slowest_ms:.0f} (#{result.slowest_at})",
            " / ".join(f"{result.resident.get(share, 0) / 2**20:.0f}" for share in SHARES) + " MiB",
            f"{result.peak_bytes / 2**20:.0f} MiB",
            f"{result.grown_bytes / 2**20:.1f} MiB",
            f"{result.seconds:.0f}",
        ]
        for result in results
    ]
    return markdown(head, rows)
