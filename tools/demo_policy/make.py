"""Makes the demo policy: tokenizer, warm start by a random explorer, Hugging Face folder, measured rates.

    python -m tools.demo_policy.make --seed 0 --sdists FOLDER

FOLDER holds the source archives of the packages that recipes/demo_tasks.json names. One thread; the same seed,
Python and torch give the same weights. The explorer sees functions and applicable edits, never a test or a verdict.
"""

import argparse
import hashlib
import json
import logging
import random
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lego.chat.render import Renderer
from lego.tasks.mutate import Edit, Function
from tools.demo_policy import net as nets
from tools.demo_policy import vocabulary, warm
from tools.demo_policy.explorer import (
    MOST_LINES,
    Dialogue,
    Place,
    Source,
    Wire,
    Writer,
    place_of,
    places,
    read_sources,
    wires,
)
from tools.demo_policy.simulate import Problem, Rehearsal, problem

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
INDEX = HERE.parents[1] / "recipes" / "demo_tasks.json"
LONGEST = 330
"""Tokens of the longest dialogue that is taught."""

RATES = ("viewed", "applied", "ended", "solved")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The warm start: drills on short functions at the end of a file, then whole dialogues."""

    drills: int = 300
    steps: int = 1100
    """Updates in all, drills included."""
    rows: int = 32
    """Dialogues in an update."""
    lr: float = 3e-3
    embed_lr: float = 5e-4
    muon_lr: float = 0.02
    balance: float = 0.01
    """Weight of the routers' load-balance loss."""
    library: float = 0.3
    """Share of dialogues over the standard library's functions, after the drills."""
    tasks: float = 0.3
    """Share over the functions of the training tasks, after the drills."""
    codex: float = 0.8
    """Share of dialogues in Codex's texts; the rest is in pi's."""
    moved: float = 0.4
    """Share of dialogues whose function stands at a random line."""
    cut: float = 0.3
    """Share of dialogues whose file ends with the function."""


