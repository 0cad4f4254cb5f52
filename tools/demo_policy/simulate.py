"""A rehearsal of the real run on one core: batched sampling of this network, a small shell, and policy-gradient steps.

It mimics what the proxy renders and what Codex answers, so the rates and curves it reports are those of the
policy, not of the real chain.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lego.chat.messages import Message, read_tools
from lego.chat.render import ParsedCall, Renderer
from lego.tasks.mutate import Edit
from tools.demo_policy.explorer import Place, Wire
from tools.demo_policy.net import Cache, Net

MAX_OUTPUT = 32
ROOM = 640
_VIEW = re.compile(r"nl -ba (\S+) \| sed -n '(\d+),\+12p'\Z")
_EDIT = re.compile(r"sed -i '(\d+)s/([^/'\\&.*^$\[\]]+)/([^/'\\&]*)/' (\S+)\Z")


@dataclass(frozen=True)
class Problem:
    """A broken function, the view that would be whole again, and a test's name."""

    place: Place
    solution: tuple[str, ...]
    test: str
    applicable: frozenset[Edit]

    @property
    def instruction(self) -> str:
        return f"{self.place.path}:{self.place.line} {self.test} fails."


def problem(place: Place, edit: Edit, test: str) -> Problem:
    """The function after `edit`; putting it back must be one of the explorer's moves."""
    broken = place.after(edit)
    edits = frozenset(broken.edits())
    if Edit(edit.line, edit.new, edit.old) not in edits or broken.after(Edit(edit.line, edit.new, edit.old)) != place:
        raise ValueError(f"{place.path}:{edit.line} cannot be put back by one edit")
    return Problem(broken, place.view, test, edits)


@dataclass
class Trial:
    """One dialogue as it grows; `outputs` are the spans [start, stop) the policy wrote."""

    problem: Problem
    ids: list[int]
    view: tuple[str, ...]
    outputs: list[tuple[int, int]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    over: bool = False
    """Ended without an answer: a truncated turn or no room."""
    viewed: bool = False
    applied: bool = False
    ended: bool = False

    @property
    def solved(self) -> bool:
        return self.ended and self.view == self.problem.solution

    def run(self, command: str) -> tuple[str, int]:
        """Output and exit code of the two commands the explorer knows; anything else fails."""
        self.commands.append(command)
        place = self.problem.place
        if (m := _VIEW.match(command)) and m[1] == place.path and int(m[2]) == place.line:
            self.viewed = True
            shown = Place(place.path, place.name, place.line, self.view, place.length)
            return shown.numbered(), 0
        if (m := _EDIT.match(command)) and m[4] == place.path:
            self._edit(Edit(int(m[1]), m[2], m[3]))
            return "", 0
        return "sed: can't read file: No such file or directory\n", 2

    def _edit(self, edit: Edit) -> None:
        self.applied = self.applied or edit in self.problem.applicable
        at = edit.line - self.problem.place.line
        if 0 <= at < len(self.view):
            changed = self.view[at].replace(edit.old, edit.new, 1)
            self.view = (*self.view[:at], changed, *self.view[at + 1 :])


class Rehearsal:
    """Samples trials of problems with one harness's texts."""

    def __init__(self, net: Net, renderer: Renderer, wire: Wire, seed: int) -> None:
        self.net, self.renderer, self.wire = net, renderer, wire
        self.tools = read_tools(list(wire.tools))
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.stop_id = renderer.stop_ids[0]

    @torch.no_grad()
    def trials(self, problems: Sequence[Problem], attempts: int, turns: int = 4) -> list[Trial]:
        """`attempts` trials of each problem, in order."""
        prompts = [self._prompt(p) for p in problems]
        trials = [Trial(p, list(prompts[i]), p.place.view) for i, p in enumerate(problems) for _ in range(attempts)]
        cache = self.net.new_cache(len(trials), ROOM)
        fresh = [list(t.ids) for t in trials]
        for _ in range(turns):
            if all(t.ended for t in trials):
                break
            outputs = self._speak(cache, fresh)
            fresh = [self._answer(t, out) for t, out in zip(trials, outputs, strict=True)]
        return trials

    def _prompt(self, p: Problem) -> list[int]:
        messages = [Message("system", self.wire.system(self.rng)), Message("user", p.instruction)]
        return self.renderer.render(messages, self.tools).tolist()

    def _speak(self, cache: Cache, fresh: list[list[int]]) -> list[list[int]]:
        """Feeds each row its new ids (none: the row rests) and samples until every row ends its turn."""
        hidden = self._feed(cache, fresh)
        outputs: list[list[int]] = [[] for _ in fresh]
        active = [bool(ids) for ids in fresh]
        for _ in range(MAX_OUTPUT):
            chances = self.net.logits(hidden).softmax(-1)
            drawn = torch.multinomial(chances, 1, generator=self.generator)[:, 0].tolist()
            for i, token in enumerate(drawn):
                if active[i]:
                    outputs[i].append(token)
                    active[i] = token != self.stop_id
            if not any(active):
                break
            hidden = self._feed(cache, [[outputs[i][-1]] if on else [] for i, on in enumerate(active)])
        return outputs

    def _feed(self, cache: Cache, fresh: list[list[int]]) -> Tensor:
        """Hidden state after each row's last new id."""
        width = max(map(len, fresh))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in fresh])
        counts = torch.tensor([len(row) for row in fresh])
        positions = cache.lengths[:, None] + torch.arange(width)
        hidden, _ = self.net(ids, positions, None, cache)
        cache.lengths += counts
        return hidden[torch.arange(len(fresh)), (counts - 1).clamp(min=0)]

    def _answer(self, trial: Trial, output: list[int]) -> list[int]:
        """Takes the row's turn in and returns the ids that follow it: none where the dialogue is over."""
        if trial.ended or trial.over:
            return []
        prompt = np.asarray(trial.ids, np.int32)
        out = np.asarray(output, np.int32)
        trial.outputs.append((len(trial.ids), len(trial.ids) + len(output)))
        trial.ids.extend(output)
        parsed = self.renderer.parse(out, prompt)
        if parsed.truncated or len(trial.ids) > ROOM - 2 * MAX_OUTPUT - 200:
            trial.over = True
            return []
        if not parsed.calls:
            trial.ended = True
            return []
        replies = [Message("tool", self._reply(trial, call), call_id="1") for call in parsed.calls]
        longer = self.renderer.extend(prompt, out, replies, self.tools)
        assert longer is not None
        trial.ids = longer.tolist()
        # The last sampled token was never fed; the rows of the cache hold everything before it.
        return trial.ids[len(prompt) + len(output) - 1 :]

    def _reply(self, trial: Trial, call: ParsedCall) -> str:
        known = call.valid and call.name == self.wire.tool
        command = json.loads(call.arguments).get(self.wire.key) if known else None
        text, code = trial.run(command) if isinstance(command, str) else ("failed to parse function arguments", 1)
        return self.wire.result(text, self.rng, code)


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How the rehearsal updates the network; the words are the recipe's."""

    lr: float = 1e-3
    negative: float = 0.3
    scale: str = "none"
    updates: int = 1
    """Optimizer steps a batch, each over a part of the tasks."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_norm: float = 1.0
    clip: float = 0.2
    """Ratio clip; bites from a batch's second update on."""


