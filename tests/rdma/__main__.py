"""`make test-rdma`: runs the tests of this folder in a virtual machine with SoftRoCE, with a line for each step.
`make test-rdma-all` also runs those between two machines, and kills a receiver twenty times. With ARGS=--record the
figures go into benchmarks/results if all tests have passed.

Ends with 0 if all have passed, with 1 if not, and with 77 and one line if this host cannot run the machine.
"""

import signal
import subprocess
import sys
import time

from .figures import Measured, keep, largest
from .machine import CACHE, REPOSITORY, Machine, UnavailableError, build, two_machines

TEST_TIMEOUT_S = 1800.0
UNAVAILABLE = 77
NOTE = "RDMA was run with SoftRoCE in a virtual machine; an HCA was not"
MODEL = CACHE / "model"
PYTEST = f"""
cd {REPOSITORY}
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH=.dev:. PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PDSERVE_RDMA=10.8.0.1 PDSERVE_RDMA_MODEL={MODEL}
{sys.executable} -m pytest -c /dev/null --rootdir . -p no:cacheprovider --noconftest -v -W error -rP"""
TESTS = (
    "tests/rdma/test_engines.py tests/rdma/test_faults.py",
    "tests/rdma/test_senders.py tests/rdma/test_pair.py",
)
"""Each entry is a process. Importing torch takes minutes in the virtual machine, so what needs it comes last."""

BETWEEN_TWO = "tests/rdma/test_two_machines.py"
KILLS = 20
WANTED_MINUTES = 25.0


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the machines, too

    def step(text: str) -> None:
        print(f"test-rdma: {time.monotonic() - started:4.0f} s: {text}", flush=True)

    try:
        step("build the virtual machine")
        lock = build()
        step("boot it")
        machine = Machine()
    except UnavailableError as error:
        print(f"test-rdma: not run: {error}", flush=True)
        return UNAVAILABLE
    full = "--all" in arguments
    wanted = [argument for argument in arguments if not argument.startswith("--")]
    failed: list[str] = []
    outputs: list[str] = []

    def run(machine: Machine, setting: str, tests: str) -> None:
        step(f"run {tests}")
        script = f"export {setting}\n{PYTEST} {tests}"
        status, output = machine.run(script, TEST_TIMEOUT_S * (3 if full else 1), echo=True)
        outputs.append(output)
        if status:
            failed.append(tests)

    with lock, machine:
        step("write a checkpoint and the answers of transformers")
        subprocess.run([sys.executable, "-m", "tests.rdma.checkpoint", MODEL], cwd=REPOSITORY, check=True)
        step(f"its RDMA port is {machine.wait_up()}")
        for tests in wanted or TESTS:
            run(machine, f"PDSERVE_RDMA_KILLS={KILLS if full else 1}", tests)
    if full:
        step("boot two machines, joined by a socket")
        with two_machines() as (first, _):
            run(first, "PDSERVE_RDMA_MACHINES=2", BETWEEN_TWO)
    command = f"make test-rdma{'-all' if full else ''}"
    minutes = Measured(command, (time.monotonic() - started) / 60, None if full else WANTED_MINUTES, "min")
    figures = [*largest("\n".join(outputs)), minutes]
    for one in figures:
        step(f"{one.figure}: {one.value:.2f} {one.unit}" + ("" if one.target is None else f", at most {one.target:g}"))
    if "--record" in arguments and not wanted and not failed:
        keep(figures, command)
    step(f"failed: {', '.join(failed)}" if failed else f"passed. {NOTE}")
    return 1 if failed else 0


sys.exit(main(sys.argv[1:]))
