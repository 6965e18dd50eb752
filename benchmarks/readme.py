"""Write the README's table of figures from benchmarks/results, so that no figure is typed by hand.

python -m benchmarks.readme
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

README = RESULTS.parent.parent / "README.md"
BEGIN, END = "<!-- decode: begin -->", "<!-- decode: end -->"


def latest() -> list[dict[str, Any]]:
    """The newest decode record of each shape and batch size."""
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    for line in (RESULTS / "decode.jsonl").read_text().splitlines():
        row = json.loads(line)
        newest[row["shape"], row["batch"]] = row
    return [newest[key] for key in sorted(newest)]


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as Markdown, with what they were measured on."""
    first = rows[0]
    hardware = first["hardware"]
    lines = [
        f"Shape S (188 M parameters, bf16), {first['experts']} expert servers, {first['threads']} threads in all, on "
        f"{hardware['cores']} cores of an {hardware['cpu']} ({', '.join(hardware['isa'])}); prompts of 16 tokens, 64 "
        f"new ones, through the HTTP endpoint; transformers {first['versions']['transformers']} `generate` "
        f"(experts_implementation grouped_mm) in the same run, {first['rounds']} interleaved rounds, medians "
        "(least to greatest).",
        "",
        "| batch | EaaS, tokens/s | transformers, tokens/s | ratio |",
        "|---|---|---|---|",
    ]
    for row in rows:
        columns = (
            (row["tokens_per_s"]["http"], 0),
            (row["tokens_per_s"]["transformers"], 0),
            (row["ratio"]["http/transformers"], 2),
        )
        cells = [
            f"{figure['median']:.{digits}f} ({figure['min']:.{digits}f} to {figure['max']:.{digits}f})"
            for figure, digits in columns
        ]
        lines.append(f"| {row['batch']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def render(text: str, rows: list[dict[str, Any]]) -> str:
    """The README's text with the table between its marks replaced.

    Raises:
        ValueError: the marks are missing.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"README.md lacks the marks {BEGIN} and {END}; put them where the table belongs.")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table(rows)}\n{END}{tail}"


def main(path: Path = README) -> None:
    path.write_text(render(path.read_text(), latest()))


if __name__ == "__main__":
    main()
