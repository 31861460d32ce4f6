"""deploy/: commands of manifests and compose files parse, probes use existing routes, and ports and names agree."""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pdserve.configs.flags import given_flags
from pdserve.configs.load import CONFIG_OF_ROLE, find_config_file, load_config
from pdserve.server.cli import make_parser
from pdserve.server.launch.store_options import read_store_options

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
HEALTH_ROUTES = ("/health", "/health_generate")
COUNT = {"type": "integer", "minimum": 1}
LEADER_WORKER_SET = {
    "type": "object",
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "properties": {
                "replicas": COUNT,
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "rolloutStrategy": {"type": "object"},
                "networkConfig": {
                    "type": "object",
                    "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
                    "additionalProperties": False,
                },
                "leaderWorkerTemplate": {
                    "type": "object",
                    "properties": {
                        "size": COUNT,
                        "restartPolicy": {"enum": ["None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"]},
                        "leaderTemplate": {"type": "object", "required": ["spec"]},
                        "workerTemplate": {"type": "object", "required": ["spec"]},
                        "subGroupPolicy": {"type": "object"},
                    },
                    "required": ["workerTemplate"],
                    "additionalProperties": False,
                },
            },
            "required": ["leaderWorkerTemplate"],
            "additionalProperties": False,
        },
    },
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
}
"""The fields of LeaderWorkerSet (v1) around the pods, as its documentation describes them."""
KEY = {"PDSERVE_CLUSTER_KEY": "a key of more than sixteen characters"}


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
    assert pod["terminationGracePeriodSeconds"] >= sleep_s + drain_s + 15, (
        "docs/operations.md asks for 15 s more than the drain"
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_probes_and_services_use_ports_of_the_server(role: str) -> None:
    server = container(role)
    options, _ = make_parser().parse_known_args(server["args"])
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert ports["http"] == int(options.port)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"]["port"] == "http"
        assert server[probe]["httpGet"]["path"] in HEALTH_ROUTES
    assert server["livenessProbe"]["httpGet"]["path"] == "/health", "liveness must not depend on a peer"
    (service,) = [document for document in documents(f"{role}.yaml") if document["kind"] == "Service"]
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports.keys()
    labels = deployment(role)["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pods_run_without_privileges(role: str) -> None:
    pod = deployment(role)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container(role)["securityContext"]["allowPrivilegeEscalation"] is False
    assert container(role)["securityContext"]["readOnlyRootFilesystem"]
    mounts = {mount["name"]: mount for mount in container(role)["volumeMounts"]}
    assert mounts["models"]["readOnly"]
    assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()


def test_only_prefill_reaches_the_kv_ports_of_decode() -> None:
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in documents("network-policy.yaml")}
    for role, policy in policies.items():
        labels = deployment(role)["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    http, kv = policies["decode"]["ingress"]
    assert [(port["port"], port.get("endPort")) for port in http["ports"]] == [(8200, None)]
    assert [(port["port"], port.get("endPort")) for port in kv["ports"]] == [(15000, 17000)]
    (source,) = kv["from"]
    prefill = deployment("prefill")["spec"]["template"]["metadata"]["labels"]
    assert source["podSelector"]["matchLabels"].items() <= prefill.items()


def test_kustomization_lists_all_manifests() -> None:
    (content,) = documents("kustomization.yaml")
    manifests = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(content["resources"]) == manifests - {"decode-lws.yaml"}, "decode-lws.yaml replaces decode.yaml"


@pytest.mark.parametrize("name", ["prefill.yaml", "decode.yaml", "decode-lws.yaml", "network-policy.yaml"])
def test_manifests_follow_the_schemas_of_kubernetes(name: str) -> None:
    version = kubernetes_validate.latest_version()
    for document in documents(name):
        if document["kind"] != "LeaderWorkerSet":
            kubernetes_validate.validate(document, version, strict=True)
            continue
        jsonschema.validate(document, LEADER_WORKER_SET)
        for template in ("leaderTemplate", "workerTemplate"):
            pod = document["spec"]["leaderWorkerTemplate"][template]
            kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **pod}, version, strict=True)


