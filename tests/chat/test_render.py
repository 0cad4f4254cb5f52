import numpy as np
import pytest

from lego.chat.messages import BadMessage, Message, Tool, read_messages
from lego.chat.render import Renderer
from lego.errors import UsageError
from tests.chat.families import sampled
from tests.tiny import SPECIALS, write_model

START, END = 256 + SPECIALS.index("<|im_start|>"), 256 + SPECIALS.index("<|im_end|>")
THINK, THINK_END = 256 + SPECIALS.index("<think>"), 256 + SPECIALS.index("</think>")
BASH = Tool("bash", '{"type": "function", "function": {"name": "bash"}}')


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.load(write_model(tmp_path_factory.mktemp("model")))


def test_a_prompt_ends_in_a_plain_generation_prompt(renderer):
    text = renderer.decode(renderer.render([Message("system", "S"), Message("user", "U")], []))
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


def test_thinking_off_opens_the_answer_with_an_empty_think_block(renderer):
    off = Renderer.load(renderer.folder, thinking=False)
    ids = off.render([Message("user", "U")], [])
    assert off.decode(ids).endswith("assistant\n<think>\n\n</think>\n\n") and THINK in ids and THINK_END in ids


def test_the_next_turn_keeps_every_sampled_id_and_adds_one_newline(renderer):
    prompt = renderer.render([Message("user", "U")], [BASH])
    output = np.asarray([65, 66, END], np.int32)
    ids = renderer.extend(prompt, output, [Message("tool", "R", call_id="x")], [BASH])
    p = len(prompt)
    newline = renderer._vocabulary.encode("\n")[0]
    assert ids[: p + 3].tolist() == [*prompt.tolist(), 65, 66, END]
    assert ids[p + 3 : p + 5].tolist() == [newline, START]
    assert renderer.decode(ids[p + 3 :]) == (
        "\n<|im_start|>user\n<tool_response>\nR\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_unknown_part_type_is_named():
    with pytest.raises(BadMessage, match=r"messages\[0\]\.content\[1\]: part type 'image_url'"):
        read_messages([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}])


def test_calls_keep_their_arguments_as_sampled(renderer):
    text = 'look\n<tool_call>\n{"name": "bash", "arguments": { "n" : 1.0,"n": 1e3 }}\n</tool_call><|im_end|>'
    parsed = renderer.parse(sampled(renderer, text))
    assert (parsed.content, parsed.truncated) == ("look", False)
    assert [(c.name, c.arguments, c.valid) for c in parsed.calls] == [("bash", '{ "n" : 1.0,"n": 1e3 }', True)]


def test_a_malformed_call_between_two_good_ones_is_delivered_in_its_place(renderer):
    good = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
    bad = '<tool_call>\n{"name": "b", "arguments": {"value": }\n</tool_call>'
    calls = renderer.parse(sampled(renderer, f"{good}\n{bad}\n{good}<|im_end|>")).calls
    assert [(c.name, c.valid) for c in calls] == [("a", True), ("b", False), ("a", True)]
    assert calls[1].arguments == '{"value":'


def test_half_a_call_is_text_and_the_answer_is_truncated(renderer):
    good = '<tool_call>\n{"name": "a", "arguments": {"x": "y"}}\n</tool_call>'
    parsed = renderer.parse(sampled(renderer, good + '\n<tool_call>\n{"name": "b", "argum'))
    assert parsed.truncated and [c.name for c in parsed.calls] == ["a"]
    assert parsed.content == '<tool_call>\n{"name": "b", "argum'


def test_a_lone_surrogate_does_not_stop_the_renderer(renderer):
    renderer.render(read_messages([{"role": "user", "content": "a\ud83d"}]), [])


def test_a_missing_tokenizer_and_an_unknown_model_type_are_usage_errors(tmp_path, renderer):
    with pytest.raises(UsageError, match=r"config\.json"):
        Renderer.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UsageError, match="model_type 'gpt2' and no chat template"):
        Renderer.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        Renderer.load(tmp_path)
