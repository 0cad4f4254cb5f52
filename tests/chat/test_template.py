"""The audit's check: what a model's own template makes of a conversation, beside the ids that were used."""

from dataclasses import replace

import numpy as np

from lego.chat.messages import Message, Tool, ToolCall
from lego.chat.render import Renderer
from lego.chat.template import ChatTemplate, difference
from tests.chat.families import CHATML, FAMILIES, sampled

DEFAULT = next(f for f in FAMILIES if f.name == "default")
BASH = Tool("bash", '{"type": "function", "function": {"name": "bash"}}')
CALL = ToolCall("c", "bash", '{"command": "ls"}')
HISTORY = [Message("user", "U"), Message("assistant", "look", calls=(CALL,)), Message("tool", "R", call_id="c")]
ANSWER = '\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'


def used(renderer: Renderer, answer: str) -> np.ndarray:
    prompt = renderer.render(HISTORY[:1], [BASH])
    ids = renderer.extend(prompt, sampled(renderer, answer), HISTORY[2:], [BASH])
    assert ids is not None
    return ids


def test_equal_conversations_have_no_difference(tmp_path):
    renderer = Renderer.load(DEFAULT.write(tmp_path))
    assert difference(renderer, tmp_path, HISTORY, [BASH], used(renderer, "look" + ANSWER)) is None
    final = np.concatenate([used(renderer, "look" + ANSWER), sampled(renderer, "done<|im_end|>")])
    assert difference(renderer, tmp_path, [*HISTORY, Message("assistant", "done")], [BASH], final) is None
    cut = np.concatenate([used(renderer, "look" + ANSWER), sampled(renderer, "do")])
    assert difference(renderer, tmp_path, [*HISTORY, Message("assistant", "do")], [BASH], cut) is None


def test_the_first_difference_is_shown_with_what_surrounds_it(tmp_path):
    renderer = Renderer.load(DEFAULT.write(tmp_path))
    found = difference(renderer, tmp_path, HISTORY, [BASH], used(renderer, "book" + ANSWER))
    assert found is not None and found.startswith("at character 51: used ")
    assert "assistant\\nbook\\n<tool_call>" in found and "assistant\\nlook\\n<tool_call>" in found


def test_a_folder_without_a_template_and_a_template_that_refuses_are_told(tmp_path):
    renderer = Renderer.load(DEFAULT.write(tmp_path / "a"))
    ids = renderer.render(HISTORY[:1], [])
    bare = replace(DEFAULT, template=None).write(tmp_path / "b")
    assert "has no chat template" in str(difference(renderer, bare, HISTORY[:1], [], ids))
    strict = replace(DEFAULT, template="{{ raise_exception('only tools') }}").write(tmp_path / "c")
    assert "refuses the conversation: only tools" in str(difference(renderer, strict, HISTORY[:1], [], ids))


def test_arguments_are_given_as_the_template_takes_them(tmp_path):
    each = "{% for m in messages %}{% for c in m.tool_calls %}CALL{% endfor %}{% endfor %}"
    items = each.replace("CALL", "{{ c.function.arguments.items() | list }}")
    folder = replace(DEFAULT, template=items).write(tmp_path)
    renderer = Renderer.load(folder)
    assert "[('command', 'ls')]" in str(difference(renderer, folder, HISTORY, [], sampled(renderer, "?")))
    call = replace(CALL, arguments='{"command":"ls"}')
    history = [HISTORY[0], replace(HISTORY[1], calls=(call,))]
    asks = "{% if c.function.arguments is string %}{{ c.function.arguments }}{% endif %}"
    for told in ("{{ '' + c.function.arguments }}", asks):
        folder = replace(DEFAULT, template=each.replace("CALL", told)).write(tmp_path)
        assert difference(renderer, folder, history, [], sampled(renderer, call.arguments)) is None


def test_templates_are_found_in_both_files_and_know_huggingfaces_words(tmp_path):
    folder = DEFAULT.write(tmp_path)
    assert ChatTemplate.find(folder).source == CHATML
    source = (
        "{% generation %}{{ eos_token }}{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}"
        "{{ tools | tojson(indent=1) }}{{ strftime_now('%Y') }}"
    )
    (folder / "chat_template.jinja").write_text(source)
    template = ChatTemplate.find(folder)
    text = template.text([{"role": "user", "content": "é"}], [{"é": 1}], prompt=False)
    assert text == '<|im_end|>[\n {\n  "é": 1\n }\n]2024'
