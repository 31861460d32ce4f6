"""deploy/: commands of manifests and compose files parse, probes use existing routes, and ports and names agree."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.server.cli import make_parser
from pdserve.server.launch.store_options import read_store_options

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
HEALTH_ROUTES = ("/health", "/health_generate")


# Any: YAML of a foreign schema
def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text(encoding="utf-8")))


def deployment(role: str) -> dict[str, Any]:
    (found,) = [document for document in documents(f"{role}.yaml") if document["kind"] == "Deployment"]
    return found


def container(role: str) -> dict[str, Any]:
    (only,) = deployment(role)["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pods_drain_before_they_are_killed(role: str) -> None:
    pod, server = deployment(role)["spec"]["template"]["spec"], container(role)
    options, unknown = make_parser().parse_known_args(server["args"])
    assert (options.command, unknown) == (role, [])
    sleep_s = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    drain_s = float(options.shutdown_timeout_s)
    assert pod["terminationGracePeriodSeconds"] >= sleep_s + drain_s + 15, "docs/operations.md: 15 s more"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_probes_and_services_use_ports_of_the_server(role: str) -> None:
    server = container(role)
    options, _ = make_parser().parse_known_args(server["args"])
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert ports["http"] == int(options.port)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"]["port"] == "http"
        assert server[probe]["httpGet"]["path"] in HEALTH_ROUTES
    assert server["livenessProbe"]["httpGet"]["path"] == "/health", "it must not depend on a peer"
    (service,) = [document for document in documents(f"{role}.yaml") if document["kind"] == "Service"]
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports.keys()
    labels = deployment(role)["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pods_are_confined(role: str) -> None:
    pod = deployment(role)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container(role)["securityContext"]["allowPrivilegeEscalation"] is False
    mounts = {mount["name"]: mount for mount in container(role)["volumeMounts"]}
    assert mounts["models"]["readOnly"]
    assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()


def test_only_prefill_reaches_the_kv_ports_of_decode() -> None:
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in documents("network-policy.yaml")}
    for role, policy in policies.items():
        labels = deployment(role)["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    (kv,) = [rule for rule in policies["decode"]["ingress"] if rule["ports"][0].get("endPort")]
    assert (kv["ports"][0]["port"], kv["ports"][0]["endPort"]) == (15000, 17000)
    (source,) = kv["from"]
    prefill = deployment("prefill")["spec"]["template"]["metadata"]["labels"]
    assert source["podSelector"]["matchLabels"].items() <= prefill.items()


def test_kustomization_lists_all_manifests() -> None:
    (content,) = documents("kustomization.yaml")
    manifests = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(content["resources"]) == manifests


def test_observability_containers_mount_existing_files() -> None:
    content = yaml.safe_load((ROOT / "deploy" / "docker-compose.observability.yml").read_text(encoding="utf-8"))
    mounted = [volume.split(":")[0] for service in content["services"].values() for volume in service["volumes"]]
    paths = [source for source in mounted if source.startswith("./")]
    assert paths
    assert [source for source in paths if not (ROOT / "deploy" / source).exists()] == []


def test_servers_of_the_store_example_name_its_etcd() -> None:
    content = yaml.safe_load((ROOT / "deploy" / "docker-compose.store.yml").read_text(encoding="utf-8"))
    services = {name: service for name, service in content["services"].items() if name != "etcd"}
    assert services.keys() == {"store-1", "store-2", "prefill-1", "prefill-2", "decode"}
    for name, service in services.items():
        options, unknown = make_parser().parse_known_args(service["command"])
        assert (options.command, unknown) == (name.partition("-")[0], [])
        url = read_store_options(options).url if options.command == "store" else options.kv_store
        assert url == "etcd://etcd:2379"


def test_release_workflow_builds_packages_and_image() -> None:
    content = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    assert content.keys() >= {"name", "jobs", "permissions"}
    assert content["jobs"].keys() == {"packages", "image"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (model,) = re.findall(r"^EMBEDDED_MODEL := (\S+)$", makefile, re.MULTILINE)
    assert model in str(content["jobs"]["packages"]), "the smoke test uses the embedded model of this release"
