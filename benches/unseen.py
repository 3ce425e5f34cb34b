"""Checkpoints that the codec was not tuned on, compared with ZipNN.

    python benches/unseen.py make FOLDER [--flat CHECKPOINTS]
    cargo run --release -p s4-benches --bin ratio -- --data FOLDER --sizes > sizes.tsv
    python benches/unseen.py compare FOLDER sizes.tsv [--tensors]

Needs torch, safetensors, scikit-learn (only for its data) and, for `compare`, zipnn. `make` trains
small networks on the CPU for some minutes and writes `NAME_sK.safetensors`, K optimizer steps
after the first checkpoint. `--flat` also makes flat buffers, as ZeRO and FSDP1 do, from other such
files. Seeds are fixed, but processors and versions of PyTorch round differently, so figures differ
in the last digits.
"""

from __future__ import annotations

import argparse
import itertools
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

State = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]

#: Steps after the first checkpoint at which others are kept.
LATER = (1, 10, 100)
#: Steps before the first checkpoint.
WARM = 150


# Data and networks.


def digits() -> Iterator[Batch]:
    """Batches of 8-by-8 images of digits, with their labels."""
    from sklearn.datasets import load_digits

    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float().view(-1, 8, 8) / 16
    while True:
        rows = torch.randint(len(images), (64,))
        yield images[rows], labels[rows]


