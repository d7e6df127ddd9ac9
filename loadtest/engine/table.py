"""From rows to the comparison: medians, the best peer of each column, ratios, shares of the bandwidth. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from loadtest.engine.columns import Column, bandwidth_share
from loadtest.engine.rounds import Row
from loadtest.markdown import markdown

RSS = "peak RSS MB"
REFERENCE = "transformers fp32"
"""What the answers of all others are held against."""


@dataclass(frozen=True)
class Comparison:
    """`ours`: names of the rows that are compared; all others are peers."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    ours: frozenset[str]
    bytes_per_s: float

    @classmethod
    def of(
        cls, columns: Sequence[Column], rows: Sequence[Row], ours: Collection[str], bytes_per_s: float
    ) -> Comparison:
        return cls(tuple(columns), tuple(rows), frozenset(ours), bytes_per_s)

    def medians(self) -> dict[str, dict[str, float]]:
        """Row -> column -> median of its rounds, and its peak memory; rows without a figure are left out."""
        found = {row.name: {name: median(values) for name, values in row.figures.items()} for row in self.rows}
        for row in self.rows:
            if found[row.name] and row.peak_bytes:
                found[row.name][RSS] = row.peak_bytes / 1e6
        return {name: figures for name, figures in found.items() if figures}

    def best(self) -> dict[str, tuple[str, float]]:
        """Column -> (peer, figure): the largest rate, the smallest memory."""
        peers = {name: figures for name, figures in self.medians().items() if name not in self.ours}
        best = {}
        for column in (*(column.name for column in self.columns), RSS):
            known = [(name, figures[column]) for name, figures in peers.items() if column in figures]
            if known:
                best[column] = (min if column == RSS else max)(known, key=lambda pair: pair[1])
        return best

    def ratios(self, peer: str = "") -> dict[str, dict[str, float]]:
        """Our rows -> column -> ratio to the best peer of the column, or to one peer."""
        medians = self.medians()
        against = {name: figure for name, (_, figure) in self.best().items()} if not peer else medians.get(peer, {})
        return {
            name: {column: figure / against[column] for column, figure in figures.items() if against.get(column)}
            for name, figures in medians.items()
            if name in self.ours
        }

    def shares(self) -> dict[str, dict[str, float]]:
        """Row -> decode column -> share of the machine's memory bandwidth."""
        medians, shares = self.medians(), {}
        for row in self.rows:
            if row.weights and row.name in medians:
                shares[row.name] = {
                    column.name: bandwidth_share(column, medians[row.name][column.name], row.weights, self.bytes_per_s)
                    for column in self.columns
                    if column.decode and column.name in medians[row.name]
                }
        return shares

    def agreement(self, reference: str) -> dict[str, float]:
        """Row -> share of its tokens until the first that differs from the reference's, over all answers of both.

        After a difference greedy answers go their own ways: the share says how long they went together."""
        rows = {row.name: row for row in self.rows}
        known = rows[reference].ids if reference in rows else {}
        found = {}
        for row in self.rows:
            pairs = [
                pair
                for task in row.ids.keys() & known.keys()
                for pair in zip(row.ids[task], known[task], strict=False)
                if all(pair)
            ]
            if pairs and row.name != reference:
                found[row.name] = sum(map(_together, pairs)) / sum(len(theirs) for _, theirs in pairs)
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "medians": self.medians(),
            "best_peer": self.best(),
            "ratio_to_best": self.ratios(),
            "bandwidth_bytes_per_s": self.bytes_per_s,
            "bandwidth_share": self.shares(),
            "agreement": {row.name: self.agreement(row.name) for row in self.rows if "fp32" in row.name},
            "rows": [asdict(row) for row in self.rows],
        }


def render(comparison: Comparison, others: Sequence[str] = ()) -> str:
    """Markdown: the figures, then the ratios to the best peer and to each of `others`, then the bandwidth shares."""
    names = [column.name for column in comparison.columns]
    best = {column: name for column, (name, _) in comparison.best().items()}
    rows = [
        [name, *(_bold(f"{figures[c]:.0f}", best.get(c) == name) if c in figures else "–" for c in (*names, RSS))]
        for name, figures in comparison.medians().items()
    ]
    text = markdown(["engine", *names, RSS], rows)
    for peer in ("", *others):
        if rows := [
            [f"{name} ÷ {peer or 'best peer'}", *(f"{ratios[c]:.2f}" if c in ratios else "–" for c in (*names, RSS))]
            for name, ratios in comparison.ratios(peer).items()
            if ratios
        ]:
            text += "\n\n" + markdown(["ratio", *names, RSS], rows)
    decode = [column.name for column in comparison.columns if column.decode]
    shares = [[name, *(f"{s[c]:.0%}" if c in s else "–" for c in decode)] for name, s in comparison.shares().items()]
    if decode and shares:
        head = [f"share of {comparison.bytes_per_s / 1e9:.1f} GB/s", *decode]
        text += "\n\n" + markdown(head, shares)
    for reference in (row.name for row in comparison.rows if row.name == REFERENCE):
        agreed = ", ".join(f"{name} {share:.0%}" for name, share in comparison.agreement(reference).items())
        text += f"\n\ntokens until the first that differs from {reference}: {agreed}"
    loads = [load for row in comparison.rows for load in row.load_averages]
    if loads:
        text += f"\n\nload average when a turn began: {min(loads):.1f} to {max(loads):.1f}"
    left_out = [f"left out: {row.name}: {row.unusable}" for row in comparison.rows if row.unusable]
    return "\n\n".join([text, *left_out])


def _together(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
    return next((at for at, (one, other) in enumerate(zip(*pair, strict=False)) if one != other), min(map(len, pair)))


def _bold(text: str, really: bool) -> str:
    return f"**{text}**" if really else text
