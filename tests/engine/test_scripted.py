import asyncio
from pathlib import Path

import numpy as np
import pytest

from lego.capture.crosscheck import fault
from lego.engine.scripted import ScriptedEngine
from lego.errors import EngineError
from lego.records import Floats, Ids, Sampling, VersionSpan

PROMPT = np.array([1, 2, 3, 4, 5], np.int32)


async def test_the_answer_is_what_the_script_says_for_the_prompt():
    engine = ScriptedEngine(lambda ids: [ids[-1] + 1, 9])
    got = await engine.generate(PROMPT, Sampling(), session="s")
    assert (got.prompt_len, got.output_ids.tolist(), got.finish) == (5, [6, 9], "stop")
    assert len(got.logprobs) == 2 and (got.logprobs < 0).all()
    assert engine.calls[0].session == "s"


async def test_routing_rows_are_valid_and_a_later_turn_repeats_those_of_the_turn_before():
    engine = ScriptedEngine(lambda ids: [7, 8], experts=(3, 8, 2))
    first = await engine.generate(PROMPT, Sampling(), session="s")
    assert first.routing is not None and first.routing.shape == (5 + 2 - 1, 3, 2)
    assert fault(first, Sampling(), prompt_len=5, routing_start=0, experts=8) is None
    longer = np.array([*PROMPT, 7, 8, 3], np.int32)
    whole = await engine.generate(longer, Sampling(), session="s")
    tail = await engine.generate(longer, Sampling(), session="s", routing_start=4)
    assert whole.routing is not None and tail.routing is not None
    np.testing.assert_array_equal(whole.routing[:6], first.routing)
    np.testing.assert_array_equal(whole.routing[4:], tail.routing)


async def test_an_answer_longer_than_max_tokens_is_cut_and_says_length():
    got = await ScriptedEngine(lambda _: [1, 2, 3]).generate(PROMPT, Sampling(max_tokens=2), session="s")
    assert (got.output_ids.tolist(), got.finish) == ([1, 2], "length")


async def test_with_stop_ids_only_an_answer_that_ends_in_one_says_stop():
    engine = ScriptedEngine(lambda ids: [2, int(ids[0])], stop_ids={1})
    assert (await engine.generate(PROMPT, Sampling(), session="s")).finish == "stop"
    assert (await engine.generate(PROMPT[1:], Sampling(), session="s")).finish == "length"


async def test_an_empty_script_is_an_engine_error():
    with pytest.raises(EngineError, match="no answer"):
        await ScriptedEngine(lambda _: []).generate(PROMPT, Sampling(), session="s")


async def test_an_update_labels_later_answers():
    engine = ScriptedEngine(lambda _: [1], experts=None)
    await engine.update(Path("w"), 4)
    got = await engine.generate(PROMPT, Sampling(), session="s")
    assert got.versions == (VersionSpan(version=4, start=0, stop=1),) and got.routing is None


async def test_progress_is_told_in_chunks_of_the_given_sizes_over_and_over():
    told: list[tuple[Ids, Floats]] = []
    engine = ScriptedEngine(lambda _: range(12), chunks=(1, 2, 5))
    got = await engine.generate(PROMPT, Sampling(max_tokens=11), session="s", progress=lambda *now: told.append(now))
    assert [len(ids) for ids, _ in told] == [1, 3, 8, 9, 11]
    for ids, logprobs in told:
        np.testing.assert_array_equal(ids, got.output_ids[: len(ids)])
        np.testing.assert_array_equal(logprobs, got.logprobs[: len(ids)])


async def test_without_chunks_progress_is_told_the_whole_once():
    told: list[int] = []
    await ScriptedEngine(lambda _: [1, 2, 3]).generate(
        PROMPT, Sampling(), session="s", progress=lambda ids, _: told.append(len(ids))
    )
    assert told == [3]


@pytest.mark.parametrize(
    "engine",
    [
        ScriptedEngine(lambda _: [1], seconds=30),
        ScriptedEngine(lambda _: range(400), chunks=(1,), chunk_seconds=0.05),
    ],
)
async def test_a_cancelled_call_is_recorded_at_once_and_no_others(engine: ScriptedEngine):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await engine.generate(PROMPT, Sampling(), session="s")
    assert engine.cancelled == engine.calls and len(engine.calls) == 1
