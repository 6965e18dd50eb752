"""One table of what `make gpu` was to show: for each figure what is wanted, what was found, and whether it is reached.

Pure: from the records of a run. A figure that its section did not report is missing, one whose section did not run is
said to be so; a record of no rule here that says whether a check held has a row all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Record = Mapping[str, Any]
OK, SHORT, MISSING, NOT_RUN = "ok", "short", "missing", "not run"


def _holds(record: Record) -> bool:
    return bool(record.get("holds", True))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one kind of record becomes a row.

    Attributes:
        section: That reports it.
        what: Its name there.
        wanted: In words, with fields of the record in braces.
        found: So, too.
        each: Fields that tell its rows apart.
        good: Whether what was found is what is wanted.
        only: Records that the rule is for.
    """

    section: str
    what: str
    wanted: str
    found: str
    each: tuple[str, ...] = ()
    good: Callable[[Record], bool] = _holds
    only: Callable[[Record], bool] = lambda record: True

    def takes(self, record: Record) -> bool:
        """Whether a record is one of these."""
        return (record["section"], record["what"]) == (self.section, self.what) and self.only(record)


RULES: Final = (
    Rule(section="ceilings", what="copy", wanted="reported", found="{tb_per_s} TB/s"),
    Rule(section="ceilings", what="bf16 matrix product", wanted="reported", found="{tflops} TFLOP/s"),
    Rule(
        section="compile",
        what="kernels compiled",
        each=("model",),
        wanted="all",
        found="{binaries} by triton {triton} in {seconds} s, {failures} failed",
    ),
    Rule(
        section="ffn",
        what="rows against double",
        each=("shape",),
        wanted="error below 0.002",
        found="{relative_error:.2g}",
    ),
    Rule(
        section="ffn",
        what="a row's bits alone, in every class, again",
        each=("shape",),
        wanted="none differ",
        found="{differ}",
    ),
    Rule(
        section="ffn",
        what="decode",
        each=("shape", "weights", "tokens"),
        wanted="{goal:.0%} of the copy rate",
        found="{share_of_copy:.0%}, {us} us of {weight_mb} MB",
        good=lambda record: bool(record["reached"]),
    ),
    Rule(
        section="ffn",
        what="prefill",
        each=("shape", "by"),
        wanted="{goal:.0%} of the matrix rate",
        found="{share_of_matrix:.0%}, {ms} ms",
        good=lambda record: bool(record["reached"]),
        only=lambda record: str(record["by"]).startswith("grouped_ffn"),
    ),
    Rule(
        section="linear",
        what="linear",
        each=("matrix", "rows"),
        wanted="reported",
        found="{us} us, {of_copy:.0%} of the copy rate, {of_matrix:.0%} of the matrix rate",
    ),
    Rule(
        section="exchange",
        what="bits of a call as of local experts",
        wanted="equal",
        found="{holds}",
    ),
    Rule(
        section="exchange",
        what="dispatch + combine",
        each=("rows_out",),
        wanted="at most {wanted_us} us beyond the FFN",
        found="{us_beyond_experts} us, {alone_us} us with experts that do nothing",
        good=lambda record: record["holds"] and record["us_beyond_experts"] <= record["wanted_us"],
    ),
    Rule(
        section="exchange",
        what="host launches on the server",
        wanted="1 in {passes_of_one_launch} passes",
        found="{launches_per_pass} a pass",
    ),
    Rule(
        section="exchange",
        what="a server stopped in mid-step, in the graph",
        wanted="same rows, {patience_ms} ms more",
        found="{holds}, {calm_ms} ms calm, {worst_ms} ms worst",
    ),
    Rule(
        section="sharing",
        what="a layer between two processes",
        each=("mode",),
        wanted="under 500 us with MPS",
        found="{us} us, worst {us_worst}",
        good=lambda record: record["holds"] and (record["mode"] != "MPS" or record["us"] < 500),
    ),
    Rule(
        section="sharing",
        what="the first server killed",
        each=("mode",),
        wanted="the client goes on, same bits",
        found="{said}",
    ),
    Rule(
        section="remote",
        what="tokens over servers, as in this process",
        wanted="equal",
        found="{equal} of {tokens}",
    ),
    Rule(
        section="remote",
        what="steps over servers",
        each=("rows",),
        wanted="reported",
        found="{ms} ms, in this process {local_ms}: {us_a_layer} us a layer",
    ),
    Rule(
        section="decode",
        what="greedy tokens and logits, as alone",
        each=("shape", "way"),
        wanted="equal",
        found="{holds}",
    ),
    Rule(
        section="decode",
        what="logits against the definition",
        each=("shape",),
        wanted="off below 0.1",
        found="median {off:.2g}, most {most:.2g}",
    ),
    Rule(
        section="decode",
        what="decode, Qwen3-30B-A3B shape, experts in this process",
        each=("batch", "two_micro_batches"),
        wanted="beside the roofline",
        found="{tokens_per_s} tokens/s, {of_roofline:.0%} of it",
    ),
    Rule(
        section="decode",
        what="prefill, Qwen3-30B-A3B shape, experts in this process",
        wanted="reported",
        found="{tokens_per_s} tokens/s",
    ),
    Rule(
        section="decode",
        what="launches of a decode step",
        each=("batch",),
        wanted="1 graph, no kernel beside it",
        found="{graphs}, {kernels_outside}",
    ),
    Rule(
        section="attention",
        what="decode attention",
        each=("batch", "context"),
        wanted="reported",
        found="{of_copy:.0%} of the copy rate",
    ),
    Rule(
        section="attention",
        what="prefill attention",
        each=("heads", "rows", "context"),
        wanted="reported",
        found="{tflops} TFLOP/s",
    ),
)


