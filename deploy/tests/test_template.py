"""Properties of the CloudFormation template, each with a change of the template that it must notice."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from template import real

Template = dict[str, Any]
PROPERTIES: list[tuple[Callable[[Template], None], Callable[[Template], object]]] = []


def breaks(
    mutate: Callable[[Template], object],
) -> Callable[[Callable[[Template], None]], Callable[[Template], None]]:
    """Names a change of the template that the property must notice."""

    def add(check: Callable[[Template], None]) -> Callable[[Template], None]:
        PROPERTIES.append((check, mutate))
        return check

    return add


def props(template: Template, name: str) -> dict[str, Any]:
    found: dict[str, Any] = template["Resources"][name]["Properties"]
    return found


def of_type(template: Template, kind: str) -> list[dict[str, Any]]:
    return [r for r in template["Resources"].values() if r["Type"] == kind]


# A valid value for each parameter that takes free text.
GOOD = {
    "HealthCidr": "10.0.0.0/16",
    "ExistingBucketName": "my-bucket.of-2026",
    "Prefix": "runs/llama_7b/a.b-c",
    "KmsKeyArn": "arn:aws:kms:eu-west-1:123456789012:key/abc",
    "AccessLogBucket": "logs",
    "ProductCode": "prod-abc123",
    "IdentityCertificate": "MII" + "Ab0+/" * 200 + "==",
}


def statements(template: Template) -> list[dict[str, Any]]:
    """The policy statements of the role: what it may do."""
    policies = of_type(template, "AWS::IAM::Policy")
    return [s for p in policies for s in p["Properties"]["PolicyDocument"]["Statement"]]


def actions(statement: dict[str, Any]) -> list[str]:
    found = statement["Action"]
    return [found] if isinstance(found, str) else found


def launch(template: Template) -> dict[str, Any]:
    return props(template, "LaunchTemplate")["LaunchTemplateData"]


def user_data(template: Template) -> list[Any]:
    return launch(template)["UserData"]["Fn::Base64"]["Fn::Sub"]


@breaks(lambda t: t["Resources"]["Bucket"].pop("DeletionPolicy"))
@breaks(lambda t: t["Resources"]["Bucket"].update(UpdateReplacePolicy="Delete"))
@breaks(lambda t: t["Resources"]["BucketPolicy"].pop("DeletionPolicy"))
def bucket_outlives_the_stack(t: Template) -> None:
    for name in ("Bucket", "BucketPolicy"):
        resource = t["Resources"][name]
        assert resource.get("DeletionPolicy") == resource.get("UpdateReplacePolicy") == "Retain"


@breaks(lambda t: props(t, "Bucket")["PublicAccessBlockConfiguration"].pop("BlockPublicPolicy"))
@breaks(lambda t: props(t, "Bucket")["OwnershipControls"]["Rules"].clear())
def bucket_is_private(t: Template) -> None:
    block = props(t, "Bucket")["PublicAccessBlockConfiguration"]
    names = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")
    assert all(block.get(name) is True for name in names)
    rules = props(t, "Bucket")["OwnershipControls"]["Rules"]
    assert rules == [{"ObjectOwnership": "BucketOwnerEnforced"}]


@breaks(lambda t: props(t, "Bucket").pop("BucketEncryption"))
@breaks(
    lambda t: props(t, "Bucket")["BucketEncryption"]["ServerSideEncryptionConfiguration"][0][
        "ServerSideEncryptionByDefault"
    ].update(SSEAlgorithm="none")
)
@breaks(lambda t: launch(t)["BlockDeviceMappings"][0]["Ebs"].update(Encrypted=False))
def everything_at_rest_is_encrypted(t: Template) -> None:
    (rule,) = props(t, "Bucket")["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    algorithm = rule["ServerSideEncryptionByDefault"]["SSEAlgorithm"]
    assert algorithm == {"Fn::If": ["HasKey", "aws:kms", "AES256"]}
    assert all(d["Ebs"]["Encrypted"] is True for d in launch(t)["BlockDeviceMappings"])


@breaks(lambda t: props(t, "Bucket").pop("VersioningConfiguration"))
def bucket_keeps_versions(t: Template) -> None:
    assert props(t, "Bucket")["VersioningConfiguration"] == {"Status": "Enabled"}


@breaks(lambda t: props(t, "Bucket")["LifecycleConfiguration"]["Rules"].pop(0))
@breaks(
    lambda t: props(t, "Bucket")["LifecycleConfiguration"]["Rules"][1].update(ExpirationInDays=90)
)
def lifecycle_ends_uploads_and_never_a_current_object(t: Template) -> None:
    rules = props(t, "Bucket")["LifecycleConfiguration"]["Rules"]
    assert any("AbortIncompleteMultipartUpload" in rule for rule in rules)
    forbidden = {"ExpirationInDays", "ExpirationDate", "Transition", "Transitions"}
    assert not any(forbidden & rule.keys() for rule in rules)


@breaks(lambda t: props(t, "BucketPolicy")["PolicyDocument"]["Statement"].pop(0))
@breaks(lambda t: props(t, "BucketPolicy")["PolicyDocument"]["Statement"][0].update(Effect="Allow"))
@breaks(lambda t: props(t, "BucketPolicy")["PolicyDocument"]["Statement"][1]["Condition"].clear())
def bucket_refuses_plain_connections(t: Template) -> None:
    found = props(t, "BucketPolicy")["PolicyDocument"]["Statement"]
    assert all(s["Effect"] == "Deny" and s["Action"] == "s3:*" for s in found)
    conditions = [s["Condition"] for s in found]
    assert {"Bool": {"aws:SecureTransport": "false"}} in conditions
    assert {"NumericLessThan": {"s3:TlsVersion": "1.2"}} in conditions


@breaks(lambda t: statements(t)[1].update(Action=["s3:*"]))
@breaks(lambda t: statements(t)[1].update(Resource="*"))
@breaks(lambda t: statements(t)[0]["Action"].append("s3:DeleteBucket"))
@breaks(lambda t: props(t, "Role")["ManagedPolicyArns"].append("arn:aws:iam::aws:policy/Admin"))
@breaks(lambda t: props(t, "Role").update(Policies=[{"PolicyName": "x"}]))
def role_may_do_just_what_the_runner_needs(t: Template) -> None:
    allowed = {
        "s3:ListBucket",
        "s3:GetObject",
        "s3:PutObject",
        "s3:DeleteObject",
        "s3:AbortMultipartUpload",
        "s3:ListMultipartUploadParts",
        "kms:GenerateDataKey",
        "kms:Decrypt",
    }
    for statement in statements(t):
        assert set(actions(statement)) <= allowed, actions(statement)
        assert "*" not in (statement["Resource"], statement["Action"])
    managed = props(t, "Role")["ManagedPolicyArns"]
    assert len(managed) == 1 and "AmazonSSMManagedInstanceCore" in str(managed[0])
    assert "Policies" not in props(t, "Role")


@breaks(lambda t: statements(t)[1]["Resource"]["Fn::Sub"].__setitem__(0, "arn:aws:s3:::*/*"))
def objects_are_those_of_the_prefix(t: Template) -> None:
    for statement in statements(t):
        if "s3:PutObject" in actions(statement):
            assert statement["Resource"]["Fn::Sub"][0].endswith(":s3:::${Name}/${Prefix}/*")


@breaks(lambda t: statements(t)[0].pop("Condition"))
@breaks(lambda t: statements(t)[0]["Condition"]["StringLike"].update({"s3:prefix": "*"}))
@breaks(
    lambda t: statements(t)[0].update(
        Condition={"StringLikeIfExists": statements(t)[0]["Condition"]["StringLike"]}
    )
)
@breaks(lambda t: statements(t)[0]["Action"].append("s3:GetBucketLocation"))
def listings_are_those_of_the_prefix(t: Template) -> None:
    (found,) = [s for s in statements(t) if "s3:ListBucket" in actions(s)]
    # Requests for other actions have no `s3:prefix`.
    assert actions(found) == ["s3:ListBucket"]
    assert found["Condition"] == {"StringLike": {"s3:prefix": {"Fn::Sub": "${Prefix}/*"}}}


def texts(t: Template) -> dict[str, dict[str, Any]]:
    """The parameters that take free text."""
    found = t["Parameters"].items()
    return {n: p for n, p in found if p["Type"] == "String" and "AllowedValues" not in p}


@breaks(lambda t: t["Parameters"]["ExistingBucketName"].pop("AllowedPattern"))
@breaks(lambda t: t["Parameters"]["ExistingBucketName"].update(AllowedPattern="^.*$"))
@breaks(lambda t: t["Parameters"]["Prefix"].update(AllowedPattern='^[a-z"]+$'))
@breaks(lambda t: t["Parameters"]["IdentityCertificate"].pop("AllowedPattern"))
@breaks(lambda t: t["Parameters"].update(More={"Type": "String"}))
def every_text_has_a_pattern(t: Template) -> None:
    for name, parameter in texts(t).items():
        pattern = re.compile(parameter["AllowedPattern"])
        # CloudFormation matches the whole value, too.
        good = GOOD[name]
        assert pattern.fullmatch(good), name
        assert ("Default" not in parameter) or pattern.fullmatch(parameter["Default"]), name
        for bad in "\"'`$\\*? \t\r\n\0;|&<>(){}\u00e9":
            for at in (0, len(good) // 2, len(good)):
                assert not pattern.fullmatch(good[:at] + bad + good[at:]), (name, bad)


@breaks(lambda t: t["Rules"].clear())
@breaks(lambda t: t["Rules"]["ProductNeedsCertificate"]["Assertions"].clear())
@breaks(
    lambda t: t["Rules"]["ProductNeedsCertificate"]["RuleCondition"]["Fn::Not"][0].update(
        {"Fn::Equals": [{"Ref": "Prefix"}, ""]}
    )
)
def a_product_needs_a_certificate(t: Template) -> None:
    rule = t["Rules"]["ProductNeedsCertificate"]
    assert rule["RuleCondition"] == {"Fn::Not": [{"Fn::Equals": [{"Ref": "ProductCode"}, ""]}]}
    (assertion,) = rule["Assertions"]
    given = {"Fn::Not": [{"Fn::Equals": [{"Ref": "IdentityCertificate"}, ""]}]}
    assert assertion["Assert"] == given and "RSA-2048" in assertion["AssertDescription"]


@breaks(lambda t: props(t, "SecurityGroup")["SecurityGroupIngress"][0].update(CidrIp="0.0.0.0/0"))
@breaks(lambda t: props(t, "SecurityGroup")["SecurityGroupIngress"][0].update(FromPort=22))
@breaks(
    lambda t: props(t, "SecurityGroup")["SecurityGroupIngress"].append(
        {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "CidrIp": "10.0.0.0/8"}
    )
)
@breaks(lambda t: t["Resources"].update(More={"Type": "AWS::EC2::SecurityGroupIngress"}))
def only_the_page_is_reachable_and_only_from_the_given_network(t: Template) -> None:
    (group,) = of_type(t, "AWS::EC2::SecurityGroup")
    (rule,) = group["Properties"]["SecurityGroupIngress"]
    assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("tcp", 8080, 8080)
    assert rule["CidrIp"] == {"Ref": "HealthCidr"}
    assert not of_type(t, "AWS::EC2::SecurityGroupIngress")


@breaks(lambda t: props(t, "SecurityGroup")["SecurityGroupEgress"][0].update(IpProtocol="-1"))
def only_https_goes_out(t: Template) -> None:
    (rule,) = props(t, "SecurityGroup")["SecurityGroupEgress"]
    assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("tcp", 443, 443)


@breaks(lambda t: t["Parameters"]["HealthCidr"].update(AllowedPattern=".*"))
@breaks(lambda t: t["Parameters"]["HealthCidr"].update(Default="10.0.0.0/8"))
def the_world_is_no_network(t: Template) -> None:
    parameter = t["Parameters"]["HealthCidr"]
    pattern = re.compile(parameter["AllowedPattern"])
    assert "Default" not in parameter
    for good in ("10.0.0.0/8", "10.1.2.0/24", "192.168.1.7/32"):
        assert pattern.match(good) and ipaddress.ip_network(good, strict=False)
    for bad in ("0.0.0.0/0", "10.0.0.0/7", "0.0.0.0/8", "10.0.0.0", "10.0.0.0/33", "::/0", ""):
        assert not pattern.match(bad), bad


@breaks(lambda t: launch(t)["MetadataOptions"].update(HttpTokens="optional"))
@breaks(lambda t: launch(t)["MetadataOptions"].update(HttpPutResponseHopLimit=2))
@breaks(lambda t: props(t, "Instance").pop("LaunchTemplate"))
def metadata_needs_a_token(t: Template) -> None:
    options = launch(t)["MetadataOptions"]
    assert (options["HttpTokens"], options["HttpPutResponseHopLimit"]) == ("required", 1)
    assert props(t, "Instance")["LaunchTemplate"]["LaunchTemplateId"] == {"Ref": "LaunchTemplate"}


@breaks(lambda t: props(t, "Instance").update(KeyName="mine"))
@breaks(lambda t: launch(t).update(KeyName="mine"))
@breaks(lambda t: t["Outputs"].pop("SsmSessionCommand"))
def shells_come_through_ssm(t: Template) -> None:
    assert "KeyName" not in props(t, "Instance") and "KeyName" not in launch(t)
    assert "ssm start-session" in t["Outputs"]["SsmSessionCommand"]["Value"]["Fn::Sub"]


@breaks(lambda t: t["Resources"]["Instance"].pop("CreationPolicy"))
@breaks(lambda t: t["Resources"]["Instance"]["CreationPolicy"]["ResourceSignal"].update(Count=0))
def the_stack_waits_for_the_runner(t: Template) -> None:
    signal = t["Resources"]["Instance"]["CreationPolicy"]["ResourceSignal"]
    assert signal == {"Count": 1, "Timeout": "PT20M"}


@breaks(lambda t: t["Resources"]["Instance"].pop("DependsOn"))
@breaks(lambda t: t["Resources"]["Instance"].pop("Metadata"))
@breaks(lambda t: t["Resources"]["Instance"]["Metadata"]["Needs"].pop())
def what_draining_needs_outlives_the_instance(t: Template) -> None:
    instance = t["Resources"]["Instance"]
    needed = {instance["DependsOn"]}
    for condition, resource, nothing in (n["Fn::If"] for n in instance["Metadata"]["Needs"]):
        assert t["Resources"][resource["Ref"]]["Condition"] == condition and nothing == ""
        needed.add(resource["Ref"])
    policies = {n for n, r in t["Resources"].items() if r["Type"] == "AWS::IAM::Policy"}
    assert needed == policies | {"S3Endpoint"}


@breaks(lambda t: props(t, "Instance").update(UserData=launch(t).pop("UserData")))
@breaks(lambda t: props(t, "Instance")["LaunchTemplate"].update(Version="1"))
def a_new_configuration_makes_a_new_instance(t: Template) -> None:
    # User data of an instance may change without replacing it, and is not read again.
    assert "UserData" in launch(t) and "UserData" not in props(t, "Instance")
    version = {"Fn::GetAtt": ["LaunchTemplate", "LatestVersionNumber"]}
    assert props(t, "Instance")["LaunchTemplate"]["Version"] == version


@breaks(lambda t: t["Parameters"]["ImageId"].update(Default="/x"))
@breaks(lambda t: t["Parameters"]["ImageId"].update(Type="String"))
@breaks(lambda t: props(t, "Instance").update(ImageId="ami-1234"))
def the_image_is_a_parameter_without_a_default(t: Template) -> None:
    parameter = t["Parameters"]["ImageId"]
    assert parameter["Type"] == "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>"
    assert "Default" not in parameter
    assert props(t, "Instance")["ImageId"] == {"Ref": "ImageId"}


@breaks(lambda t: t["Parameters"]["InstanceType"]["AllowedValues"].append("p5.48xlarge"))
@breaks(lambda t: t["Parameters"]["InstanceType"]["AllowedValues"].remove("g6e.12xlarge"))
def instances_are_g6_and_g6e(t: Template) -> None:
    sizes = ("", "2", "4", "8", "12", "16", "24", "48")
    wanted = {f"{family}.{size}xlarge" for family in ("g6", "g6e") for size in sizes}
    assert set(t["Parameters"]["InstanceType"]["AllowedValues"]) == wanted


@breaks(lambda t: t["Resources"].pop("S3Endpoint"))
@breaks(lambda t: props(t, "S3Endpoint").update(VpcEndpointType="Interface"))
def s3_is_reached_through_a_gateway(t: Template) -> None:
    (endpoint,) = of_type(t, "AWS::EC2::VPCEndpoint")
    assert endpoint["Properties"]["VpcEndpointType"] == "Gateway"
    assert endpoint["Condition"] == "HasRouteTables"


@breaks(lambda t: t["Outputs"].pop("StoreUrl"))
def outputs_say_where_things_are(t: Template) -> None:
    wanted = {"HealthUrl", "StatusUrl", "MetricsUrl", "StoreUrl", "InstanceId", "SsmSessionCommand"}
    assert t["Outputs"].keys() >= wanted


@breaks(lambda t: user_data(t)[1].pop("Entitlement"))
@breaks(lambda t: user_data(t)[1]["Entitlement"]["Fn::If"].__setitem__(0, "HasKey"))
def a_product_is_asked_for_only_if_one_is_given(t: Template) -> None:
    condition, text, nothing = user_data(t)[1]["Entitlement"]["Fn::If"]
    assert (condition, nothing) == ("HasProduct", "")
    assert 'mode = "instance-identity"' in text["Fn::Sub"]


CASES = [pytest.param(c, m, id=f"{c.__name__}-{n}") for n, (c, m) in enumerate(PROPERTIES)]


@pytest.mark.parametrize("check", {c: None for c, _ in PROPERTIES}, ids=lambda c: c.__name__)
def test_the_template_has(check: Callable[[Template], None]) -> None:
    check(real())


@pytest.mark.parametrize(("check", "mutate"), CASES)
def test_a_changed_template_has_not(
    check: Callable[[Template], None], mutate: Callable[[Template], object]
) -> None:
    changed = deepcopy(real())
    mutate(changed)
    assert changed != real(), "the change changes nothing"
    with pytest.raises((AssertionError, KeyError, ValueError)):
        check(changed)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ExistingBucketName", ["*", "a", "a/b", "My-Bucket", "-ab", "ab-", "a" * 64]),
        ("Prefix", ["", "/a", "a/", "a//b", "..", "a/../b", "a/.b", "*"]),
        ("KmsKeyArn", ["*", "arn:aws:kms:eu-west-1:123456789012:key/*", "alias/a"]),
        ("IdentityCertificate", ["MII", "-----BEGIN CERTIFICATE-----", "A" * 1000]),
    ],
)
def test_a_pattern_refuses(name: str, values: list[str]) -> None:
    pattern = re.compile(real()["Parameters"][name]["AllowedPattern"])
    for value in values:
        assert not pattern.fullmatch(value), value


VALUES = {
    "AWS::StackName": "stack",
    "AWS::Region": "eu-west-1",
    "Name": "bucket",
    "Prefix": "checkpoints",
    "KeepLast": "5",
    "KmsKeyArn": "arn:aws:kms:eu-west-1:123456789012:key/abc",
    "ProductCode": "prod-abc123",
    "IdentityCertificate": "MIIB",
}


def resolved(part: Any, conditions: set[str]) -> str:
    """A text of the template, with its parameters replaced by their values."""
    if isinstance(part, str):
        return part
    if "Fn::If" in part:
        condition, then, other = part["Fn::If"]
        return resolved(then if condition in conditions else other, conditions)
    if "Ref" in part:
        return VALUES[
            {"Bucket": "Name", "ExistingBucketName": "Name"}.get(part["Ref"], part["Ref"])
        ]
    text = part["Fn::Sub"]
    own: dict[str, Any] = {}
    if isinstance(text, list):
        text, own = text
    own = {name: resolved(value, conditions) for name, value in own.items()}
    return re.sub(r"\$\{([A-Za-z:]+)\}", lambda m: {**VALUES, **own}[m[1]], text)


def certificate(tmp_path: Path, *key: str) -> str:
    """A certificate of a new key, in the form that the parameter takes."""
    new = ["openssl", "req", "-x509", "-nodes", "-subj", "/CN=test", "-days", "2", *key]
    new += ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "certificate.pem")]
    subprocess.run(new, check=True, capture_output=True)
    lines = (tmp_path / "certificate.pem").read_text().splitlines()
    return "".join(line for line in lines if "-----" not in line)


def run_user_data(
    tmp_path: Path, conditions: set[str], ready: bool, starts: bool, certificate: str = ""
) -> Any:
    """Runs the script of the first boot with stand-ins for the programs of the machine."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "etc").mkdir()
    log = tmp_path / "log"
    stubs = {
        "systemctl": f"echo systemctl $* >> {log}; exit {0 if starts else 1}",
        "curl": f"exit {0 if ready else 22}",
        "cfn-signal": f'printf "%s|" signal "$@" >> {log}; echo >> {log}',
        "chgrp": "exit 0",
        "sleep": "exit 0",
    }
    for name, body in stubs.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    script = resolved(launch(real())["UserData"]["Fn::Base64"], conditions)
    script = script.replace("/etc/s4weights", str(tmp_path / "etc"))
    script = script.replace(VALUES["IdentityCertificate"], certificate)
    script = script.replace("/opt/aws/bin/cfn-signal", str(tmp_path / "bin" / "cfn-signal"))
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", script], env={"PATH": path}, check=False)
    return done.returncode, log.read_text().splitlines(), tmp_path / "etc" / "runner.toml"


