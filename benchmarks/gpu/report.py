"""What run.sh left, as a dated page for benchmarks/reports: machine, versions, commands, figures with their ranges.

    python benchmarks/gpu/report.py out/gpu [out/second] > benchmarks/reports/2026-01-31-h100.md

Several folders are of several calls on one kind of machine; what a later one measured again takes the former's place.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ADAM = "adam, bf16 in and out"
AIM = 0.90
"""Of a copy of as many bytes: what Adam is to reach."""


def report(folders: Sequence[Path], day: str) -> str:
    """The page."""
    kernels: Row = {}
    for folder in folders:
        kernels |= read(folder / "kernels.json") or {}
    lines = [f"# {kernels.get('device', 'No figures of kernels')}, {day}", ""]
    statuses: Row = {}
    for folder in folders:
        summary = read(folder / "summary.json") or {}
        statuses |= summary.get("exit_status", {})
        if summary.get("device") is False or kernels.get("device") == "none":
            lines += ["**DRY RUN: no device was there, or it was not used. The figures mean nothing.**", ""]
    lines += how(folders, kernels, statuses)
    lines += [line for folder in folders for line in of_ladder(folder)]
    lines += of_kernels(kernels.get("rows", []))
    for title, name in (
        ("Sizes", "sizes.json"),
        ("Training", "training.json"),
        ("Comparisons", "compared.json"),
        ("How large a model can be", "largest.json"),
    ):
        rows: list[Row] = [row for folder in folders for row in read(folder / name) or []]
        last = list({row["name"]: row for row in rows}.values())
        lines += of_trainings(title, last) + of_timelines(last)
    return "\n".join(lines).rstrip() + "\n"


def read(path: Path) -> Any:
    """None where there is nothing, or half of it."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def how(folders: Sequence[Path], kernels: Row, statuses: Row) -> list[str]:
    """The machine, the versions, the commands and how the parts ended."""
    versions = {name: value for name, value in kernels.items() if isinstance(value, str) and name != "device"}
    lines = ["Versions: " + (", ".join(f"{name} {value}" for name, value in versions.items()) or "unknown") + ".", ""]
    for folder in folders:
        path = folder / "machine.txt"
        lines += [
            "```text",
            path.read_text("utf-8", "replace").rstrip() if path.is_file() else "no machine.txt",
            "```",
            "",
        ]
    said = ", ".join(f"{name} {'passed' if code == 0 else f'ended with {code}'}" for name, code in statuses.items())
    return [*lines, f"Parts: {said or 'none ended'}.", ""]


def of_ladder(folder: Path) -> list[str]:
    """Return the output of the ladder, which is a part of the log."""
    path = folder / "log.txt"
    said = path.read_text("utf-8", "replace") if path.is_file() else ""
    _, begun, rest = said.partition("== ladder\n")
    return ["## Ladder", "", "```text", rest.partition("\n== ")[0].rstrip(), "```", ""] if begun else []


def of_timelines(rows: list[Row]) -> list[str]:
    """Return a table of one step: how long the device works and waits for what, measured and planned."""
    table = []
    for row in rows:
        for which, found in (row.get("profile") or {}).items():
            idle = ", ".join(f"{cause} {s * 1e3:.1f}" for cause, s in found["idle_s"].items() if s * 1e3 >= 0.1)
            table.append((row["name"], which, f"{found['seconds'] * 1e3:.1f}", f"{found['busy_s'] * 1e3:.1f}", idle))
    head = ("one step, ms", "", "step", "device works", "device waits for")
    return [*markdown(head, table), ""] if table else []


def of_kernels(rows: list[Row]) -> list[str]:
    """Every rate, and in the first lines what Adam reached."""
    if not rows:
        return []
    lines = ["## Kernels", ""]
    adam = next((row for row in rows if row["name"] == ADAM and row.get("ratio")), None)
    ways = [row for row in rows if row["name"].startswith("adam, ") and "elements," in row["name"] and row.get("ratio")]
    if adam:
        verdict = "met" if adam["ratio"] >= AIM else "missed"
        lines += [
            f"Adam's rate over a copy's of as many bytes: {spread(adam, 'ratio')}; the aim of {AIM:.2f} is {verdict}.",
            "",
        ]
    if ways:
        best = max(ways, key=lambda row: float(row["ratio"]))
        first = ways[0]
        lines += [
            f"Best way through memory: {best['name'].removeprefix('adam, ')}, {spread(best, 'ratio')}; by itself "
            f"({first['name'].removeprefix('adam, ')}): {spread(first, 'ratio')}. The first of `TUNINGS` decides.",
            "",
        ]
    lines += ["Medians, in parentheses the least and the most.", ""]
    table = [
        (row["name"], spread(row, "ms"), f"{row['GB/s']:.1f}", spread(row, "ratio")) for row in rows if "ms" in row
    ]
    lines += [*markdown(("kernel", "ms", "GB/s", "ratio to the yardstick"), table), ""]
    return lines + [f"- FAILED: {row['name']}" for row in rows if "ms" not in row] + [""]


def of_trainings(title: str, rows: list[Row]) -> list[str]:
    """Steps and rates; the first of a group over each other, pair by pair of turns."""
    if not rows:
        return []
    table = []
    for row in rows:
        turns, ratios = row.get("turns_s") or [], row.get("first_over_this")
        table.append((
            row["name"],
            f"{row.get('parameters', 0) / 1e9:.2f}",
            spread({"s": row["step_s"], "s_range": [min(turns), max(turns)]}, "s") if turns else "",
            f"{row['tokens_per_s']:.0f}" if turns else "",
            f"{row['tflops']:.1f}" if turns else "",
            f"{ratios[1]:.2f} ({ratios[0]:.2f} to {ratios[2]:.2f})" if ratios else "",
            f"{row['reserved_peak_bytes'] / 2**30:.1f}" if row.get("reserved_peak_bytes") else "",
            row.get("failed", ""),
        ))  # fmt: skip
    head = (
        "training",
        "10^9 parameters",
        "s a step",
        "tokens/s",
        "TFLOPS (8N)",
        "first is as fast, times",
        "GiB of the card",
        "",
    )
    return [f"## {title}", "", *markdown(head, table), ""]


def spread(row: Row, name: str) -> str:
    """A median and its range."""
    if row.get(name) is None:
        return ""
    middle, ends = f"{row[name]:.3f}", row.get(f"{name}_range")
    return f"{middle} ({ends[0]:.3f} to {ends[1]:.3f})" if ends else middle


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    cells = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return ["| " + " | ".join(each.replace("|", "/").replace("\n", " ") for each in row) + " |" for row in cells]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--date", default=date.today().isoformat())
    options = parser.parse_args()
    print(report(options.folders, options.date), end="")
