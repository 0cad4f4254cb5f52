"""Which calls wait before a full engine, in which order they go, and what the numbers say that decide it."""

import asyncio

import numpy as np
import pytest

from lego.engine.admission import Admission, Gate, Load, Want, admits, helps
from lego.engine.placing import Places
from lego.engine.usage import Growth, LastUpdate, PoolUsage, Reading, read_metrics
from lego.records import Ids

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="policy"} 1000.0
vllm:prefix_cache_queries_created{engine="0",model_name="policy"} 1.79e+09
vllm:prefix_cache_hits_total{engine="0",model_name="policy"} 640.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",note="a \\"b\\"",num_gpu_blocks="100"} 1.0
python_gc_objects_collected_total{generation="0"} 5
"""
FULL = Reading(kv_usage=0.95, cache_tokens=1000)
ROOM = Reading(kv_usage=0.1, cache_tokens=1000)
RULE = Admission()


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


def want(session: str, *prompt: int, hit: float = 0.0) -> Want:
    return Want(session=session, prompt_ids=ids(*prompt or (1, 2)), hit_share=hit)


def test_the_numbers_are_read_from_what_vllm_tells():
    got = read_metrics(METRICS)
    assert got == Reading(running=3, waiting=1, kv_usage=0.25, cache_tokens=3200, prefix_queries=1000, prefix_hits=640)
    assert read_metrics("") == Reading()


def test_of_several_cores_tokens_add_up_and_the_fullest_counts():
    other = METRICS.replace('engine="0"', 'engine="1"').replace("0.25", "0.75")
    got = read_metrics(METRICS + other)
    assert (got.kv_usage, got.cache_tokens, got.running, got.prefix_hits) == (0.75, 6400, 6, 1280)


@pytest.mark.parametrize(
    "line", ["vllm:kv_cache_usage_perc{", 'vllm:num_requests_running{a="b"} x', "vllm:kv_cache_usage_perc"]
)
def test_a_line_that_cannot_be_read_is_refused(line: str):
    with pytest.raises(ValueError):
        read_metrics(METRICS + line)


def test_a_counter_goes_on_when_its_server_starts_again():
    growth = Growth()
    for count in (None, 5, 9, 2, None, 4):
        growth.read(count)
    assert growth.total == 13


def test_metrics_leave_out_what_nobody_measured():
    assert "engine/kv_usage" not in PoolUsage().metrics()
    update = LastUpdate(seconds=2.0, bytes=10, pause_seconds=1.0)
    told = PoolUsage(kv_usage=0.5, last_update=update).metrics()
    assert told["engine/kv_usage"] == 0.5 and told["engine/update_pause_seconds"] == 1.0


@pytest.mark.parametrize(
    ("reading", "most", "wanted"),
    [
        (Reading(), 10**9, False),
        (FULL, 1000, False),
        (FULL, 1001, True),
        (Reading(kv_usage=0.5), 1, True),
    ],
)
def test_admission_is_off_where_it_cannot_help(reading: Reading, most: int, wanted: bool):
    assert helps(reading, most) is wanted


@pytest.mark.parametrize(
    ("load", "hit", "wanted"),
    [
        (Load(reading=ROOM, running=5), 0.0, True),
        (Load(reading=FULL, running=5), 0.0, False),
        (Load(reading=FULL, running=5), 0.8, True),
        (Load(reading=FULL, running=5), 0.79, False),
        (Load(reading=FULL, running=0, idle_s=2.0), 0.0, True),
        (Load(reading=FULL, running=0, idle_s=1.9), 0.0, False),
        (Load(reading=FULL, running=1, idle_s=2.0), 0.0, False),
        (Load(reading=ROOM, running=5, since=799), 0.0, True),
        (Load(reading=ROOM, running=5, since=801), 0.0, False),
        (Load(reading=FULL, running=5, since=-100), 0.0, True),
    ],
)
def test_a_call_starts_below_the_watermark_or_if_it_is_cheap_or_the_engine_idle(load: Load, hit: float, wanted: bool):
    assert admits(RULE, load, hit) is wanted


async def line(gate: Gate, *wants: Want) -> tuple[list[str], list["asyncio.Task[bool]"]]:
    """Sends calls to the gate one after the other; the list tells who got in, in order."""
    entered: list[str] = []

    async def enter(call: Want) -> bool:
        let_in = await gate.enter(call)
        entered.append(call.session if let_in else f"not {call.session}")
        return let_in

    tasks = []
    for call in wants:
        tasks.append(asyncio.create_task(enter(call)))
        await asyncio.sleep(0)
    await settled()
    return entered, tasks


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def full(*more: Want) -> tuple[Gate, list[str], list["asyncio.Task[bool]"]]:
    """A gate before an engine that is busy and full, and calls in its line."""
    gate = Gate(RULE, 10**6)
    assert await gate.enter(want("first"))
    gate.read(FULL)
    return gate, *await line(gate, *more)


async def test_calls_wait_in_order_while_the_engine_is_full():
    gate, entered, tasks = await full(want("a"), want("b"), want("c"))
    assert entered == [] and gate.waiting == 3
    gate.read(ROOM)
    await settled()
    assert entered == ["a", "b", "c"] and gate.running == 4 and all(task.result() for task in tasks)


async def test_tokens_let_in_since_the_reading_count():
    gate, entered, _ = await full(*(want(name, *range(500)) for name in "abc"))
    gate.read(ROOM)
    await settled()
    assert entered == ["a", "b"]  # 0.1, 0.6; at 1.1 of the cache the next one waits
    gate.leave(500)
    await settled()
    assert entered == ["a", "b", "c"]


async def test_a_new_reading_counts_all_that_came_before_it():
    gate = Gate(RULE, 10**6)
    gate.read(ROOM)
    assert await gate.enter(want("big", *range(850)))
    entered, _ = await line(gate, want("next"))
    assert entered == []
    gate.read(ROOM)
    await settled()
    assert entered == ["next"]


async def test_a_cheap_call_goes_past_those_that_wait_and_a_dear_one_does_not():
    gate, entered, _ = await full(want("dear"), want("cheap", hit=0.9), want("other"))
    assert entered == ["cheap"] and gate.waiting == 2


async def test_a_retry_takes_the_place_of_the_attempt_it_repeats_which_goes_last():
    gate, entered, tasks = await full(want("a", 1, 2), want("b"), want("c"), want("a", 1, 3))
    newest = want("a", 1, 2)
    more, _ = await line(gate, newest)
    place = [call for call, _ in gate._line]
    assert [call.session for call in place] == ["a", "b", "c", "a", "a"] and place[0] is newest
    tasks[0].cancel()  # its client had gone
    await settled()
    gate.read(ROOM)
    await settled()
    assert more == ["a"] and entered == ["b", "c", "a"] and gate.waiting == 0


async def test_an_idle_engine_is_given_a_call_after_a_grace():
    gate = Gate(Admission(idle_grace_s=0.05), 10**6)
    gate.read(FULL)
    assert await gate.enter(want("never used"))
    entered, _ = await line(gate, want("a"))
    gate.leave(2)
    await settled()
    assert entered == []
    await asyncio.sleep(0.06)
    gate.read(FULL)
    await settled()
    assert entered == ["a"]


async def test_who_is_cancelled_leaves_the_line_or_its_place_in_the_engine():
    gate, entered, tasks = await full(want("a"), want("b"), want("c"))
    tasks[1].cancel()
    await settled()
    assert gate.waiting == 2
    gate.read(ROOM)
    tasks[0].cancel()  # let in and cancelled at once
    await settled()
    assert entered == ["c"] and gate.waiting == 0 and gate.running == 2


async def test_when_the_engine_goes_all_who_wait_are_told():
    gate, entered, _ = await full(want("a"), want("b"))
    gate.close()
    await settled()
    assert entered == ["not a", "not b"] and gate.waiting == 0
    assert await gate.enter(want("c"))  # nothing is known of the next life's cache


def test_problems_name_the_field_the_value_and_the_range():
    assert not list(Admission().problems())
    assert list(Admission(high_watermark=0.0, hit_threshold=1.5, idle_grace_s=-1.0).problems()) == [
        "engine.admission.high_watermark: 0.0, wanted over 0, up to 1",
        "engine.admission.hit_threshold: 1.5, wanted over 0, up to 1",
        "engine.admission.idle_grace_s: -1.0, wanted 0 or more",
    ]


def test_a_session_is_where_it_was_or_where_least_is_going_on():
    places = Places()
    assert places.choose("a", {0: 3, 1: 2, 2: 2}) == 1
    places.put("a", 1, 0, ids(1))
    assert places.choose("a", {0: 0, 1: 9}) == 1
    assert places.choose("a", {0: 4, 2: 3}) == 2
    places.put("a", 2, 0, ids(1))
    assert places.moved == 1 and places.choose("a", {0: 0, 1: 0, 2: 9}) == 2


def test_what_an_engine_knows_of_a_prompt_is_the_sessions_last_one_if_it_begins_with_it():
    places = Places()
    places.put("a", 0, 1, ids(1, 2, 3))
    assert places.hit_share("a", 0, 1, ids(1, 2, 3, 4)) == 0.75
    assert places.hit_share("a", 0, 1, ids(1, 2, 3)) == 1.0
    for session, replica, cache, prompt in (
        ("b", 0, 1, ids(1, 2, 3, 4)),
        ("a", 1, 1, ids(1, 2, 3, 4)),
        ("a", 0, 2, ids(1, 2, 3, 4)),
        ("a", 0, 1, ids(1, 2)),
        ("a", 0, 1, ids(1, 2, 9, 4)),
    ):
        assert places.hit_share(session, replica, cache, prompt) == 0.0


def test_sessions_that_were_not_heard_of_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lego.engine.placing.SESSIONS_KEPT", 2)
    places = Places()
    for session, replica in (("a", 5), ("b", 5), ("a", 5), ("c", 5)):
        places.put(session, replica, 0, ids(1))
    assert [places.choose(session, {0: 0, 5: 1}) for session in "abc"] == [5, 0, 5]


async def test_one_who_is_cancelled_while_another_one_ends_is_not_let_in():
    gate, entered, (waiting,) = await full(want("a"))
    waiting.cancel()  # hears of it in the loop's next turn only
    gate.read(ROOM)
    gate.leave(2)
    await settled()
    assert waiting.cancelled() and entered == [] and (gate.running, gate.waiting) == (0, 0)
