"""The benchmark's results as Markdown and as a picture."""

from __future__ import annotations

import math
from html import escape

Table = list[list[str]]


def markdown(results: dict) -> str:
    """All the tables, with the data and machine they were measured on."""
    parts = [
        summary(results),
        "The same for the weights alone, without the optimizer's states:",
        _render(_by_dtype(results["tensors"], "weights")),
        "Ratio by file, tensor by tensor:",
        _render(_ratios(results["tensors"], list(results["data"]))),
        "Whole files, in a memory file system where there is one: ratio, and GB/s of raw bytes, saving / loading:",
        _render(_whole(results["whole_files"], list(results["data"]))),
    ]
    if results["missing"]:
        parts.append("Not measured here:")
        parts.append("\n".join(f"- {name}: {why}" for name, why in results["missing"].items()))
    return "\n\n".join(parts) + "\n"


def summary(results: dict) -> str:
    """The main table, by dtype over all files, with the data and machine it was measured on."""
    machine = results["machine"]
    size = sum(results["data"].values())
    intro = (
        f"{len(results['data'])} files, {size / 1e6:.1f} MB, tensor by tensor in memory; "
        f"{machine['processor']}; {_threads(results['threads'])} unless a row says otherwise; best "
        f"of {results['repeat']} runs or more; GB/s of raw bytes."
    )
    return f"{intro}\n\n{_render(_by_dtype(results['tensors']))}"


def _render(table: Table) -> str:
    head, *rows = table
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])


def _ratios(tensors: dict, files: list[str]) -> Table:
    return [["", *files]] + [
        [_label(name, peer), *(f"{peer['files'][file]['ratio']:.3f}" for file in files)]
        for name, peer in tensors.items()
        if name != "memory copy"
    ]


def _by_dtype(tensors: dict, group: str = "dtypes") -> Table:
    dtypes = sorted({dtype for peer in tensors.values() for dtype in peer[group]})
    titles = [f"{d.lower()} {what}" for d in dtypes for what in ("ratio", "encode", "decode")]
    rows = []
    for name, peer in tensors.items():
        cells = []
        for total in (peer[group][dtype] for dtype in dtypes):
            cells.append("" if name == "memory copy" else f"{total['ratio']:.3f}")
            cells += [_short(total["encode_gb_s"]), _short(total["decode_gb_s"])]
        rows.append([_label(name, peer), *cells])
    return [["", *titles], *rows]


def _whole(tools: dict, files: list[str]) -> Table:
    def cell(row: dict) -> str:
        return f"{row['ratio']:.3f}, {_short(row['save_gb_s'])} / {_short(row['load_gb_s'])}"

    return [["", *files]] + [
        [name, *(cell(rows[file]) for file in files)] for name, rows in tools.items()
    ]


def _label(name: str, peer: dict) -> str:
    ours = name == "memory copy" or name.startswith("s4weights")
    return name if ours else f"{name} ({peer['version']})"


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"


def _short(value: float) -> str:
    """About three significant digits: timings are no more precise than that."""
    return f"{value:.0f}" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f}"


# The picture: a block for each dtype, with a row for each peer and three columns.
ROW, TOP, NAMES, COLUMN, GAP = 22, 64, 250, 190, 70
COLUMNS = (("ratio", "ratio"), ("encode_gb_s", "encode GB/s"), ("decode_gb_s", "decode GB/s"))
STYLE = (
    "text{font:13px sans-serif;fill:#222}.h{font-weight:bold}.s{fill:#666;font-size:11px}"
    ".o{fill:#1565c0}.p{fill:#9e9e9e}.c{fill:#d7d7d7}line{stroke:#e0e0e0}"
)


def svg(results: dict) -> str:
    """Bars of ratio, and of speed on a logarithmic scale, for each dtype."""
    tensors = results["tensors"]
    dtypes = sorted({dtype for peer in tensors.values() for dtype in peer["dtypes"]})
    block = TOP + ROW * len(tensors)
    width = NAMES + len(COLUMNS) * (COLUMN + GAP)
    machine, threads = results["machine"]["processor"], results["threads"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {block * len(dtypes) + 30}">',
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
    ]
    for number, dtype in enumerate(dtypes):
        parts += _block(tensors, dtype, number * block)
    note = f"{machine}; {_threads(threads)} unless a row says otherwise; ratio from 0.9, speeds on a logarithmic scale"
    parts.append(f'<text class="s" x="10" y="{block * len(dtypes) + 18}">{escape(note)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _block(tensors: dict, dtype: str, top: int) -> list[str]:
    rows = {name: peer["dtypes"][dtype] for name, peer in tensors.items() if dtype in peer["dtypes"]}
    parts = [f'<text class="h" x="10" y="{top + 28}">{escape(dtype)}</text>']
    for column, (key, title) in enumerate(COLUMNS):
        left = NAMES + column * (COLUMN + GAP)
        parts.append(f'<text class="h" x="{left}" y="{top + 48}">{title}</text>')
        scale = _scale([row[key] for row in rows.values()], linear=key == "ratio")
        for number, (name, row) in enumerate(rows.items()):
            parts += _bar(name, row[key], scale, left, top + TOP + number * ROW, key == "ratio")
    for number, name in enumerate(rows):
        parts.append(f'<text x="10" y="{top + TOP + number * ROW + 12}">{escape(name)}</text>')
    return parts


def _scale(values: list[float], *, linear: bool) -> tuple[float, float]:
    """The values at the two ends of a column; as powers of ten unless linear."""
    if linear:
        return 0.9, max(values)
    return math.floor(math.log10(min(values))), math.log10(max(values))


def _bar(
    name: str, value: float, scale: tuple[float, float], left: int, top: int, linear: bool
) -> list[str]:
    if linear and name == "memory copy":
        return []
    low, high = scale
    at = value if linear else math.log10(value)
    length = COLUMN * max(0.01, (at - low) / (high - low))
    kind = "o" if name.startswith("s4weights") else "c" if name == "memory copy" else "p"
    figure = f"{value:.3f}" if linear else _short(value)
    return [
        f'<rect class="{kind}" x="{left}" y="{top}" width="{length:.1f}" height="14"/>',
        f'<text class="s" x="{left + length + 5:.1f}" y="{top + 11}">{figure}</text>',
    ]
