"""The transport between GPU servers of one machine: CUDA IPC where that works, otherwise TCP."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.checkpoints import load_reference, make_checkpoint
from tests.cluster.greedy import generate_all, same_tokens
from tests.cluster.servers import cluster, wait_until

pytestmark = pytest.mark.gpu

PROMPTS = [[7 * at % 250 + 1 for at in range(length)] for length in (1, 17, 200)]
IN_A_PID_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.parametrize(
    ("launcher", "transport"),
    [pytest.param((), "nvlink", id="one PID namespace"), pytest.param(IN_A_PID_NAMESPACE, "tcp", id="two")],
)
def test_first_working_transport_is_used(launcher: Sequence[str], transport: str, tmp_path: Path) -> None:
    """Containers of one host have different PID namespaces and the same boot id: CUDA IPC fails between them."""
    if launcher and shutil.which("unshare") is None:
        pytest.fail("unshare (util-linux) is missing: it simulates two containers")
    model = make_checkpoint(tmp_path / "model", "qwen3", dtype=torch.float32)
    flags = ("--device", "cuda", "--dtype", "float32", "--kv-tokens", "4096")
    with cluster(tmp_path) as started:
        prefill, decode = started.pair(model, flags, flags, launcher=launcher)
        outputs = generate_all(decode, PROMPTS, 8, together=False)
        reference = load_reference(model, torch.float32).cuda()
        assert all(same_tokens(reference, PROMPTS, outputs, 8, noise=None))
        wait_until(lambda: prefill.info()["peers"][0]["transports"] == {"k+v": transport}, 5, "the transport is known")
        (peer,) = prefill.info()["peers"]
        assert list(peer["unusable_transports"]) == (["nvlink"] if launcher else [])
        log = prefill.log.read_text()
    assert log.count("because nvlink does not work") == bool(launcher)
    assert ("pid: host" in log) == bool(launcher), "the log names the remedy if and only if it is needed"
