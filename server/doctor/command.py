"""`pdserve doctor`: checks this machine and prints its findings. Exit code: 2 if one is a failure, 1 with --strict if
one is a warning, otherwise 0.
"""

import json
import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from ...common.logs import configure_logging
from ...common.words import counted
from ...transfer.mooncake.infiniband import devices_for_rank
from .checks import LEVELS, Finding, Level, check_all, worst
from .collect import collect
from .facts import Facts, Transfer
from .handshake import greet
from .options import DoctorOptions
from .trial_transfer import measure

STYLES: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}
NOT_LOADED = "does not load"


def run_doctor(options: DoctorOptions) -> int:
    configure_logging("error", "doctor")
    config = options.config
    key = config.cluster_key.get_secret_value() if config.cluster_key is not None else None
    peers = tuple(greet(endpoint, key) for endpoint in options.peers)
    transfers = _measure_all(options) if options.measures else ()
    problem = next((one.problem for one in transfers if one.problem and NOT_LOADED in one.problem), None)
    facts = collect(config, transfers=transfers, mooncake_problem=problem, peers=peers)
    findings = check_all(facts)
    if options.as_json:
        print(as_json(facts, findings))
    else:
        print_findings(findings, Console(file=sys.stdout, highlight=False, soft_wrap=True))
    return {"ok": 0, "warn": int(options.strict), "fail": 2}[worst(findings)]


def _measure_all(options: DoctorOptions) -> tuple[Transfer, ...]:
    """One transfer over each transport that this machine has the hardware for."""
    config = options.config
    found = [measure("tcp", config.public_host)]
    if devices := devices_for_rank(config.ib_device, 0):
        found.append(measure("rdma", config.public_host, devices))
    if config.device != "cpu" and _has_gpu():
        found.append(measure("nvlink", config.public_host))
    return tuple(found)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    document = {"status": worst(list(findings)), "findings": findings, "facts": facts}
    return json.dumps(msgspec.to_builtins(document), indent=2)


def print_findings(findings: Sequence[Finding], out: Console) -> None:
    """A line for each finding, and a line below it with what to do."""
    for finding in findings:
        level = Text(f"{finding.level:<5}", style=STYLES[finding.level])
        out.print(Text.assemble(level, f"{finding.check:<12}", finding.message))
        if finding.remedy:
            out.print(Text(f"{'':17}-> {finding.remedy}"))
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    out.print(Text(f"{counts['ok']} ok, {counted(counts['warn'], 'warning')}, {counted(counts['fail'], 'failure')}"))