def library() -> torch.Tensor:
    """Source of Python's standard library, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def text() -> Iterator[Batch]:
    """Batches of that source, with the byte that follows each byte."""
    source = library()
    while True:
        starts = torch.randint(len(source) - 65, (8,)).tolist()
        rows = torch.stack([source[i : i + 65] for i in starts]).long()
        yield rows[:, :-1], rows[:, 1:]


class Transformer(nn.Module):
    """An encoder whose tokens are rows of an image, or bytes."""

    def __init__(self, width: int, layers: int, *, of_bytes: bool) -> None:
        super().__init__()
        self.of_bytes = of_bytes
        self.embed = nn.Embedding(256, width) if of_bytes else nn.Linear(8, width)
        self.places = nn.Parameter(torch.randn(64 if of_bytes else 8, width) / 50)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256 if of_bytes else 10)

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(64) if self.of_bytes else None
        out = self.layers(self.embed(inputs) + self.places, mask=mask)
        out = self.head(out if self.of_bytes else out.mean(1))
        return functional.cross_entropy(out.flatten(0, -2), labels.flatten())


class Convolutions(nn.Module):
    """A small residual network, with batch norm and its counters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [1, width, 2 * width, 4 * width]
        pairs = itertools.pairwise(widths)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in pairs
        )
        self.head = nn.Linear(widths[-1], 10)

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out = images[:, None]
        for stage in self.stages:
            out = stage(out)
        return functional.cross_entropy(self.head(out.mean((2, 3))), labels)


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(mean.lerp(p.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                mean.lerp_(p.grad, 1 - beta2)


# Training.


def checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The tensors of both, under names that show their roles."""
    out = {f"model.{name}": t for name, t in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, t in optimizer.state[p].items():
            if isinstance(t, torch.Tensor):
                out[f"optimizer.{key}.{name}"] = t
    return {name: t.detach().clone().contiguous() for name, t in out.items()}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[Batch],
    dtype: torch.dtype = torch.float32,
) -> dict[int, State]:
    """Checkpoints by step. After each step, weights and optimizer states are rounded to `dtype`."""
    kept = {}
    for step in range(max(LATER) + 1 + WARM):
        optimizer.zero_grad()
        model.loss(*next(data)).backward()
        optimizer.step()
        if dtype != torch.float32:
            states = (t for p in model.parameters() for t in optimizer.state[p].values())
            for t in (*model.parameters(), *states):
                t.data.copy_(t.data.to(dtype))
        if step - WARM in (0, *LATER):
            kept[step - WARM] = checkpoint(model, optimizer)
    return kept


def cast(state: State, dtype: torch.dtype, prefix: str = "") -> State:
    """The same state, with floats whose names start with `prefix` in another dtype."""
    chosen = {k for k, t in state.items() if k.startswith(prefix) and t.is_floating_point()}
    return {k: t.to(dtype) if k in chosen else t for k, t in state.items()}


def with_masters(state: State, dtype: torch.dtype) -> State:
    """The state of a run in mixed precision: a rounded model, with its fp32 weights as masters."""
    floats = [k for k, t in state.items() if k.startswith("model.") and t.is_floating_point()]
    masters = {k.replace("model.", "master.", 1): state[k] for k in floats}
    return cast(state, dtype, "model.") | masters


def flat(state: State) -> State:
    """One buffer each for the weights and each kind of the optimizer's tensors."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, t in sorted(state.items()):
        kind = "master" if name.startswith("model.") else ".".join(name.split(".")[:2])
        if t.is_floating_point() and t.dim() > 0:
            parts.setdefault(kind, []).append(t.flatten())
    return {f"{kind}.flat": torch.cat(tensors) for kind, tensors in parts.items()}


def joined(state: State) -> State:
    """One buffer for everything of the same dtype."""
    parts: dict[str, list[torch.Tensor]] = {}
    for _, t in sorted(flat(state).items()):
        parts.setdefault(str(t.dtype).removeprefix("torch."), []).append(t)
    return {f"all.{dtype}": torch.cat(tensors) for dtype, tensors in parts.items()}


def others(state: State) -> State:
    """Counters, masks, text, small integers and one-byte floats, mostly made of real weights."""
    from sklearn.datasets import load_digits

    weights = torch.cat([t.flatten() for k, t in sorted(state.items()) if k.startswith("model.")])
    return {
        "text.uint8": library(),
        "digits.float64": torch.tensor(load_digits().data),
        "counts.int64": weights.abs().mul(1e4).long().cumsum(0),
        "numbers.int64": torch.arange(500_000),
        "order.int32": torch.randperm(500_000, dtype=torch.int32),
        "mask.bool": weights.abs() > weights.abs().median(),
        "sparse.bool": weights.abs() > 3 * weights.std(),
        "weights.float8_e4m3fn": weights.mul(64).to(torch.float8_e4m3fn),
        "weights.float8_e5m2": weights.to(torch.float8_e5m2),
        "weights.int8": weights.div(weights.abs().max()).mul(127).round().to(torch.int8),
        "weights.float64": weights.double(),
        "widened.float32": weights.to(torch.bfloat16).float(),
        "zeros.float32": torch.zeros(300_000),
    }


def runs() -> Iterator[tuple[str, dict[int, State]]]:
    """Every data set: its name, and checkpoints by step."""

    def each(kept: dict[int, State], change: Callable[[State], State]) -> dict[int, State]:
        return {step: change(state) for step, state in kept.items()}

    torch.manual_seed(0)
    model = Transformer(192, 3, of_bytes=False)
    kept = train(model, torch.optim.AdamW(model.parameters(), 1e-3), digits())
    yield "digits-adamw-fp32", kept
    yield "digits-adamw-flat", each(kept, flat)
    yield "digits-adamw-joined", each(kept, joined)
    yield "other-dtypes", {0: others(kept[0])}

    torch.manual_seed(1)
    model = Convolutions(64)
    kept = train(model, torch.optim.SGD(model.parameters(), 0.05, 0.9), digits())
    yield "cnn-sgd-fp32", kept
    yield "cnn-sgd-fp16-masters", each(kept, lambda state: with_masters(state, torch.float16))
    yield "cnn-sgd-fp16-model", each(kept, lambda state: cast(state, torch.float16, "model."))
    torch.manual_seed(1)
    model = Convolutions(64)
    kept = train(model, torch.optim.SGD(model.parameters(), 0.05, 0.9), digits(), torch.float16)
    yield "cnn-sgd-fp16", each(kept, lambda state: cast(state, torch.float16))

    torch.manual_seed(2)
    model = Transformer(192, 3, of_bytes=True)
    kept = train(model, Lion(model.parameters()), text())
    yield "text-lion-fp32", kept
    yield "text-lion-bf16", each(kept, lambda state: cast(state, torch.bfloat16))
    torch.manual_seed(3)
    model = Transformer(192, 3, of_bytes=True)
    kept = train(model, torch.optim.Adafactor(model.parameters(), 1e-2), text())
    yield (
        "text-adafactor-bf16-model",
        each(kept, lambda state: cast(state, torch.bfloat16, "model.")),
    )
    torch.manual_seed(4)
    model = Transformer(192, 3, of_bytes=True)
    kept = train(model, torch.optim.AdamW(model.parameters(), 1e-3), text())
    yield "text-adamw-fp32", kept
    yield "text-adamw-bf16", each(kept, lambda state: cast(state, torch.bfloat16))


def make(folder: Path, sources: Path | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, step: int, state: State) -> None:
        safetensors.torch.save_file(state, folder / f"{name}_s{step}.safetensors")
        print(f"{name}_s{step}: {sum(t.nbytes for t in state.values()) / 1e6:.1f} MB", flush=True)

    for path in sorted(sources.glob("*_s*.safetensors")) if sources else []:
        name, step = path.stem.rsplit("_s", 1)
        state = safetensors.torch.load_file(path)
        write(f"{name}-flat", int(step), flat(state))
        write(f"{name}-joined", int(step), joined(state))
    for name, kept in runs():
        for step, state in kept.items():
            write(name, step, state)


# Comparison.


def zipnn_sizes(path: Path, base: Path | None) -> dict[str, int]:
    """ZipNN's bytes for each tensor; with a parent, of the difference if that is smaller.

    The name `""` is for the whole file: the smaller of all tensors with safetensors' header, and
    the file as one buffer.
    """
    from zipnn import ZipNN

    def size(data: bytes, dtype: str) -> int:
        return min(
            len(data),
            len(ZipNN(input_format="byte", bytearray_dtype=dtype).compress(bytearray(data))),
        )

    def raw(t: torch.Tensor) -> bytes:
        return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    # Other dtypes are passed as one of these. (ZipNN 0.5.4 crashes on many such tensors, which
    # `compare` leaves out.)
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    state = safetensors.torch.load_file(path)
    parent = safetensors.torch.load_file(base) if base else {}
    out = {}
    for name, t in state.items():
        data = raw(t)
        dtypes = [names[t.dtype]] if t.dtype in names else ["float32", "bfloat16"]
        tried = [data]
        if name in parent:
            pair = (
                torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (data, raw(parent[name]))
            )
            tried.append(torch.bitwise_xor(*pair).numpy().tobytes())
        out[name] = min(size(data, dtype) for data in tried for dtype in dtypes)
    header = path.stat().st_size - sum(t.nbytes for t in state.values())
    whole = path.read_bytes()
    present = {names[t.dtype] for t in state.values() if t.dtype in names}
    as_one = min((size(whole, dtype) for dtype in present), default=len(whole))
    out[""] = min(header + sum(out.values()), as_one)
    return out


def compare(folder: Path, table: Path, tensors: bool) -> None:
    sizes: dict[tuple[str, str], dict[str, int]] = {}
    for line in table.read_text().splitlines():
        file, tensor, preset, size = line.split("\t")
        sizes.setdefault((file, tensor), {})[preset] = int(size)
    files = dict.fromkeys(file for file, _ in sizes)
    print("| checkpoint | ZipNN 0.5 | `fast` | `balanced` |\n|---|---|---|---|")
    for file in files:
        path = folder / f"{file}.safetensors"
        if not path.is_file() or file.startswith("other-dtypes"):
            continue  # A state that only `ratio` makes, or a file that crashes ZipNN.
        base = path.with_name(path.name.replace("_s" + path.stem.rsplit("_s", 1)[1], "_s0"))
        peer = zipnn_sizes(path, base if base != path else None)
        total = sum(t.nbytes for t in safetensors.torch.load_file(path).values())
        for name in ["", *sorted(peer.keys() - {""})] if tensors else [""]:
            ours = sizes.get((file, name))
            if ours is None:
                continue
            cells = [peer[name], ours["fast"], ours["balanced"]]
            if name:
                lost = "".join(
                    mark
                    for mark, bad in (("Z", cells[2] > cells[0]), ("F", cells[2] > cells[1] + 16))
                    if bad
                )
                print(f"    {name:50} {cells} {lost}")
            else:
                print(
                    f"| {file} | " + " | ".join(f"{total / c:.4f}" for c in cells) + " |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("make")
    verb.add_argument("folder", type=Path)
    verb.add_argument("--flat", type=Path, metavar="CHECKPOINTS")
    verb = verbs.add_parser("compare")
    verb.add_argument("folder", type=Path)
    verb.add_argument("sizes", type=Path)
    verb.add_argument(
        "--tensors", action="store_true", help="each, with Z or F if ZipNN's or `fast`'s is smaller"
    )
    arguments = parser.parse_args()
    if arguments.verb == "make":
        make(arguments.folder, arguments.flat)
    else:
        compare(arguments.folder, arguments.sizes, arguments.tensors)


if __name__ == "__main__":
    main()