def rows_of(records: Sequence[Record], sections: Mapping[str, float]) -> list[tuple[str, str, str, str]]:
    """Figure, wanted, found and state, in the order of the sections.

    Args:
        records: Of this run.
        sections: All that there are, with their limits in seconds.
    """
    rows: list[tuple[str, str, str, str]] = []
    for section, limit_s in sections.items():
        mine = [record for record in records if record["section"] == section]
        ended = next((record for record in mine if record["what"] == "section"), None)
        rows.append(_end_of(section, limit_s, ended))
        for rule in (rule for rule in RULES if rule.section == section):
            taken = [record for record in mine if rule.takes(record)]
            rows += _rows_of(rule, taken)
            if not taken:
                rows.append((f"{section}: {rule.what}", rule.wanted, "-", MISSING if ended or mine else NOT_RUN))
        for record in mine:
            if "holds" in record and not any(rule.section == section and rule.what == record["what"] for rule in RULES):
                rows.append(
                    (
                        f"{section}: {record['what']}",
                        "holds",
                        str(record["holds"]),
                        OK if record["holds"] else SHORT,
                    )
                )
    return rows


def _end_of(section: str, limit_s: float, ended: Record | None) -> tuple[str, str, str, str]:
    wanted = f"ends well in {limit_s:.0f} s"
    if ended is None:
        return f"{section}", wanted, "-", NOT_RUN
    if "missing" in ended:
        return f"{section}", wanted, str(ended["missing"]), MISSING
    code = ended["exit_code"]
    found = f"killed after {ended['seconds']} s" if ended["killed"] else f"{ended['seconds']} s, exit code {code}"
    return f"{section}", wanted, found, OK if code == 0 else SHORT


def _rows_of(rule: Rule, taken: Sequence[Record]) -> list[tuple[str, str, str, str]]:
    """Of records with equal fields `each` the last one counts."""
    last = {tuple(str(record.get(name)) for name in rule.each): record for record in taken}
    rows = []
    for key, record in last.items():
        figure = ", ".join([f"{rule.section}: {rule.what}", *key])
        try:
            wanted, found = rule.wanted.format(**record), rule.found.format(**record)
            state = OK if rule.good(record) else SHORT
        except (KeyError, TypeError, ValueError) as error:
            # The table is what a run of minutes ends in: a record that is not as expected costs its own row alone.
            wanted, found, state = rule.wanted, f"a record that is not as expected: {error!r}", MISSING
        rows.append((figure, wanted, found, state))
    return rows


def text_of(rows: Sequence[tuple[str, str, str, str]]) -> str:
    """The table as lines; long cells are cut."""
    limits = (76, 36, 60, 7)
    head = ("figure", "wanted", "found", "")
    cut = [[cell[:most] for cell, most in zip(row, limits, strict=True)] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cut) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cut
    )