@dataclass(frozen=True)
class Ground:
    """What the explorer explores: functions of the tasks, of their packages and of the standard library."""

    tasks: tuple[Place, ...]
    packages: tuple[Place, ...]
    library: tuple[Place, ...]
    problems: dict[str, tuple[Problem, ...]]
    """The real tasks by split, for measuring only."""

    @property
    def short(self) -> tuple[Place, ...]:
        return tuple(place for place in (*self.packages, *self.library) if place.length <= 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sdists", type=Path, required=True, help="folder with the packages' source archives")
    parser.add_argument("--index", type=Path, default=INDEX, help="the demo's tasks")
    parser.add_argument("--out", type=Path, default=HERE / "policy", help="folder to write")
    parser.add_argument("--steps", type=int, default=Plan.steps, help="updates in all")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    plan = Plan(steps=arguments.steps)
    make(plan, arguments.seed, survey(arguments.index, arguments.sdists), arguments.out)


def make(plan: Plan, seed: int, ground: Ground, out: Path) -> None:
    """Writes the policy's folder."""
    started = time.process_time()
    tools = json.loads((HERE / "harness_tools.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(ground, tools)
    vocabulary.write(tokenizer, out, (HERE / "chat_template.jinja").read_text())
    pad_id, end_id = (tokenizer.get_vocab()[text] for text in ("<|endoftext|>", vocabulary.END_OF_TURN))
    network = nets.Net(nets.Shape(vocab_size=vocabulary.vocabulary_rows(tokenizer)))
    network.start(seed, vocabulary.kinds(tokenizer, _paths(ground)))
    nets.save(network, out, end_id, pad_id)
    teacher = Teacher(plan, ground, Writer(out), tools, random.Random(seed))
    _train(plan, network, teacher, pad_id)
    nets.save(network, out, end_id, pad_id)
    cpu_s = time.process_time() - started
    rates = measure(out, ground, wires(tools), seed)
    (out / "README.md").write_text(_readme(network, seed, cpu_s, rates))


def survey(index: Path, sdists: Path) -> Ground:
    """Reads the packages and the standard library; functions of held-out tasks are left out."""
    document = json.loads(index.read_text(encoding="utf-8"))
    hidden = frozenset((t["path"], t["line"]) for t in document["tasks"] if t["split"] == "heldout")
    sources = [source for package in document["packages"] for source in _unpacked(sdists, package)]
    texts = {source.path: source for source in sources}
    library = read_sources(Path(sysconfig.get_paths()["stdlib"]))
    problems = {
        split: tuple(_problem(texts[t["path"]], t) for t in document["tasks"] if t["split"] == split)
        for split in ("train", "heldout")
    }
    return Ground(
        tasks=tuple(replace(p.place, view=p.solution) for p in problems["train"]),
        packages=tuple(place for source in sources for place in places(source, hidden)),
        library=tuple(place for source in library for place in places(source)),
        problems=problems,
    )


class Teacher:
    """Draws the explorer's dialogues."""

    def __init__(self, plan: Plan, ground: Ground, writer: Writer, tools: dict, rng: random.Random) -> None:
        self.plan, self.ground, self.writer, self.wires, self.rng = plan, ground, writer, wires(tools), rng
        self.short = ground.short
        self.names = [place.name for place in (*ground.packages, *ground.library)]

    def dialogues(self, drill: bool) -> Iterator[Dialogue]:
        """One after the other, without end."""
        while True:
            place = self._place(drill)
            if 1 <= len(place.edits()) <= 14:
                wire = self.wires["codex" if self.rng.random() < self.plan.codex else "pi"]
                found = self.writer.dialogue(wire, place, self._test(place), self.rng)
                if len(found.ids) <= LONGEST:
                    yield found

    def _place(self, drill: bool) -> Place:
        """A function, mostly with a random edit already in it, at its own line or another, whole or cut."""
        rng, plan = self.rng, self.plan
        place = rng.choice(self.short if drill else self._pool())
        if rng.random() < (0.9 if drill else plan.moved):
            place = replace(place, line=rng.randrange(1, MOST_LINES))
        if drill or rng.random() < plan.cut:
            place = replace(place, view=place.view[: place.length])
        return place.after(rng.choice(place.edits())) if rng.random() < 0.8 else place

    def _pool(self) -> Sequence[Place]:
        drawn = self.rng.random()
        if drawn < self.plan.library:
            return self.ground.library
        return self.ground.tasks if drawn < self.plan.library + self.plan.tasks else self.ground.packages

    def _test(self, place: Place) -> str:
        return "test_" + (place.name if self.rng.random() < 0.5 else self.rng.choice(self.names)).strip("_")


def measure(folder: Path, ground: Ground, by_name: dict[str, Wire], seed: int) -> dict[str, dict[str, float]]:
    """Rates of the policy in rehearsals of the real tasks, 8 trials each."""
    network, renderer = nets.load(folder), Renderer.load(folder)
    rates = {}
    for split, problems in ground.problems.items():
        for name, wire in by_name.items():
            trials = Rehearsal(network, renderer, wire, seed).trials(problems, 8)
            rate = {what: sum(getattr(t, what) for t in trials) / len(trials) for what in RATES}
            rates[f"{split}, {name}"] = rate | {"chance": sum(1 / len(p.applicable) for p in problems) / len(problems)}
    return rates


def _train(plan: Plan, network: nets.Net, teacher: Teacher, pad_id: int) -> None:
    optimizer = warm.Optimizer(network, plan.lr, plan.embed_lr, plan.muon_lr)
    started, average = time.process_time(), 0.0
    for step, batch in enumerate(_batches(plan, teacher, pad_id)):
        gap, balance = warm.loss(network, batch)
        (gap + plan.balance * balance).backward()
        optimizer.step(warm.share(step, plan.steps))
        average = gap.item() if step == 0 else 0.95 * average + 0.05 * gap.item()
        if step % 25 == 24:
            spent = time.process_time() - started
            log.info("step %d cpu_s=%.0f gap=%.4f balance=%.2f", step + 1, spent, average, balance.item())


def _batches(plan: Plan, teacher: Teacher, pad_id: int) -> Iterator[warm.Batch]:
    """Batches of dialogues of about one length: a few batches are drawn at once and sorted."""
    for drill, steps in ((True, plan.drills), (False, plan.steps - plan.drills)):
        drawn = teacher.dialogues(drill)
        for at in range(0, steps, 6):
            count = min(6, steps - at)
            rows = sorted((next(drawn) for _ in range(count * plan.rows)), key=lambda d: len(d.ids))
            parts = [rows[i * plan.rows : (i + 1) * plan.rows] for i in range(count)]
            teacher.rng.shuffle(parts)
            yield from (warm.collate(part, pad_id) for part in parts)


def _tokenizer(ground: Ground, tools: dict[str, list[dict]]) -> vocabulary.Tokenizer:
    near, far = (*ground.tasks, *ground.packages), ground.library
    corpus = [place.numbered() for place in (*near, *near, *near, *far)]
    corpus += [f"{place.path}:{place.line} test_{place.name} fails." for place in (*near, *far)]
    everything = [tool for of_harness in tools.values() for tool in of_harness]
    return vocabulary.build(corpus, _paths(ground), everything, merges=1200, words=1500)


def _paths(ground: Ground) -> list[str]:
    return sorted({place.path for place in (*ground.tasks, *ground.packages)})


def _unpacked(sdists: Path, package: dict) -> Iterator[Source]:
    archive = sdists / f"{package['name'].replace('-', '_')}-{package['version']}.tar.gz"
    if not archive.is_file() or hashlib.sha256(archive.read_bytes()).hexdigest() != package["sha256"]:
        raise SystemExit(f"--sdists: {archive} is missing or not the archive with sha256 {package['sha256']}")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
        (top,) = Path(folder).iterdir()
        yield from read_sources(top)


def _problem(source: Source, task: dict) -> Problem:
    function = Function(task["path"], task["name"], task["line"], task["end"])
    bug = Edit(task["edit"]["line"], task["edit"]["old"], task["edit"]["new"])
    return problem(place_of(source.path, source.lines, function), bug, "test_" + task["name"].strip("_"))


def _readme(network: nets.Net, seed: int, cpu_s: float, rates: dict[str, dict[str, float]]) -> str:
    parameters = sum(p.numel() for p in network.parameters())
    rows = [
        f"| {where} | " + " | ".join(f"{rate[what]:.3f}" for what in (*RATES, "chance")) + " |"
        for where, rate in rates.items()
    ]
    return "\n".join(
        (
            "# Demo policy",
            "",
            f"Made by `python -m tools.demo_policy.make --seed {seed} --sdists FOLDER`: {parameters:,} parameters, "
            f"{cpu_s / 60:.1f} CPU-minutes on one thread. It imitates a random explorer that never saw a verdict.",
            "",
            "Rehearsed rates (8 trials a task). viewed: it looked at the right place; applied: its edit changed the "
            "file; ended: it gave a last answer; chance: what random edits would solve if each applied.",
            "",
            "| tasks, harness | viewed | applied | ended | solved | chance |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
        )
    )


if __name__ == "__main__":
    main()