@pytest.mark.parametrize(
    ("ready", "starts", "code"), [(True, True, 0), (False, True, 1), (True, False, 1)]
)
def test_the_first_boot_tells_cloudformation_the_truth(
    tmp_path: Path, ready: bool, starts: bool, code: int
) -> None:
    done, log, _ = run_user_data(tmp_path, {"NewBucket"}, ready, starts)
    (told,) = [line.split("|")[1:-1] for line in log if line.startswith("signal|")]
    assert told[:3] == ["-e", str(code), "--reason"]
    assert told[4:] == ["--stack", "stack", "--resource", "Instance", "--region", "eu-west-1"]
    if code:
        assert ("did not start" if not starts else "/readyz") in told[3]
    assert done == code
    assert log[0] == "systemctl enable --now s4w-runner.service"


RSA_2048 = ("-newkey", "rsa:2048")
NEEDS_OPENSSL = pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")


@NEEDS_OPENSSL
def test_the_first_boot_writes_the_certificate(tmp_path: Path) -> None:
    given = certificate(tmp_path, *RSA_2048)
    assert re.fullmatch(real()["Parameters"]["IdentityCertificate"]["AllowedPattern"], given)
    done, log, _ = run_user_data(tmp_path, {"HasProduct"}, True, True, given)
    assert done == 0 and "signal|-e|0|" in log[-1]
    made = tmp_path / "etc" / "identity-eu-west-1.pem"
    assert made.read_text() == (tmp_path / "certificate.pem").read_text()
    assert made.stat().st_mode & 0o777 == 0o640


