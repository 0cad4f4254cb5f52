import base64
import io
import re
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lego.capture.crosscheck import fault
from lego.engine.answer import Answer, Asked, request_body
from lego.engine.folder import ModelFolder
from lego.errors import EngineError
from lego.records import Generation, Sampling

MODEL = ModelFolder(
    path=Path("m"), stop_ids=(9,), vocab_size=10, experts=4, experts_per_token=2, layers=3, moe_layers=(0, 1, 2)
)
ROWS = 7  # prompt 5, output 3


def rows(n: int = ROWS) -> np.ndarray:
    return np.tile(np.array([1, 3], np.uint8), (n, 3, 1))


def encode(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def body(**changes: Any) -> dict[str, Any]:
    ids = changes.get("token_ids", [4, 5, 9])
    choice = {
        "token_ids": ids,
        "finish_reason": "stop",
        "logprobs": {"content": [{"token_id": i, "logprob": -0.5} for i in ids]},
        "routed_experts": encode(rows()),
        "weight_versions": [{"version": "0", "start": 0, "end": 3}],
    }
    return {"choices": [choice | changes], "usage": {"prompt_tokens": 5}}


def asked(max_tokens: int = 3, *, start: int | None = 0, model: ModelFolder = MODEL) -> Asked:
    return Asked(
        model=model,
        prompt_len=5,
        sampling=Sampling(max_tokens=max_tokens),
        stop_ids=model.stop_ids,
        routing_start=start,
    )


def parse(chunk: dict[str, Any], *, start: int | None = 0, model: ModelFolder = MODEL) -> Generation:
    answer = Answer(asked(start=start, model=model))
    answer.add(chunk)
    return answer.generation()


def eight_tokens() -> dict[str, Any]:
    ids = [4, 4, 5, 4, 6, 5, 5, 9]
    return body(
        token_ids=ids,
        logprobs={"content": [{"token_id": token, "logprob": -0.1 * (i + 1)} for i, token in enumerate(ids)]},
        routed_experts=encode(rows(12)),
        weight_versions=[{"version": "0", "start": 0, "end": 3}, {"version": "1", "start": 3, "end": 8}],
    )


def cut(whole: dict[str, Any], sizes: list[int]) -> Iterator[dict[str, Any]]:
    """The same answer streamed: what belongs to the whole comes with the last tokens, usage in a chunk of its own."""
    (choice,) = whole["choices"]
    ids, content = choice["token_ids"], choice["logprobs"]["content"]
    ends = {name: choice[name] for name in ("finish_reason", "routed_experts", "weight_versions")}
    at = 0
    for size in sizes:
        part = slice(at, at := at + size)
        tokens = {"token_ids": ids[part], "logprobs": {"content": content[part]}}
        yield {"choices": [tokens | (ends if at == len(ids) else dict.fromkeys(ends))], "usage": None}
    yield {"choices": [], "usage": whole["usage"]}


@pytest.mark.parametrize("sizes", [[8], [1] * 8, [1, 2, 5], [5, 2, 1], [2, 1, 5], [3, 0, 5]])
def test_an_answer_in_chunks_of_any_sizes_is_the_plain_answer(sizes: list[int]):
    plain, chunked = Answer(asked(8)), Answer(asked(8))
    plain.add(eight_tokens())
    told = [len(chunked.ids) for chunk in cut(eight_tokens(), sizes) if chunked.add(chunk)]
    assert told == sorted(set(np.cumsum(sizes)))
    want, got = plain.generation(), chunked.generation()
    np.testing.assert_array_equal(got.output_ids, [4, 4, 5, 4, 6, 5, 5, 9])
    np.testing.assert_array_equal(got.logprobs, -0.1 * np.arange(1, 9, dtype=np.float32))
    for name, value in vars(want).items():
        np.testing.assert_array_equal(getattr(got, name), value)


def test_a_chunk_of_three_tokens_with_one_logprob_is_refused_at_once():
    first = next(cut(eight_tokens(), [3, 5]))
    del first["choices"][0]["logprobs"]["content"][1:]
    with pytest.raises(EngineError, match="3 output ids but 1 logprobs"):
        Answer(asked(8)).add(first)


@pytest.mark.parametrize(("kept", "words"), [(0, "lacks"), (1, "finish_reason None after 3"), (2, "lacks a field")])
def test_a_stream_without_its_finish_or_its_usage_is_no_answer(kept: int, words: str):
    answer = Answer(asked(8))
    for chunk in list(cut(eight_tokens(), [3, 5]))[:kept]:
        answer.add(chunk)
    with pytest.raises(EngineError, match=words):
        answer.generation()


def test_a_good_answer_is_taken_as_it_is():
    got = parse(body())
    assert (got.prompt_len, got.output_ids.tolist(), got.finish, got.routing_start) == (5, [4, 5, 9], "stop", 0)
    assert got.routing is not None and got.routing.shape == (7, 3, 2)
    assert [(v.version, v.start, v.stop) for v in got.versions] == [(0, 0, 3)]


def test_rows_before_the_start_are_neither_asked_for_nor_expected():
    sent = request_body(np.arange(5, dtype=np.int32), Sampling(), (9,), 4)
    assert sent["sampling_params"]["routed_experts_prompt_start"] == 4
    got = parse(body(routed_experts=encode(rows(3))), start=4)
    assert got.routing_start == 4 and got.routing is not None and len(got.routing) == 3


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, None),
        ({"routed_experts": encode(rows(6))}, "routing_rows"),
        ({"routed_experts": encode(rows(8))}, "routing_rows"),
        ({"routed_experts": encode(rows() * (np.arange(7) > 3)[:, None, None].astype(np.uint8))}, "routing_repeats"),
        ({"routed_experts": encode(rows() + np.uint8(1))}, "routing_experts"),
        ({"routed_experts": None}, "routing_missing"),
        ({"logprobs": {"content": [{"token_id": i, "logprob": -9999.0} for i in (4, 5, 9)]}}, "logprobs"),
        ({"token_ids": []}, "output_ids"),
        ({"token_ids": [4, 5, 6, 9]}, "output_ids"),
        ({"weight_versions": None}, "versions"),
        ({"weight_versions": [{"version": "0", "start": 0, "end": 2}]}, "versions"),
        ({"weight_versions": [{"version": "0", "start": 1, "end": 3}]}, "versions"),
    ],
)
def test_what_can_be_read_but_is_wrong_fails_the_cross_check(changes: dict[str, Any], cause: str | None):
    made = parse(body(**changes))
    assert fault(made, Sampling(max_tokens=3), prompt_len=5, routing_start=0, experts=4) == cause


