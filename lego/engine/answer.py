"""The body of vLLM's /inference/v1/generate: what we ask, and the streamed answer gathered and checked. Pure.

An answer that cannot be read, or is not of this model, raises EngineError with the numbers. Whether its lengths,
logprobs, versions and rows are right is for the capture to check (`lego.capture.crosscheck`), which counts.
"""

import base64
import binascii
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from lego.engine.folder import ModelFolder
from lego.errors import EngineError
from lego.records import Floats, Generation, Ids, Routing, Sampling, VersionSpan

STREAM_INTERVAL = 16
"""Tokens of a chunk, but for the first, which comes alone, and the last."""


def request_body(prompt_ids: Ids, sampling: Sampling, stop_ids: Sequence[int], routing_start: int) -> dict[str, Any]:
    """Every sampling field in full, so that no default of server or model folder decides anything."""
    return {
        "token_ids": prompt_ids.tolist(),
        "stream": True,
        "stream_options": {"include_usage": True},
        "sampling_params": {
            "n": 1,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "min_p": sampling.min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": sampling.seed,
            "max_tokens": sampling.max_tokens,
            "min_tokens": 0,
            "stop": [],
            "stop_token_ids": list(stop_ids),
            # The stop ids above are the only way to stop, whatever the server thinks the end token is.
            "ignore_eos": True,
            "logprobs": 0,
            "prompt_logprobs": None,
            "logit_bias": None,
            "allowed_token_ids": None,
            "bad_words": None,
            "stream_interval": STREAM_INTERVAL,
            "detokenize": False,
            "skip_special_tokens": False,
            "routed_experts_prompt_start": routing_start,
        },
    }


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What an answer is checked against."""

    model: ModelFolder
    prompt_len: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    routing_start: int | None
    """First routing row wanted; None where routing is off."""


class Answer:
    """One answer while its chunks come: each is checked as it comes, the whole at the end."""

    def __init__(self, asked: Asked) -> None:
        self.ids: Ids = np.zeros(0, np.int32)
        self.logprobs: Floats = np.zeros(0, np.float32)
        self._asked = asked
        self._last: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None

    def add(self, chunk: dict[str, Any]) -> bool:
        """Whether the chunk brought tokens."""
        before = len(self.ids)
        with _all_fields():
            self._usage = chunk["usage"] or self._usage
            for choice in chunk["choices"]:
                ids = np.array(choice["token_ids"], np.int32)
                _check_ids(ids, self._asked.model.vocab_size)
                logprobs = _logprobs(choice["logprobs"]["content"], ids)
                self.ids = np.concatenate([self.ids, ids])
                self.logprobs = np.concatenate([self.logprobs, logprobs])
                self._last = choice
        return len(self.ids) > before

    def generation(self) -> Generation:
        """The whole answer. Finish, routing and weight versions come with the last tokens, usage after them."""
        asked, last = self._asked, self._last
        with _all_fields():
            _check_finish(last["finish_reason"], self.ids, asked)
            return Generation(
                prompt_len=(self._usage or {})["prompt_tokens"],
                output_ids=self.ids,
                logprobs=self.logprobs,
                routing=_routing(last["routed_experts"], asked),
                routing_start=asked.routing_start or 0,
                versions=_versions(last["weight_versions"]),
                finish=last["finish_reason"],
            )


@contextmanager
def _all_fields() -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError) as error:
        raise EngineError(f"engine's answer lacks a field: {error!r}") from error


def _check_finish(finish: str, ids: Ids, asked: Asked) -> None:
    if finish not in ("stop", "length"):
        raise EngineError(f"engine ended the answer with finish_reason {finish!r} after {len(ids)} tokens")
    if finish == "stop" and len(ids) and ids[-1] not in asked.stop_ids:
        raise EngineError(f"engine stopped at token {ids[-1]}, which is none of the stop tokens {list(asked.stop_ids)}")


def _check_ids(ids: Ids, vocab_size: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise EngineError(f"engine sampled ids {ids.min()} to {ids.max()} of a vocabulary of {vocab_size}")


def _logprobs(content: list[dict[str, Any]], ids: Ids) -> Floats:
    if len(content) != len(ids):
        raise EngineError(f"engine sent {len(ids)} output ids but {len(content)} logprobs")
    of = np.array([entry["token_id"] for entry in content])
    if len(other := np.flatnonzero(of != ids)):
        i = other[0]
        raise EngineError(f"logprob {i} of {len(ids)} is of token {of[i]}, not {ids[i]}")
    return np.array([entry["logprob"] for entry in content], np.float32)


def _routing(text: str | None, asked: Asked) -> Routing | None:
    """Rows of the layers that route, `[rows, moe layers, experts per token]`; None where there are none."""
    if asked.routing_start is None or text is None:
        return None
    model, routing = asked.model, _decode(text)
    wanted = (model.layers, model.experts_per_token)
    if routing.shape[1:] != wanted or routing.dtype not in (np.uint8, np.uint16):
        raise EngineError(f"engine sent {routing.dtype} routing rows of {routing.shape[1:]}, wanted {wanted}")
    return routing[:, list(model.moe_layers)] if len(model.moe_layers) < model.layers else routing


def _decode(text: str) -> Routing:
    try:
        return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError, binascii.Error) as error:
        raise EngineError(f"engine's routed experts are unreadable: {error}") from error


def _versions(spans: list[dict[str, Any]] | None) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=_version(s["version"]), start=s["start"], stop=s["end"]) for s in spans or ())


def _version(label: str) -> int:
    if not label.isdecimal():
        raise EngineError(f"weight version {label!r} is not one of ours: something else set the engine's weights")
    return int(label)