def advantages(trials: Sequence[Trial], attempts: int, how: Learning) -> list[float]:
    """Each reward less its group's mean, failures scaled down."""
    out: list[float] = []
    for at in range(0, len(trials), attempts):
        rewards = [float(t.solved) for t in trials[at : at + attempts]]
        mean = sum(rewards) / len(rewards)
        spread = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
        unit = spread + 1e-6 if how.scale == "std" else 1.0
        out += [(r - mean) / unit * (how.negative if r < mean else 1.0) for r in rewards]
    return out


class Learner:
    """AdamW on the whole network, like the trainer's: one sequence ratio a trial, sampled tokens only."""

    def __init__(self, net: Net, how: Learning, pad_id: int) -> None:
        self.net, self.how, self.pad_id = net, how, pad_id
        self.adam = torch.optim.AdamW(net.parameters(), lr=how.lr, betas=how.betas, weight_decay=how.weight_decay)

    def learn(self, trials: Sequence[Trial], weights: Sequence[float], attempts: int) -> None:
        """Updates from one batch; trials of a task that did the same are one sequence with the sum of their weights."""
        tasks = len(trials) // attempts
        merged = _merged(trials, weights, attempts)
        old = self._before(merged) if self.how.updates > 1 else {}
        for k in range(self.how.updates):
            mine = [item for item in merged if item[2] % self.how.updates == k]
            self._update(mine, len(trials) * len(range(k, tasks, self.how.updates)) / tasks, old)

    @torch.no_grad()
    def _before(self, items: list[tuple[Trial, float, int]]) -> dict[int, float]:
        """Mean log-probability of each trial under the weights that sampled it, by the trial's identity."""
        parts = [[t for t, _, _ in part] for part in _chunks(items, 32)]
        return {id(t): float(v) for part in parts for t, v in zip(part, self._mean_logps(part), strict=True)}

    def _update(self, items: list[tuple[Trial, float, int]], count: float, old: dict[int, float]) -> None:
        for part in _chunks(items, 32):
            logps = self._mean_logps([t for t, _, _ in part])
            before = torch.tensor([old.get(id(t), float(v)) for (t, _, _), v in zip(part, logps.detach(), strict=True)])
            weights = torch.tensor([w for _, w, _ in part])
            ratio = (logps - before).exp()
            gain = torch.minimum(ratio * weights, ratio.clamp(1 - self.how.clip, 1 + self.how.clip) * weights)
            (-gain.sum() / count).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.how.max_norm)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def _mean_logps(self, trials: Sequence[Trial]) -> Tensor:
        width = max(len(t.ids) for t in trials)
        ids = torch.tensor([t.ids + [self.pad_id] * (width - len(t.ids)) for t in trials])
        hidden, _ = self.net(ids, torch.arange(width).repeat(len(trials), 1), None)
        said = [(i, j) for i, t in enumerate(trials) for a, b in t.outputs for j in range(a, b)]
        row, spot = torch.tensor(said).T
        logits = self.net.logits(hidden[row, spot - 1])
        logps = logits.log_softmax(-1).gather(1, ids[row, spot][:, None])[:, 0]
        counts = torch.bincount(row, minlength=len(trials))
        return torch.zeros(len(trials)).index_add(0, row, logps) / counts


def _merged(trials: Sequence[Trial], weights: Sequence[float], attempts: int) -> list[tuple[Trial, float, int]]:
    """(trial, summed weight, task); trials without weight are left out."""
    found: dict[tuple, tuple[Trial, float, int]] = {}
    for i, (trial, weight) in enumerate(zip(trials, weights, strict=True)):
        said = tuple(tuple(trial.ids[a:b]) for a, b in trial.outputs)
        first, total, task = found.get((i // attempts, said), (trial, 0.0, i // attempts))
        found[i // attempts, said] = (first, total + weight, task)
    return [item for item in found.values() if item[1]]


def _chunks(items: list, size: int) -> list[list]:
    return [items[i : i + size] for i in range(0, len(items), size)]