@NEEDS_OPENSSL
@pytest.mark.parametrize("key", [(), ("-newkey", "rsa:1024"), ("-newkey", "ed25519")], ids=str)
def test_the_first_boot_refuses_another_certificate(tmp_path: Path, key: tuple[str, ...]) -> None:
    given = certificate(tmp_path, *key) if key else "MIIBnonsense"
    done, log, _ = run_user_data(tmp_path, {"HasProduct"}, True, True, given)
    assert done == 1
    assert len(log) == 1 and "signal|-e|1|" in log[0] and "RSA key of 2048 bits" in log[0]


@pytest.mark.parametrize("conditions", [{"NewBucket", "KeepsAll"}, {"HasKey", "HasProduct"}])
def test_the_first_boot_writes_a_configuration(tmp_path: Path, conditions: set[str]) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    given = ""
    if "HasProduct" in conditions:
        if not shutil.which("openssl"):
            pytest.skip("needs openssl")
        given = certificate(tmp_path, *RSA_2048)
    _, _, path = run_user_data(tmp_path, conditions, True, True, given)
    config = tomllib.loads(path.read_text())
    assert config["store"] == "s3://bucket/checkpoints"
    assert config["require_gpu"] is config["spot"] is True
    assert config["storage_options"]["region"] == "eu-west-1"
    assert path.stat().st_mode & 0o777 == 0o640
    if "HasKey" in conditions:
        assert config["storage_options"]["SSEKMSKeyId"] == VALUES["KmsKeyArn"]
        assert config["entitlement"]["product_code"] == "prod-abc123"
        assert config["entitlement"]["certificate"] == str(path.with_name("identity-eu-west-1.pem"))
        assert config["keep_last"] == 5
    else:
        assert "entitlement" not in config and "keep_last" not in config


def test_all_references_lead_somewhere() -> None:
    t = real()
    known = t["Parameters"].keys() | t["Resources"].keys()
    text = json.dumps(t)
    for name in re.findall(r'"Ref": "([^"]+)"', text):
        assert name in known or name.startswith("AWS::"), name
    for name in re.findall(r'"Fn::If": \["([^"]+)"', text):
        assert name in t["Conditions"], name
