"""Whether a prefill and a decode server fit together, decided when they meet and not when a transfer fails."""

from .layout import describe_mismatch
from .messages import Hello, Welcome


def describe_versions(prefill: int, decode: int) -> str:
    """The sentence about two different protocol versions."""
    return f"protocol version differs: prefill speaks {prefill}, decode speaks {decode}"


def check_pair(hello: Hello, welcome: Welcome) -> str | None:
    """One sentence naming both values when the two must not pair; None when they fit.

    The first difference counts: of different protocol versions, nothing further is compared. Both sides can call this
    with the same two messages and come to the same sentence.
    """
    if welcome.protocol_version != hello.protocol_version:
        return describe_versions(welcome.protocol_version, hello.protocol_version)
    if welcome.model_fingerprint != hello.model_fingerprint:
        return (
            f"models differ: prefill serves {welcome.model_name} ({welcome.model_fingerprint}), "
            f"decode serves {hello.model_name} ({hello.model_fingerprint})"
        )
    if len(welcome.ranks) != len(hello.ranks):
        return f"ranks differ: prefill has {len(welcome.ranks)}, decode has {len(hello.ranks)}"
    for ours, theirs in zip(welcome.ranks, hello.ranks, strict=True):
        if len(ours.pools) != len(theirs.pools):
            return (
                f"KV pools of rank {theirs.rank} differ: prefill has {len(ours.pools)}, decode has {len(theirs.pools)}"
            )
        for source, destination in zip(ours.pools, theirs.pools, strict=True):
            mismatch = describe_mismatch(source.layout, destination.layout)
            if mismatch is not None:
                return f"rank {theirs.rank}: {mismatch}"
    return None
