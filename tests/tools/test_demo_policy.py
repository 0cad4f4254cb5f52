"""The shipped demo policy: its tokenizer, its folder, and that it behaves as its explorer did."""

import json
import random
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lego.chat.messages import Message, read_tools
from lego.chat.render import Renderer
from lego.tasks.mutate import EDITS
from tools.demo_policy import net as nets
from tools.demo_policy.explorer import Place, Source, Wire, Writer, places, wires
from tools.demo_policy.simulate import Rehearsal, problem
from tools.demo_policy.vocabulary import SPECIALS, edit_text

HOME = Path(__file__).parents[2] / "tools" / "demo_policy"
FOLDER = HOME / "policy"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
WIRES = wires(json.loads((HOME / "harness_tools.json").read_text()))
PIECES = [*SPECIALS, " ", "\n", "\t", "0", "12", "if not", "a/b.py", "é"]
PLACE = Place(
    "boltons/mathutils.py",
    "clamp",
    41,
    (
        "def clamp(x, low, high):",
        "    if not low < high:",
        "        raise ValueError(low)",
        "    return min(x, high)",
        "",
    ),
    4,
)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load(FOLDER)


@pytest.fixture(scope="module")
def network() -> nets.Net:
    return nets.load(FOLDER)


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer(FOLDER)


@settings(max_examples=200, deadline=None)
@given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", [*map(str, (0, 7, 10, 99, 100, 321, 999)), *(edit_text(a, b) for a, b in EDITS)])
def test_a_line_number_and_an_edit_are_one_token(text: str) -> None:
    assert len(TOKENIZER.encode(text).ids) == 1


@pytest.mark.parametrize("special", SPECIALS)
def test_control_token_text_in_a_message_is_no_control_token(renderer: Renderer, special: str) -> None:
    plain = renderer.render([Message("user", "x")], ()).tolist()
    marked = renderer.render([Message("user", f"x{special}x")], ()).tolist()
    token = TOKENIZER.token_to_id(special)
    assert token is not None and marked.count(token) == plain.count(token)


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_prompts_and_dialogues_of_both_harnesses_are_short(writer: Writer, wire: Wire) -> None:
    rng = random.Random(0)
    assert len(writer.prompt(wire, "boltons/mathutils.py:41 test_clamp fails.", rng)) <= 60
    assert len(writer.dialogue(wire, PLACE, "test_clamp", rng).ids) <= 200


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_the_explorer_gives_every_applicable_edit_the_same_chance(writer: Writer, wire: Wire) -> None:
    edits = PLACE.edits()
    dialogue = writer.dialogue(wire, PLACE, "test_clamp", random.Random(1))
    branches = {dialogue.branch, *range(len(dialogue.ids) - dialogue.alternatives, len(dialogue.ids))}
    of_line = {token: chance for at, token, chance in dialogue.targets if at == dialogue.branch - 1}
    chances = [of_line[dialogue.ids[at]] * chance for at, _, chance in dialogue.targets if at in branches]
    assert len(edits) > 3 and chances == pytest.approx([1 / len(edits)] * len(edits))


def test_the_folder_is_small_and_its_parameters_few(network: nets.Net) -> None:
    assert sum(p.numel() for p in network.parameters()) <= 6_000_000
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 12 << 20


def test_transformers_reads_the_folder_and_computes_the_same_logits(network: nets.Net, writer: Writer) -> None:
    from transformers import Qwen3MoeForCausalLM

    reference = Qwen3MoeForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    dialogue = writer.dialogue(WIRES["codex"], PLACE, "test_clamp", random.Random(2))
    ids = torch.tensor([dialogue.ids[: len(dialogue.ids) - dialogue.alternatives]])
    with torch.no_grad():
        ours = network.logits(network(ids, torch.arange(ids.shape[1])[None], None)[0])
        theirs = reference(ids).logits
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_the_chat_template_says_what_the_proxy_renders(renderer: Renderer) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    wire = WIRES["codex"]
    messages = [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": "a/b.py:7 test_b fails."}]
    text = tokenizer.apply_chat_template(messages, tools=list(wire.tools), add_generation_prompt=True, tokenize=False)
    ids = renderer.render([Message(m["role"], m["content"]) for m in messages], read_tools(list(wire.tools)))
    assert text == renderer.decode(ids)


def test_cached_sampling_sees_what_a_whole_pass_sees(network: nets.Net) -> None:
    ids = torch.randint(0, network.shape.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40).repeat(2, 1)
    cache = network.new_cache(2, 64)
    with torch.no_grad():
        whole, _ = network(ids, positions, None)
        network(ids[:, :30], positions[:, :30], None, cache)
        rest, _ = network(ids[:, 30:], positions[:, 30:], None, cache)
    assert torch.allclose(rest, whole[:, 30:], atol=1e-4)


def test_the_experts_matter(network: nets.Net, writer: Writer) -> None:
    ids = torch.tensor([writer.dialogue(WIRES["codex"], PLACE, "test_clamp", random.Random(3)).ids])
    positions = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        right = network.logits(network(ids, positions, None)[0]).softmax(-1)
        network.permute_experts = 1
        wrong = network.logits(network(ids, positions, None)[0]).softmax(-1)
        network.permute_experts = 0
    assert (right - wrong).abs().sum(-1).mean() > 0.1


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_the_policy_looks_edits_and_ends_with_functions_of_other_packages_too(
    network: nets.Net, renderer: Renderer, wire: Wire
) -> None:
    path = Path(sysconfig.get_paths()["stdlib"]) / "textwrap.py"
    found = list(places(Source("boltons/strutils.py", path.read_text())))
    problems = [problem(place, _reversible(place), "test_it") for place in found[:4]]
    trials = Rehearsal(network, renderer, wire, 0).trials(problems, 4)
    assert sum(t.viewed for t in trials) >= 0.8 * len(trials)
    assert sum(t.ended for t in trials) >= 0.9 * len(trials)
    assert sum(t.applied for t in trials) > 0


def _reversible(place: Place):
    """An edit that one edit puts back."""
    for edit in place.edits():
        try:
            problem(place, edit, "test_it")
        except ValueError:
            continue
        return edit
    raise AssertionError(f"{place.name} has none")
