"""Virtual machines with RDMA for hosts without it: SoftRoCE (rdma_rxe) of Debian's kernel, in QEMU without KVM.

Nothing is installed on the host: its apt downloads the packages that it lacks into a cache folder, where they are
unpacked. The root of a machine is that of the host, so it runs this checkout with this virtual environment.
"""

import contextlib
import fcntl
import os
import platform
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Self, TextIO

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parents[1]
CACHE: Final = REPOSITORY / "build" / "rdma"
PACKAGES: Final = ("qemu-system-x86", "seabios", "busybox-static", "ibverbs-providers", "iproute2")
KERNEL: Final = "linux-image-amd64"
MODULES: Final = (
    *("virtio_pci", "virtio_net", "9pnet_virtio", "9p", "overlay"),
    *("crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm", "dummy", "macvlan", "sch_netem"),
)
MEMORY_MIB: Final = 3072
BOOT_TIMEOUT_S: Final = 900.0


class UnavailableError(Exception):
    """This host cannot run the machine; the text says what is missing."""


def build() -> TextIO:
    """Download and unpack what the machine consists of, unless that has been done. Returns the lock of the folder: one
    run at a time. Raises UnavailableError.
    """
    if platform.machine() != "x86_64":
        raise UnavailableError(f"the virtual machine needs an x86_64 host, this one is {platform.machine()}")
    CACHE.mkdir(parents=True, exist_ok=True)
    lock = (CACHE / "lock").open("w", encoding="ascii")
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not (CACHE / "complete").exists():
        _fetch()
    _write_initramfs()
    return lock


def _fetch() -> None:
    for tool in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise UnavailableError(f"the packages of the virtual machine come from Debian: this host has no {tool}")
    for folder in ("archives", "packages", "kernel"):
        shutil.rmtree(CACHE / folder, ignore_errors=True)
        (CACHE / folder).mkdir()
    kernel = re.search(r"Depends: (linux-image-\S+)", _run("apt-cache", "depends", KERNEL))
    if kernel is None:
        raise UnavailableError(f"apt knows no package {KERNEL}: is this Debian?")
    planned = _run("apt-get", "install", "--simulate", "--quiet", "--no-install-recommends", *PACKAGES)
    missing = re.findall(r"^Inst (\S+)", planned, re.MULTILINE)
    _unpack([kernel[1]], "kernel")
    _unpack(missing, "packages")
    (CACHE / "complete").touch()


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=CACHE / "archives", check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UnavailableError(f"{' '.join(command[:2])} failed: {reason}") from error


