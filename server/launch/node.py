"""`pdserve` on a machine with `--node-rank` above 0: starts the ranks of this machine, and exits when they end.

Machine 0 has the HTTP server, the scheduler and the control protocol. When machine 0 ends its ranks, or a rank on this
machine fails, all ranks of this machine end.
"""

import logging
import signal
import threading

from ...common.logs import configure_logging
from ...configs.schema import AnyServerConfig
from ...models.loading.catalog import locate_model
from ...scheduler.ranks.process import RankProcess, leader_address, meeting_point
from ...transfer.control.curve import ClusterKeys
from .model_files import with_local_model
from .startup_checks import check_startup

log = logging.getLogger("pdserve.node")

END_S = 10.0
"""How long ranks may take to end; the same as on the leader's machine (scheduler/ranks/group.py)."""


def run_node(config: AnyServerConfig) -> int:
    """Returns 0 when the leader ends its ranks, 1 when a rank fails or this process gets a signal. Raises StartupError
    for mistakes of the user.
    """
    configure_logging(config.log_level, f"{config.role} node {config.node_rank}", config.log_format)
    config = with_local_model(config)
    check_startup(config, locate_model(config.model, config.load_format))
    meet_at = meeting_point(config)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    assert config.cluster_key is not None, "the configuration requires it with nnodes > 1"
    keys, leader = ClusterKeys.derive(config.cluster_key.get_secret_value()), leader_address(meet_at)
    ranks = [RankProcess(config, rank, leader=leader, meet_at=meet_at, keys=keys) for rank in config.local_ranks]
    log.info("ranks %d to %d, leader at %s", ranks[0].rank, ranks[-1].rank, leader)
    statuses: dict[int, int | None] = {}

    def watch(rank: RankProcess) -> None:
        statuses[rank.rank] = rank.wait()
        ended.set()

    watchers = [threading.Thread(target=watch, args=(rank,), daemon=True) for rank in ranks]
    for watcher in watchers:
        watcher.start()
    ended.wait()
    by_leader = bool(statuses) and not any(statuses.values())  # they all end at about the same time
    for watcher in watchers:
        watcher.join(END_S if by_leader else 1.0)
    for rank in ranks:
        rank.let_go()
    for rank, watcher in zip(ranks, watchers, strict=True):
        watcher.join(END_S)
        if watcher.is_alive():
            rank.kill()
    failed = {rank: status for rank, status in sorted(statuses.items()) if status}
    for failed_rank, status in failed.items():
        log.error("rank %d ended with status %s", failed_rank, status)
    return 1 if failed or len(statuses) < len(ranks) else 0