def test_another_prompt_length_than_sent_fails_the_cross_check():
    answer = body()
    answer["usage"]["prompt_tokens"] = 4
    found = fault(parse(answer), Sampling(max_tokens=3), prompt_len=5, routing_start=0, experts=4)
    assert found == "prompt_length"


def test_rows_of_dense_layers_are_left_out_not_taken_for_zeros():
    model = ModelFolder(
        path=Path("m"), stop_ids=(9,), vocab_size=10, experts=4, experts_per_token=2, layers=3, moe_layers=(1, 2)
    )
    with_dense = rows()
    with_dense[:, 0] = 0
    got = parse(body(routed_experts=encode(with_dense)), model=model)
    assert got.routing is not None and got.routing.shape == (7, 2, 2) and got.routing.all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finish_reason": "abort"}, "finish_reason 'abort' after 3 tokens"),
        ({"finish_reason": None}, "finish_reason None"),
        ({"token_ids": [4, 5, 6]}, "stopped at token 6"),
        ({"token_ids": [4, 10, 9]}, "vocabulary of 10"),
        ({"logprobs": {"content": [{"token_id": 4, "logprob": -0.5}]}}, "3 output ids but 1 logprobs"),
        ({"logprobs": {"content": [{"token_id": 4, "logprob": -0.5}] * 3}}, "logprob 1 of 3 is of token 4, not 5"),
        ({"logprobs": None}, "lacks a field"),
        ({"routed_experts": "AAAA"}, "unreadable"),
        ({"routed_experts": encode(rows()[:, :2])}, "(2, 2), wanted (3, 2)"),
        ({"routed_experts": encode(rows().astype(np.int32))}, "int32 routing rows"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 3}]}, "version 'default'"),
    ],
)
def test_an_answer_that_is_not_as_asked_is_an_engine_error(changes: dict[str, Any], words: str):
    with pytest.raises(EngineError, match=re.escape(words)):
        parse(body(**changes))


def test_every_sampling_field_of_the_record_is_sent_and_all_others_are_neutral():
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, max_tokens=33, seed=5)
    sent = request_body(np.array([1, 2], np.int32), sampling, (9, 8), 0)["sampling_params"]
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "max_tokens": 33, "seed": 5}
    neutral = {"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
    assert wanted.items() | neutral.items() <= {k: v for k, v in sent.items() if not isinstance(v, list)}.items()
    assert (sent["stop"], sent["stop_token_ids"], sent["logprobs"]) == ([], [9, 8], 0)
    assert sent["prompt_logprobs"] is sent["logit_bias"] is sent["allowed_token_ids"] is sent["bad_words"] is None
    assert request_body(np.array([1], np.int32), Sampling(), (9,), 0)["sampling_params"]["top_k"] == 0


def test_routing_of_100_000_tokens_travels_as_binary_and_leaves_no_copy_behind():
    layers, top_k, prompt, length = 48, 8, 99_000, 1_000
    model = replace(MODEL, experts=128, experts_per_token=top_k, layers=layers, moe_layers=tuple(range(layers)))
    routing = np.tile(np.arange(top_k, dtype=np.uint8), (prompt + length - 1, layers, 1))
    text = encode(routing)
    choice = {
        "token_ids": [4] * length,
        "finish_reason": "length",
        "logprobs": {"content": [{"token_id": 4, "logprob": -0.5}] * length},
        "routed_experts": text,
        "weight_versions": [{"version": "0", "start": 0, "end": length}],
    }
    answer = Answer(replace(asked(length, model=model), prompt_len=prompt))
    tracemalloc.start()
    answer.add({"choices": [choice], "usage": {"prompt_tokens": prompt}})
    got = answer.generation()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert got.routing is not None and got.routing.dtype == np.uint8
    assert len(text) < 1.4 * routing.nbytes and held < 1.1 * routing.nbytes and peak < 4 * routing.nbytes
