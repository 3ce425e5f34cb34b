"""The results of `gpu_paths.py` as Markdown and as a picture."""

from __future__ import annotations

from html import escape
from typing import Any

#: Layout of the picture, in pixels.
LEFT, WIDTH, BAR, ROW = 230, 520, 9, 26
SAVE, LOAD = "#1f6fb2", "#d9822b"


def title(state: dict[str, Any]) -> str:
    """The name and size of a state."""
    return f"{state['name']}: {state['tensors']} tensors, {state['bytes'] / 1e9:.2f} GB"


def machine(results: dict[str, Any]) -> str:
    """The machine, and the version of PyTorch."""
    return f"{results['device']}, {results['cores']} cores, PyTorch {results['torch']}"


def markdown(results: dict[str, Any]) -> str:
    """A table for each state."""
    limits = results["ceilings"]
    parts = [
        "# Whole paths of GPU tensors",
        f"{machine(results)}. From GPU memory to a file in a memory file system and back; every tool "
        f"with the same tensors, the best of {results['repeat']} runs; GB/s (1e9) of values. Made by "
        "`cargo xtask bench --gpu`.",
        f"Ceilings: a pinned copy to the host {limits['copy_to_host_gb_s']:.1f} GB/s, to the device "
        f"{limits['copy_to_device_gb_s']:.1f}; one thread that writes a new file there "
        f"{limits['write_gb_s']:.1f}.",
    ]
    for state in results["states"]:
        parts += [f"### {title(state)}", table(state["tools"])]
    return "\n\n".join(parts) + "\n"


def table(tools: dict[str, dict[str, float]]) -> str:
    """Rates and times, and the speed relative to torch's saving and safetensors' loading."""
    save = tools.get("torch.save", {}).get("save_s")
    load = tools.get("safetensors", {}).get("load_s")
    lines = [
        "| | ratio | save GB/s | ms | of torch.save | load GB/s | ms | of safetensors |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]

    def times(base: float | None, own: float) -> str:
        return "" if base is None else f"{base / own:.2f}x"

    for name, t in tools.items():
        lines.append(
            f"| {name} | {t['ratio']:.3f} | {t['save_gb_s']:.2f} | {1e3 * t['save_s']:.1f} "
            f"| {times(save, t['save_s'])} | {t['load_gb_s']:.2f} | {1e3 * t['load_s']:.1f} "
            f"| {times(load, t['load_s'])} |"
        )
    return "\n".join(lines)


def picture(results: dict[str, Any]) -> str:
    """Bars for each tool; the dashed lines are pinned copies. Longer is faster."""
    body: list[str] = []
    top = 52
    for state in results["states"]:
        top = panel(body, state, results["ceilings"], top) + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {top}" font-family="sans-serif" '
        'font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="12" y="20" font-size="14">{escape(machine(results))}</text>\n'
        f'<text x="12" y="38"><tspan fill="{SAVE}">save</tspan>, <tspan fill="{LOAD}">load</tspan>, '
        "GB/s of values, GPU to a memory file system and back; dashed: a pinned copy; grey: one "
        "thread that writes</text>\n" + "\n".join(body) + "\n</svg>\n"
    )


def panel(body: list[str], state: dict[str, Any], limits: dict[str, float], top: int) -> int:
    """Draws the bars of one state; returns where the next panel may begin."""
    copies = [(limits["copy_to_host_gb_s"], SAVE), (limits["copy_to_device_gb_s"], LOAD)]
    scale = WIDTH / max(rate for rate, _ in copies)
    y = top + 14
    body.append(f'<text x="12" y="{y}" font-weight="bold">{escape(title(state))}</text>')
    y += 8
    bottom = y + ROW * len(state["tools"])
    for rate, colour in [*copies, (limits["write_gb_s"], "#999999")]:
        x = LEFT + rate * scale
        body.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{bottom}" stroke="{colour}" '
            'stroke-dasharray="4 3"/>'
        )
    for name, tool in state["tools"].items():
        body.append(f'<text x="12" y="{y + 14}">{escape(name)}</text>')
        for i, (key, colour) in enumerate((("save_gb_s", SAVE), ("load_gb_s", LOAD))):
            at, long = y + i * (BAR + 1), tool[key] * scale
            body.append(
                f'<rect x="{LEFT}" y="{at}" width="{long:.1f}" height="{BAR}" fill="{colour}"/>'
                f'<text x="{LEFT + long + 4:.1f}" y="{at + 8}" font-size="9">{tool[key]:.2f}</text>'
            )
        y += ROW
    return bottom
