"""deploy/: what its files name exists."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from ragjax.serve.command import parse_options
from ragjax.serve.metric import ServerMetrics
from tests.support.devices import ROOT
from tests.support.fakes import FakeEngine

DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
SUFFIXES = ("_bucket", "_count", "_sum")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def expressions() -> list[str]:
    """What the dashboard and the alerts ask Prometheus for."""
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return panels + [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]


def known() -> set[str]:
    """Metrics of a server."""
    return set(re.findall(r"^# TYPE (\w+)", ServerMetrics(FakeEngine()).exposition().decode(), re.MULTILINE))


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_exists(expression: str) -> None:
    named = set(re.findall(r"ragjax_\w+", expression))
    bare = {name.removesuffix(next((s for s in SUFFIXES if name.endswith(s)), "")) for name in named}
    assert bare <= known()
    assert named or "up{" in expression


def test_an_alert_waits_once() -> None:
    """A look back over minutes that are all bad, and minutes for which that holds, add up."""
    rules = {rule["alert"]: rule for group in ALERTS["groups"] for rule in group["rules"]}
    assert [name for name, rule in rules.items() if "for" in rule and "_over_time(" in rule["expr"]] == []
    assert rules["RagjaxQueueGrows"]["for"] == "5m" and "five minutes" in str(rules["RagjaxQueueGrows"])


def test_a_first_start_ends_before_it_is_given_up() -> None:
    """It takes up to six minutes (README.md)."""
    (pod,) = [d["spec"]["template"]["spec"] for d in documents("kubernetes.yaml") if d["kind"] == "Deployment"]
    probe = pod["containers"][0]["startupProbe"]
    (seconds,) = re.findall(r"--start-period=(\d+)s", (DEPLOY / "Dockerfile").read_text())
    assert min(probe["periodSeconds"] * probe["failureThreshold"], int(seconds)) >= 1.5 * 6 * 60


def arguments() -> dict[str, list[str]]:
    """Flags that the files start the server with."""
    (docker,) = re.findall(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.M)
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.M)
    python, module, name, *first = json.loads(entry)
    assert (python, module, name) == ("python", "-m", "ragjax.serve")
    (compose,) = documents("compose.yaml")
    pods = [d["spec"]["template"]["spec"] for d in documents("kubernetes.yaml") if d["kind"] == "Deployment"]
    (service,) = documents("rayservice.yaml")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    return {
        "Dockerfile": first + json.loads(docker),
        "compose.yaml": first + compose["services"]["server"]["command"],
        "kubernetes.yaml": first + pods[0]["containers"][0]["args"],
        "rayservice.yaml": [part for k, v in application["args"].items() for part in (f"--{k}", str(v))],
    }


@pytest.mark.parametrize("name", arguments())
def test_the_server_takes_every_flag(name: str) -> None:
    parse_options(arguments()[name])


def test_the_application_of_ray_is_the_servers() -> None:
    (service,) = documents("rayservice.yaml")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
    assert f"def {name}(" in source
    deployed = {d["name"]: d for d in application["deployments"]}
    wanted = {name: d["num_replicas"] for name, d in deployed.items()}
    assert wanted == {"Ingress": 1, "Replica": application["args"]["replicas"]}
    cluster = service["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == wanted["Replica"]
    cpus = {name: d["ray_actor_options"]["num_cpus"] for name, d in deployed.items()}
    offered = [int(group["rayStartParams"]["num-cpus"]) for group in (cluster["headGroupSpec"], workers)]
    assert offered == [cpus["Ingress"], cpus["Replica"]] == [0, cpus["Replica"]], "a replica has a worker of its own"
    # KubeRay wants JSON with quotes that a shell takes away
    own = json.loads(json.loads(cluster["headGroupSpec"]["rayStartParams"]["resources"]))
    assert own == deployed["Ingress"]["ray_actor_options"]["resources"]
    assert "resources" not in workers["rayStartParams"]


def test_every_mounted_file_exists() -> None:
    (compose,) = documents("compose.yaml")
    mounts = [v for service in compose["services"].values() for v in service.get("volumes", []) if v.startswith(".")]
    assert mounts
    assert [m for m in mounts if not (DEPLOY / m.split(":")[0]).is_file()] == []


def test_the_image_gets_what_it_copies() -> None:
    """The ignore file lets through what the first stage copies."""
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.M)
    allowed = re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.M)
    assert set(" ".join(copied).split()) == set(allowed)
    assert [name for name in allowed if not (ROOT / name).exists()] == []


def test_the_image_installs_what_the_lock_has_by_its_hashes() -> None:
    """Each package of a plan, however its name is spelled, with all hashes of its entry, and no other."""
    names = ("h11", "Jinja2", "typing_extensions", "ragjax")
    plan = json.dumps({"install": [{"metadata": {"name": name}} for name in names]})
    locked = runpy.run_path(str(DEPLOY / "locked.py"))["locked"](plan, (ROOT / "requirements.lock").read_text())
    entries = re.findall(r"^(\S+?)==", locked, re.M)
    assert entries == ["h11", "jinja2", "typing-extensions"] and locked.count("--hash=sha256:") >= 6
    assert "--require-hashes" in (DEPLOY / "Dockerfile").read_text()
