"""Write the tables of README.md and docs/ from the rows of `tests/benchmarks/results.jsonl`.

`python tests/tools/figures.py`. A page has the template of a table in a comment above it: the text
before, the head, then `= BENCHMARK PATTERN` and the cells of the cases that the pattern fits. Rows
with equal groups of the pattern (or of the same case) are one line: the newest of each
implementation, which a group `by` can name. `{field}` is that of `ours` or of the newest row,
`{comfyui[field]}` that of an implementation, and one that is not there is empty.
"""

import functools
import json
import re
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/benchmarks/results.jsonl"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- rows\n(.*?)\n-->\n).*?(<!-- end of rows -->)", re.DOTALL)

TIMED = ("comfyui", "diffusers", "every", "full", "ours")  # the fewest seconds are bold
PEAK_DB = 6.02  # of frames in [-1, 1]
WORDS = {
    "AMD EPYC, 2 threads, avx512_bf16": "2 cores of an AMD EPYC (Zen 5, avx512_bf16)",
    "AMD EPYC, 1 threads, avx512_bf16": "1 core of an AMD EPYC (Zen 5, avx512_bf16)",
    r"Intel\(R\) Xeon\(R\) Processor, 2 threads, avx512f": "2 cores of an Intel Xeon (avx512f)",
    "bfloat16": "bf16", "float32": "fp32", r"(?<=\d)x(?=\d)": " x ", "(?<=16|32) wan": ", wan",
    "(?<=16|32) seed": ", seed", "wan2": "Wan 2", "seedvr": "SeedVR",
}  # fmt: skip


class Fields(dict):
    """The fields of a row, of which those that are not there are empty in a template."""

    def __missing__(self, key: str) -> "Fields":
        return Fields()

    def __format__(self, form: str) -> str:
        return ""


def main() -> None:
    """Write each page whose tables differ."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            path.write_text(new, encoding="utf-8")


def filled(page: str) -> str:
    """Return a page of Markdown with its tables written anew."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{table(found[2])}\n\n{found[3]}", page)


def table(template: str) -> str:
    """Return the text and the table of a template."""
    above, *parts = re.split("^= ", template, flags=re.MULTILINE)
    body, fields = [], Fields()
    for part in parts:
        source, *cells = part.strip().split("\n")
        for fields in lines_of(*source.split(" ", 1)):
            body += [line.format_map(fields) for line in cells]
    above = above.rstrip().format_map(fields)
    rule = "| --- " * (above.rpartition("\n")[2].count("|") - 1) + "|"
    return "\n".join([above, rule, *body]).replace("|  |", "| |").replace("|  |", "| |")


def lines_of(bench: str, pattern: str) -> list[Fields]:
    """Return the fields of each line of a table."""
    newest: dict[tuple[str, str], tuple[dict[str, Any], dict[str, str]]] = {}
    for text in RESULTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(text)
        found = row["bench"] == bench and re.fullmatch(pattern, row["case"])
        if found and not row["commit"].endswith("dirty"):
            groups = found.groupdict()
            by = groups.pop("by", None) or row.get("implementation", "ours")
            newest.pop((row["case"], by), None)  # the newest goes to the end
            newest[row["case"], by] = row, groups
    lines: dict[object, dict[str, Fields]] = {}
    for (case, by), (row, groups) in newest.items():
        line = lines.setdefault(tuple(groups.values()) or case, {})
        line[by] = readable(row, groups)
    return [Fields({**[*line.values()][-1], **timed(line)}) for line in lines.values()]


def readable(row: dict[str, Any], groups: dict[str, str]) -> Fields:
    """Return the fields of a row as a table shows them."""
    fields = Fields(row | {key: int(x) if x.isdigit() else x for key, x in groups.items()})
    for key, value in fields.items():
        if isinstance(value, list) and isinstance(value[0], float):
            fields[key] = statistics.median(value)
        elif isinstance(value, dict):
            fields[key] = Fields(value)
        elif isinstance(value, str):
            fields[key] = functools.reduce(lambda x, pair: re.sub(*pair, x), WORDS.items(), value)
        elif key.endswith("_error_db"):
            fields[key] = PEAK_DB - value
        elif key == "psnr_db":
            fields[key] = "identical" if value is None else f"{value:.1f} dB"
    fields["origin"] = f"{row['commit']}, {row['date'][:10]}"
    if isinstance(row.get("seconds"), list):
        fields["rounds"] = len(row["seconds"])
    if "needed" in row:
        fields["over"] = row["gigabytes_per_latent"] / row["needed"]
    if times := row.get("milliseconds"):
        fields["ratio"] = Fields({key: value / times["no LoRA"] for key, value in times.items()})
    return fields


def timed(line: dict[str, Fields]) -> dict[str, Any]:
    """Return the rows of a line with `cell`: seconds, and how many times as long as `ours`."""
    # Seconds of another run do not stand next to those of `ours`.
    of_run = line.get("ours", {}).get("origin")
    seconds = {
        name: row.get("median_s", row.get("s"))
        for name, row in line.items()
        if name in TIMED and row["origin"] == of_run
    }
    seconds = {name: each for name, each in seconds.items() if each is not None}
    for name, each in seconds.items():
        ratio = line[name].get("ours_is_faster_by", each / seconds["ours"])
        cell = f"{each:.2f}" if name == "ours" else f"{each:.2f} ({ratio:.2f}x)"
        line[name]["cell"] = f"**{cell}**" if each == min(seconds.values()) else cell
    return line.get("ours", {}) | line


if __name__ == "__main__":
    main()
