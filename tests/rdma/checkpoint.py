"""`python -m tests.rdma.checkpoint FOLDER`: writes a tiny checkpoint with sparse attention, prompts, and the answers of
transformers. Runs on the host, where transformers is imported in seconds instead of minutes.
"""

import json
import random
import sys
from pathlib import Path

from tests.checkpoints import load_reference, make_dsa_checkpoint, reference_greedy

LENGTHS = (20, 60, 150)
NEW_TOKENS = 4
LAYERS = 2
TOPK = 16


def main(folder: Path) -> None:
    model = make_dsa_checkpoint(folder, "deepseek_v32", index_topk=TOPK, num_hidden_layers=LAYERS)
    draw = random.Random(4)
    reference = load_reference(model)
    prompts = [draw.choices(range(256), k=length) for length in LENGTHS]
    answers = [[prompt, reference_greedy(reference, prompt, NEW_TOKENS)] for prompt in prompts]
    (folder / "answers.json").write_text(json.dumps(answers), encoding="ascii")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
