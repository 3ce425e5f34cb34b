"""Reads a CloudFormation template and expands its short forms, such as `!Ref`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parent.parent


class _Loader(yaml.SafeLoader):
    pass


def _short(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        value: Any = loader.construct_scalar(node)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_mapping(node, deep=True)  # type: ignore[arg-type]
    if suffix == "GetAtt" and isinstance(value, str):
        value = value.split(".", 1)
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": value}


_Loader.add_multi_constructor("!", _short)


def load(text: str) -> dict[str, Any]:
    """Parses a template."""
    found = yaml.load(text, _Loader)
    assert isinstance(found, dict)
    return found


def real() -> dict[str, Any]:
    """The project's template."""
    return load((DEPLOY / "cfn-train-runner.yaml").read_text())