def test_pods_of_a_leader_worker_set_start_one_server() -> None:
    group, service, _ = documents("decode-lws.yaml")
    template = group["spec"]["leaderWorkerTemplate"]
    assert service["metadata"]["name"] != group["metadata"]["name"], (
        "LeaderWorkerSet creates a headless Service with its own name"
    )
    (leader,), (worker,) = (template[f"{who}Template"]["spec"]["containers"] for who in ("leader", "worker"))
    assert leader["args"] == worker["args"]
    for rank in ("0", "1"):
        given = {"$(LWS_GROUP_SIZE)": str(template["size"]), "$(LWS_WORKER_INDEX)": rank, "$(POD_IP)": "10.0.0.1"}
        words = [
            substituted(word, {**given, "$(LWS_LEADER_ADDRESS)": "decode-group-0.decode-group"})
            for word in leader["args"]
        ]
        options, unknown = make_parser().parse_known_args(words)
        assert unknown == []
        config = load_config("decode", find_config_file(options.config), settings(options), KEY)
        assert (config.nnodes, config.node_rank) == (template["size"], int(rank))
        assert config.world_size == int(leader["resources"]["limits"]["nvidia.com/gpu"]) * config.nnodes
    leader_labels = template["leaderTemplate"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= leader_labels.items()
    assert not service["spec"]["selector"].items() <= template["workerTemplate"]["metadata"]["labels"].items()


def substituted(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def settings(options: argparse.Namespace) -> dict[str, str | bool]:
    return given_flags(options, CONFIG_OF_ROLE[options.command].model_fields)


def test_compose_file_for_several_hosts_has_valid_settings() -> None:
    content = yaml.safe_load((ROOT / "deploy" / "docker-compose.hosts.yml").read_text(encoding="utf-8"))
    values = {"HOST_IP": "10.0.0.2", "FRONT_IP": "10.0.0.1", "PREFILL": "10.0.0.2:8998,10.0.0.4:8998"}
    profiles = {name: service["profiles"] for name, service in content["services"].items()}
    assert profiles == {
        "prefill": ["prefill"],
        "decode": ["decode"],
        **{name: ["front"] for name in ("store", "router", "prometheus", "grafana")},
    }
    for role in ("prefill", "decode", "store"):
        command = [
            re.sub(r"\$\{(\w+):(?:\?|-([^}]*))\}", lambda found: values.get(found[1], found[2] or ""), word)
            for word in content["services"][role]["command"]
        ]
        options, unknown = make_parser().parse_known_args(command)
        assert (options.command, unknown) == (role, [])
        if role in CONFIG_OF_ROLE:
            config = load_config(options.command, find_config_file(options.config), settings(options), KEY)
            assert config.public_host == values["HOST_IP"]
            assert config.shutdown_timeout_s + 15 <= int(content["x-server"]["stop_grace_period"].removesuffix("s"))
            assert config.port == int(content["services"][role]["environment"].get("HEALTH_PORT", 8200))


@pytest.mark.parametrize("name", ["docker-compose.hosts.yml", "docker-compose.observability.yml"])
def test_containers_mount_existing_files(name: str) -> None:
    content = yaml.safe_load((ROOT / "deploy" / name).read_text(encoding="utf-8"))
    mounted = [
        volume.split(":")[0] for service in content["services"].values() for volume in service.get("volumes", ())
    ]
    paths = [source for source in mounted if source.startswith("./")]
    assert paths
    assert [source for source in paths if not (ROOT / "deploy" / source).exists()] == []


def test_store_example_uses_its_etcd() -> None:
    content = yaml.safe_load((ROOT / "deploy" / "docker-compose.store.yml").read_text(encoding="utf-8"))
    services = {name: service for name, service in content["services"].items() if name not in ("etcd", "check")}
    assert services.keys() == {"store-1", "store-2", "prefill-1", "prefill-2", "decode"}
    for name, service in services.items():
        options, unknown = make_parser().parse_known_args(service["command"])
        assert (options.command, unknown) == (name.partition("-")[0], [])
        url = read_store_options(options).url if options.command == "store" else options.kv_store
        assert url == "etcd://etcd:2379"


@pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.store.yml", "docker-compose.hosts.yml"])
def test_health_checks_use_the_port_of_their_server(name: str) -> None:
    services = yaml.safe_load((ROOT / "deploy" / name).read_text(encoding="utf-8"))["services"]
    servers = {title: service for title, service in services.items() if "pdserve" in service.get("image", "")}
    servers.pop("check", None)
    assert servers
    for title, service in servers.items():
        role = service["command"][0]
        healthcheck = service.get("healthcheck", {})
        if role not in CONFIG_OF_ROLE:
            assert healthcheck.get("disable"), f"{title} has no HTTP port"
            continue
        default = CONFIG_OF_ROLE[role].model_fields["port"].default
        given = [word.partition("=")[2] for word in service["command"] if word.startswith("--port=")]
        port = given[0] if given else str(default)
        assert "test" not in healthcheck, "HEALTHCHECK of the image, which reads HEALTH_PORT, prints one line"
        assert service["environment"].get("HEALTH_PORT", "8200") == port, f"{title} listens on {port}"


COMPOSE_FILES = sorted(path.name for path in (ROOT / "deploy").glob("docker-compose*.yml"))


def test_changed_source_file_downloads_nothing_when_the_image_is_built_again() -> None:
    """What builds the package is installed with the dependencies: pip would download it into a folder of its own."""
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    *_, dependencies, package = (line for line in dockerfile.splitlines() if "pip install" in line)
    assert "['build-system']['requires']" in dependencies
    assert {"--no-index", "--no-build-isolation", "--no-deps", "/src"} <= set(package.split())


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_one_service_builds_the_image(name: str) -> None:
    """If several build one tag, the image differs after each build, and `up` recreates all containers."""
    services = yaml.safe_load((ROOT / "deploy" / name).read_text(encoding="utf-8"))["services"]
    builders = [title for title, service in services.items() if "build" in service and title != "router"]
    assert builders == (["check"] if name in ("docker-compose.yml", "docker-compose.store.yml") else [])
    for title, service in services.items():
        if service.get("image") == "pdserve" and title not in builders and name != "docker-compose.hosts.yml":
            assert service["pull_policy"] == "never", f"{title} would be pulled from Docker Hub"
        if "build" in service:
            assert service["build"]["args"]["BASE"] == "${BASE:-python:3.12-slim-bookworm}"


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_servers_in_containers_write_only_to_their_cache(name: str) -> None:
    services = yaml.safe_load((ROOT / "deploy" / name).read_text(encoding="utf-8"))["services"]
    for title, service in services.items():
        if service.get("image") == "pdserve" and title not in ("check", "store"):
            assert (service["read_only"], service["tmpfs"]) == (True, ["/tmp"])
            assert any(volume.endswith(":/home/pdserve/.cache") for volume in service["volumes"]), title


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_memory_is_locked_only_where_gpus_or_rdma_need_it(name: str) -> None:
    """An engine that may not raise limits, such as a rootless one, does not start such a container."""
    services = yaml.safe_load((ROOT / "deploy" / name).read_text(encoding="utf-8"))["services"]
    locking = {title for title, service in services.items() if "memlock" in service.get("ulimits", {})}
    assert bool(locking) == (name in ("docker-compose.gpu.yml", "docker-compose.hosts.yml"))


def test_projects_of_compose_files_differ() -> None:
    """Files with one project name would stop each other's containers."""
    contents = [yaml.safe_load((ROOT / "deploy" / name).read_text(encoding="utf-8")) for name in COMPOSE_FILES]
    names = [content["name"] for content in contents if "name" in content]
    assert sorted(names) == ["pdserve", "pdserve-hosts", "pdserve-store"]


@pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.store.yml", "docker-compose.hosts.yml"])
def test_missing_key_is_reported_before_anything_is_built(name: str) -> None:
    """Compose reads `:?` when it parses the file. It prints the path, not the key."""
    content = yaml.safe_load((ROOT / "deploy" / name).read_text(encoding="utf-8"))
    found = re.fullmatch(r"\$\{PDSERVE_CLUSTER_KEY_FILE:\?(.*)\}", content["secrets"]["cluster_key"]["file"])
    assert found is not None
    assert "openssl rand -hex 32" in found[1]


def test_commented_variants_divide_a_mixture_of_experts() -> None:
    """TP on prefill, data-parallel attention on decode."""
    _, _, variant = (ROOT / "deploy" / "docker-compose.gpu.yml").read_text(encoding="utf-8").partition("#\n#  prefill:")
    lines = ["services:", "  prefill:", *(line.removeprefix("#") for line in variant.splitlines()[1:])]
    services = yaml.safe_load("\n".join(["x-gpu: &gpu {}", *lines]))["services"]
    pod = (KUBERNETES / "decode.yaml").read_text(encoding="utf-8").replace("# - --", "- --")
    (pods,) = [found for found in yaml.safe_load_all(pod) if found["kind"] == "Deployment"]
    (decode,) = pods["spec"]["template"]["spec"]["containers"]
    found = {}
    for name, command in (*((name, service["command"]) for name, service in services.items()), ("pod", decode["args"])):
        options, unknown = make_parser().parse_known_args(command)
        assert unknown == []
        found[name] = (options.command, options.tp, getattr(options, "dp_attention", None))
    assert found == {"prefill": ("prefill", "4", None), "decode-1": ("decode", "4", True), "pod": ("decode", "4", True)}


def test_examples_compute_no_prompts_on_decode() -> None:
    """On the cores of prefill, decode would compute all prompts after the first."""
    for name in ("docker-compose.yml", "docker-compose.store.yml"):
        services = yaml.safe_load((ROOT / "deploy" / name).read_text(encoding="utf-8"))["services"]
        decodes = [service["command"] for service in services.values() if service.get("command", [""])[0] == "decode"]
        assert decodes
        for command in decodes:
            assert {"--local-prefill=never", "--prefill-wait-s=30"} <= set(command)


@pytest.mark.parametrize(("gib", "missing"), [("0", []), ("1000000", ["memory", "disk"])])
def test_examples_check_for_memory_and_disk(gib: str, missing: list[str]) -> None:
    command = [sys.executable, "-I", str(ROOT / "deploy" / "room.py"), f"--memory-gib={gib}", f"--disk-gib={gib}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == bool(missing)
    lines = result.stderr.splitlines()
    assert len(lines) == len(missing)
    for line, what in zip(lines, missing, strict=True):
        assert line.startswith(f"this example needs 1e+06 GiB of {what}, and ")


@pytest.mark.parametrize("extra", ["cpu", "cuda13"])
def test_lock_files_pin_every_dependency(extra: str) -> None:
    lines = (ROOT / "deploy" / "locks" / f"{extra}.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(len(pin.specifier) == 1 and str(pin.specifier).startswith("==") for pin in pins)
    pinned = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    for text in (*project["dependencies"], *optional[extra], *optional["otel"]):
        wanted = Requirement(text)
        assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), text


def test_release_workflow_builds_packages_and_image() -> None:
    content = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    jobs = content["jobs"]
    assert jobs.keys() == {"packages", "image", "manifest"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (model,) = re.findall(r"^EMBEDDED_MODEL := (\S+)$", makefile, re.MULTILINE)
    assert model in str(jobs["packages"]), "the smoke test must use the embedded model of the Makefile"
    built = jobs["image"]["strategy"]["matrix"]
    locks = {path.stem for path in (ROOT / "deploy" / "locks").glob("*.txt")}
    assert set(built["extra"]) == set(jobs["manifest"]["strategy"]["matrix"]["extra"]) == locks, (
        "an image for each lock file"
    )
    assert built["arch"] == ["amd64", "arm64"]
    (pushed,) = (step["with"] for step in jobs["image"]["steps"] if "outputs" in step.get("with", {}))
    assert (pushed["sbom"], pushed["provenance"]) == (True, "mode=max")


def test_image_and_packages_name_one_repository_and_license() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', dockerfile))
    assert labels == {
        "title": project["name"],
        "licenses": project["license"],
        "source": project["urls"]["Repository"],
        "version": "$VERSION",
        "revision": "$REVISION",
    }
    arguments = set(re.findall(r"^ARG (\w+)=", dockerfile, re.MULTILINE))
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    given = {line.partition("=")[0] for line in workflow["jobs"]["image"]["env"]["BUILD_ARGS"].splitlines()}
    assert given == arguments - {"BASE"}
