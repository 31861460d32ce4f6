"""A Docker engine for `make test-image`: the one that answers here, or one of our own from Debian's packages.

Nothing is installed. Packages are unpacked below `folder`, which also has the engine's socket and data. runc, iptables
and mmdebstrap come from the Debian of this machine, the engine from trixie, whose binaries need only glibc 2.34.
"""

import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

TOOLS = ("runc", "iptables", "iproute2", "mmdebstrap")
ENGINE = ("docker.io", "docker-cli", "docker-buildx", "docker-compose", "containerd")
ENGINE_SUITE = "trixie"
START_S = 60
STOP_S = 30


class MissingPartError(Exception):
    """No engine answers here, and none can be started; the message is one line that says why."""


def run(*command: str | Path, environ: dict[str, str] | None = None) -> str:
    """Its output. Raises MissingPartError with its last line if it fails."""
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    except OSError as error:
        raise MissingPartError(f"{command[0]}: {error.strerror}") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise MissingPartError(f"{' '.join(map(str, command[:4]))}: {lines[-1]}")
    return done.stdout


@contextlib.contextmanager
def docker_engine(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `docker` reaches an engine. Raises MissingPartError."""
    with contextlib.suppress(MissingPartError):
        run("docker", "info")
        run("docker", "compose", "version")
        run("docker", "buildx", "version")
        yield dict(os.environ)
        return
    _check_machine()
    folder.mkdir(parents=True, exist_ok=True)
    environ = _unpacked(folder)
    with _daemon(folder, environ):
        yield environ


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise MissingPartError("no Docker engine answers, and only root can start one")
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise MissingPartError(f"no Docker engine answers, and without {tool} there are no packages to start one")
    run("unshare", "--mount", "--pid", "--net", "--fork", "true")


def _unpacked(folder: Path) -> dict[str, str]:
    """Download and unpack the packages, once. Returns the environment in which their commands run."""
    root, packages = folder / "root", folder / "packages"
    if not (folder / "unpacked").exists():
        shutil.rmtree(root, ignore_errors=True)
        _download(folder, packages)
        for package in sorted(packages.glob("*.deb")):
            run("dpkg", "-x", package, root)
        plugins = folder / "config" / "cli-plugins"
        plugins.mkdir(parents=True, exist_ok=True)
        for plugin in (root / "usr/libexec/docker/cli-plugins").iterdir():
            (plugins / plugin.name).unlink(missing_ok=True)
            (plugins / plugin.name).symlink_to(plugin)
        (folder / "unpacked").touch()
    libraries = root / "usr/lib" / f"{platform.machine()}-linux-gnu"
    environ = {
        **os.environ,
        "PATH": f"{root}/usr/sbin:{root}/usr/bin:{root}/sbin:{root}/bin:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(libraries),
        "XTABLES_LIBDIR": str(libraries / "xtables"),
        "DOCKER_HOST": f"unix://{folder}/docker.sock",
        "DOCKER_CONFIG": str(folder / "config"),
    }
    _choose_iptables(root / "usr/sbin", environ)
    return environ


def _download(folder: Path, packages: Path) -> None:
    (packages / "partial").mkdir(parents=True, exist_ok=True)
    # only what this machine does not have, with what it depends on
    wanted = ("--download-only", "--no-install-recommends", "--reinstall", "--yes")
    run("apt-get", "--quiet=2", "update")
    run("apt-get", "--quiet=2", "install", *wanted, "-o", f"Dir::Cache::archives={packages}", *TOOLS)
    mirrors = run("apt-get", "indextargets", "--format", "$(REPO_URI)").split()
    mirror = next((uri for uri in mirrors if uri.rstrip("/").endswith("/debian")), "http://deb.debian.org/debian")
    apt = folder / "apt"
    for directory in ("lists/partial", "cache/archives/partial"):
        (apt / directory).mkdir(parents=True, exist_ok=True)
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (apt / "sources.list").write_text(f"deb [signed-by={keys}] {mirror} {ENGINE_SUITE} main\n", encoding="utf-8")
    (apt / "status").touch()
    (apt / "apt.conf").write_text(
        f'Dir::Etc::SourceList "{apt}/sources.list";\nDir::Etc::SourceParts "/dev/null";\n'
        f'Dir::State::Lists "{apt}/lists";\nDir::State::Status "{apt}/status";\nDir::Cache "{apt}/cache";\n',
        encoding="utf-8",
    )
    environ = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
    run("apt-get", "--quiet=2", "update", environ=environ)
    run("sh", "-c", f"cd '{packages}' && exec apt-get --quiet=2 download {' '.join(ENGINE)}", environ=environ)


def _choose_iptables(folder: Path, environ: dict[str, str]) -> None:
    """Debian chooses with links that its installation makes: take the variant that this kernel has."""
    for kind in ("legacy", "nft"):
        with contextlib.suppress(MissingPartError):
            run(folder / f"iptables-{kind}", "-t", "nat", "-S", environ=environ)
            for tool in ("iptables", "ip6tables"):
                (folder / tool).unlink(missing_ok=True)
                (folder / tool).symlink_to(f"{tool}-{kind}")
            return
    raise MissingPartError("iptables: the kernel has no NAT table")


@contextlib.contextmanager
def _daemon(folder: Path, environ: dict[str, str]) -> Iterator[None]:
    policies = {tool: run(tool, "-S", "FORWARD", environ=environ).split("\n")[0] for tool in ("iptables", "ip6tables")}
    forwarding = Path("/proc/sys/net/ipv4/ip_forward")
    forwarded = forwarding.read_text(encoding="utf-8")
    command = [
        "dockerd",
        f"--host={environ['DOCKER_HOST']}",
        f"--data-root={folder}/data",
        f"--exec-root={folder}/exec",
        f"--pidfile={folder}/docker.pid",
        "--exec-opt=native.cgroupdriver=cgroupfs",
    ]
    with (folder / "dockerd.log").open("w", encoding="utf-8") as log:
        daemon = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_for(daemon, folder, environ)
        yield
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(STOP_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        for tool, policy in policies.items():
            _remove_rules(tool, environ)
            run(tool, *policy.split(), environ=environ)
        forwarding.write_text(forwarded, encoding="utf-8")
        with contextlib.suppress(MissingPartError):  # it made none, if it did not start
            run("ip", "link", "delete", "docker0", environ=environ)
        for mount in re.findall(rf"^\S+ ({re.escape(str(folder))}\S*)", Path("/proc/mounts").read_text(), re.MULTILINE):
            with contextlib.suppress(MissingPartError):
                run("umount", mount)


def _wait_for(daemon: subprocess.Popen[bytes], folder: Path, environ: dict[str, str]) -> None:
    ends_at = time.monotonic() + START_S
    while True:
        try:
            run("docker", "info", environ=environ)
            return
        except MissingPartError:
            if daemon.poll() is not None or time.monotonic() > ends_at:
                last = (folder / "dockerd.log").read_text(encoding="utf-8").strip().splitlines()[-1:]
                raise MissingPartError(f"dockerd does not start: {''.join(last)}") from None
        time.sleep(0.2)


def _remove_rules(tool: str, environ: dict[str, str]) -> None:
    """All rules that lead to chains or bridges of Docker, and these chains."""
    for table in ("filter", "nat"):
        lines = run(tool, "-t", table, "-S", environ=environ).splitlines()
        for line in lines:
            if line.startswith("-A") and re.search(r"DOCKER|docker0|br-[0-9a-f]{12}", line):
                run(tool, "-t", table, "-D", *line.split()[1:], environ=environ)
        for chain in (line.split()[1] for line in lines if line.startswith("-N DOCKER")):
            run(tool, "-t", table, "-X", chain, environ=environ)
