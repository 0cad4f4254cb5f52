"""What transformers computes for the same weights and tokens, in float32: the truth the engine is held against."""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from lego.records import Floats, Ids, Routing


@cache
def _load(folder: Path):
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference(folder: Path, ids: Ids, start: int, temperature: float = 1.0) -> tuple[Floats, Routing]:
    """Logprobs of `ids[start:]` and the experts of all tokens but the last, sorted in each row."""
    model = _load(folder)
    with torch.no_grad():
        out = model(torch.tensor(ids[None].astype(np.int64)), output_router_logits=True)
    logprobs = torch.log_softmax(out.logits[0, :-1] / temperature, -1)
    taken = logprobs.gather(-1, torch.tensor(ids[1:, None].astype(np.int64)))[:, 0]
    top_k = model.config.num_experts_per_tok
    experts = torch.stack([layer[: len(ids)].topk(top_k, -1).indices for layer in out.router_logits], 1)[:-1]
    return taken[start - 1 :].numpy(), np.sort(experts.numpy().astype(np.uint8), -1)
