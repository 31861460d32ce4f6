"""The stages of a request's timeline."""

STAGES = {
    "queue": "waiting for a grammar or for memory on decode",
    "prefill_queue": "behind other prompts",
    "prefill": "computing the prompt",
    "transfer": "KV still on its way",
    "control": "messages between the servers",
    "admit": "joining the decode batch",
    "retracted": "retracted, waiting for memory",
    "decode": "generating",
}
"""In the order of a timeline."""
AFTER_FIRST_TOKEN = ("admit", "retracted", "decode")
"""Stages that are not part of the time to first token."""
