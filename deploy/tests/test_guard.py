"""The rules for cfn-guard, if installed: the template passes, changed ones fail the right rule."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from template import DEPLOY, real
from test_template import PROPERTIES, Template, launch, props, statements

RULES = DEPLOY / "guard" / "rules.guard"
pytestmark = pytest.mark.skipif(not shutil.which("cfn-guard"), reason="needs cfn-guard")

# Properties that a rule with another name checks; most have a rule of the same name.
RULE_OF = {
    "role_may_do_just_what_the_runner_needs": "role_has_no_wildcards",
    "objects_are_those_of_the_prefix": "role_has_no_wildcards",
}
# Changes that only the properties' tests notice: actions without a wildcard, and missing outputs.
UNSEEN = {
    "role_may_do_just_what_the_runner_needs-2",
    "shells_come_through_ssm-0",
}

# Changes that the properties' tests do not make.
MORE: list[tuple[str, Callable[[Template], object]]] = [
    ("role_has_no_wildcards", lambda t: statements(t)[1].update(Action="s3:*")),
    ("role_has_no_wildcards", lambda t: statements(t)[1].update(NotAction="iam:*")),
    ("role_has_no_wildcards", lambda t: statements(t)[0].update(Resource=["*"])),
    ("everything_at_rest_is_encrypted", lambda t: launch(t).pop("BlockDeviceMappings")),
    ("metadata_needs_a_token", lambda t: launch(t).pop("MetadataOptions")),
    ("bucket_is_private", lambda t: props(t, "Bucket").pop("PublicAccessBlockConfiguration")),
    (
        "lifecycle_ends_uploads_and_never_a_current_object",
        lambda t: props(t, "Bucket").pop("LifecycleConfiguration"),
    ),
    ("bucket_refuses_plain_connections", lambda t: t["Resources"].pop("BucketPolicy")),
    (
        "only_the_page_is_reachable_and_only_from_the_given_network",
        lambda t: props(t, "SecurityGroup")["SecurityGroupIngress"][0].update(CidrIpv6="::/0"),
    ),
]


def names() -> list[str]:
    lines = RULES.read_text().splitlines()
    return [line.split()[1] for line in lines if line.startswith("rule ")]


def failed(template: Path) -> set[str]:
    """The rules that a template breaks."""
    command = ["cfn-guard", "validate", "--rules", str(RULES), "--data", str(template)]
    command += ["--structured", "--output-format", "json", "--show-summary", "none"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 19), done.stderr
    (report,) = json.loads(done.stdout)
    assert (report["status"] == "PASS") == (done.returncode == 0)
    if done.returncode == 0:
        assert sorted(report["compliant"]) == sorted(names()), "every rule applies"
    return {rule["Rule"]["name"] for rule in report["not_compliant"]}


def cases() -> list[Any]:
    """The changes that the template's own tests make, with the rules that must notice them."""
    found, count = [], dict[str, int]()
    for check, mutate in PROPERTIES:
        name = check.__name__
        # Decorators are applied from the last to the first.
        number = count[name] = count.get(name, -1) + 1
        rule = RULE_OF.get(name, name)
        if rule in names() and f"{name}-{number}" not in UNSEEN:
            found.append(pytest.param(mutate, rule, id=f"{name}-{number}"))
    more = (pytest.param(mutate, rule, id=f"more-{n}") for n, (rule, mutate) in enumerate(MORE))
    return [*found, *more]


def test_every_rule_has_a_change_that_it_must_notice() -> None:
    assert {case.values[1] for case in cases()} == set(names())


def test_the_template_passes() -> None:
    assert failed(DEPLOY / "cfn-train-runner.yaml") == set()


@pytest.mark.parametrize(("mutate", "rule"), cases())
def test_a_changed_template_fails(
    tmp_path: Path, mutate: Callable[[Template], object], rule: str
) -> None:
    changed = deepcopy(real())
    mutate(changed)
    path = tmp_path / "template.json"
    path.write_text(json.dumps(changed))
    assert rule in failed(path)