def _unpack(names: list[str], folder: str) -> None:
    before = set((CACHE / "archives").iterdir())
    _run("apt-get", "download", *names)
    root = CACHE / folder
    for archive in set((CACHE / "archives").iterdir()) - before:
        _run("dpkg-deb", "--extract", str(archive), str(root))
    for name in ("bin", "sbin", "lib"):  # as folders they would hide the links of the host's root
        if folder == "packages" and (root / name).is_dir():
            shutil.copytree(root / name, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(root / name)


def _write_initramfs() -> None:
    """An archive (cpio, "newc") with busybox, the kernel modules and `init`."""
    files = {path.stem: path for path in (CACHE / "kernel/lib/modules").rglob("*.ko")}
    order: list[str] = []
    for name in MODULES:
        _add_module(name, files, order)
    busybox = CACHE / "packages/usr/bin/busybox"
    content: dict[str, bytes | None] = dict.fromkeys(
        ("bin", "modules", "proc", "sys", "dev", "host", "packages", "changes", "root")
    )
    content["bin/busybox"] = (busybox if busybox.exists() else Path("/bin/busybox")).read_bytes()
    content["init"] = (HERE / "init").read_bytes().replace(b"#!/bin/sh", b"#!/bin/busybox sh")
    content["modules/order"] = " ".join(order).encode()
    content |= {f"modules/{name}": files[name].read_bytes() for name in order}
    with (CACHE / "initramfs").open("wb") as archive:
        for name, data in [*content.items(), ("TRAILER!!!", b"")]:
            mode = 0o40755 if data is None else 0o100755
            sizes = (0, mode, 0, 0, 1, 0, len(data or b""), 0, 0, 0, 0, len(name) + 1, 0)
            header = b"070701" + b"".join(b"%08X" % size for size in sizes) + name.encode() + b"\0"
            for part in (header, data or b""):
                archive.write(part + bytes(-len(part) % 4))


def _add_module(name: str, files: Mapping[str, Path], order: list[str]) -> None:
    """Append a module to `order`, after those it needs."""
    if name in order or name not in files:
        return  # what has no file is built into the kernel
    depends = re.search(rb"\0depends=([^\0]*)\0", files[name].read_bytes())
    for other in depends[1].decode().split(",") if depends is not None else ():
        _add_module(other, files, order)
    order.append(name)


class Machine:
    """A running virtual machine. `number` is the last part of its addresses, 10.9.0.x (RDMA) and 10.8.0.x (TCP).

    `links` are QEMU's options of network backends that join it to another machine: for eth0 and eth1. Without them it
    is alone.
    """

    def __init__(self, number: int = 1, links: tuple[str, str] | None = None, memory_mib: int = MEMORY_MIB) -> None:
        self.number = number
        share = CACHE / "share"
        self.folder = share / str(number)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        shutil.copy(HERE / "guest.sh", share)
        self._count = 0
        libraries = CACHE / "packages/usr/lib/x86_64-linux-gnu"
        path = f"{CACHE / 'packages/usr/bin'}:{os.environ['PATH']}"
        qemu = shutil.which("qemu-system-x86_64", path=path)
        if qemu is None:
            raise UnavailableError("qemu-system-x86_64 was not found")
        (kernel,) = (CACHE / "kernel/boot").glob("vmlinuz-*")
        command = [qemu, "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(memory_mib)]
        command += ["-nographic", "-no-reboot", "-vga", "none", "-kernel", str(kernel)]
        for data in ("qemu", "seabios"):
            command += ["-L", str(CACHE / "packages/usr/share" / data), "-L", f"/usr/share/{data}"]
        command += ["-initrd", str(CACHE / "initramfs")]
        command += ["-append", f"console=ttyS0 quiet panic=-1 mitigations=off nokaslr machine={number}"]
        folders = {
            "host": (Path("/"), ",readonly=on,multidevs=remap"),
            "packages": (CACHE / "packages", ",readonly=on"),
        }
        folders["share"] = (share, "")
        for name, (folder, options) in folders.items():
            command += ["-fsdev", f"local,id={name},path={folder},security_model=none{options}"]
            command += ["-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"]
        for index, link in enumerate(links or ("user,restrict=on,ipv6=off",)):
            command += ["-netdev", f"{link},id=net{index}"]
            address = f"52:54:00:00:0{index}:0{number}"
            # an MTU above 4096 lets RoCE use its largest one
            command += ["-device", f"virtio-net-pci,netdev=net{index},mac={address},host_mtu=4200,romfile="]
        with (self.folder / "console").open("wb") as console:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LD_LIBRARY_PATH": str(libraries), "QEMU_MODULE_DIR": str(libraries / "qemu")},
                start_new_session=True,
            )

    def wait_up(self) -> str:
        """Wait until scripts can run. Returns the state of the RDMA port."""
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while not (self.folder / "up").exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the virtual machine did not start:\n{self.console()}")
            time.sleep(0.2)
        return (self.folder / "up").read_text(encoding="ascii").strip()

    def console(self) -> str:
        return (self.folder / "console").read_text(encoding="utf-8", errors="replace")

    def start(self, script: str) -> Path:
        """Start a script of bash. Returns its log, which grows; beside it `.rc` appears at its end."""
        self._count += 1
        log = self.folder / f"{self._count}.log"
        new = self.folder / f"{self._count}.new"
        new.write_text(script, encoding="utf-8")
        new.rename(self.folder / f"{self._count}.sh")
        return log

    def run(self, script: str, timeout_s: float, *, echo: bool = False) -> tuple[int, str]:
        """Run a script to its end; with `echo` its output is printed as it comes. Raises TimeoutError."""
        log = self.start(script)
        ended, deadline, shown = log.with_suffix(".rc"), time.monotonic() + timeout_s, 0
        while True:
            over = ended.exists()
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            if echo:
                print(text[shown:], end="", flush=True)
            shown = len(text)
            if over:
                return int(ended.read_text(encoding="ascii")), text
            if self.process.poll() is not None:
                raise RuntimeError(f"the virtual machine ended:\n{self.console()[-2000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not finished after {timeout_s:g} s:\n{text[-2000:]}")
            time.sleep(0.2)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines joined by their eth0 and eth1, through sockets of the loopback. (QEMU's `socket` instead of `stream`
    would block the whole machine while the other one does not read.)
    """
    rdma, tcp = (f"addr.type=inet,addr.host=127.0.0.1,addr.port={free_port()}" for _ in range(2))
    with Machine(1, (f"stream,server=on,{rdma}", f"stream,server=on,{tcp}")) as first:
        first.wait_up()
        with Machine(2, (f"stream,server=off,{rdma}", f"stream,server=off,{tcp}")) as second:
            second.wait_up()
            yield first, second
