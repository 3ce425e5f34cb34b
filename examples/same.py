"""Whether two states are the same, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def leaves(tree: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every value in nested containers, with its path."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}/{index}")
    else:
        yield path, tree


def bits(value: object) -> tuple:
    """What two values must share to count as the same: type, shape and every byte."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, float):
        return float, value.hex()
    return type(value), value


def differences(a: object, b: object) -> list[str]:
    """The places where two states are not the same, bit for bit."""
    ours, theirs = dict(leaves(a)), dict(leaves(b))
    return sorted(
        place
        for place in ours.keys() | theirs.keys()
        if place not in ours or place not in theirs or bits(ours[place]) != bits(theirs[place])
    )


def check(what: str, a: object, b: object) -> bool:
    """Prints whether two states are the same and where they differ; returns whether they are."""
    found = differences(a, b)
    if not found:
        print(f"  same: {what} ({sum(1 for _ in leaves(a))} values)")
        return True
    print(f"  DIFFERENT: {what}, in {len(found)} places:")
    for place in found[:10]:
        print(f"    {place}")
    return False
