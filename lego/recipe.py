"""A recipe: everything one run needs, as frozen values. Loading one imports neither torch nor vLLM."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from harnesses.base import Harness
from harnesses.known import KNOWN
from lego.budget import Budget, Crew
from lego.engine.vllm import VllmServer
from lego.errors import UsageError
from lego.journal import FILE, occupied
from lego.learn.algorithms import ALGORITHMS, GSPO, ActorCritic, Algorithm, name_of
from lego.learn.checkpoint_folder import find, read_meta
from lego.learn.layout import model_sizes
from lego.learn.trainer import TrainerSpec
from lego.records import CallKind, KeepSessions, Sampling
from lego.rollout.credit import Spread
from lego.rollout.curriculum import Band, Walk
from lego.rollout.filters import Filters
from lego.rollout.mix import Weighted, mix_problems
from lego.tasks.task import TaskSource
from sandbox.base import Limits
from sandbox.bubble import Bubblewrap
from sandbox.docker import Docker
from sandbox.podman import Podman

MAX_TEMPERATURE = 2.0
OF_LOGPROBS = ("--hf-overrides", "--logprobs-mode", "--generation-config")
"""Arguments of the engine that decide what its log-probabilities are: those of a float32 head, after temperature."""
Sabotage = Literal["none", "shuffle_advantages", "permute_replay"]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """How trials are run and gathered."""

    group_size: int = 8
    """Trials of one task in one step; what they earn is compared, unless a critic estimates it."""
    tasks_per_step: int = 16
    """Tasks visited in one step, in turn through the training tasks; all of them where there are fewer."""
    concurrency: int = 8
    """Trials alive at once."""
    max_turns: int = 8
    """Model calls that one trial may make; side requests (titles and the like) are counted apart."""
    max_trial_tokens: int | None = None
    """Tokens that one trial may sample in all its calls; None for no limit."""
    train_calls: tyro.conf.EnumChoicesFromValues[tuple[CallKind, ...]] = (
        CallKind.MAIN,
        CallKind.SUBAGENT,
        CallKind.SUMMARY,
    )
    """Kinds of model calls that are trained; side calls are titles and the like. The others are only sampled."""
    keep_sessions: KeepSessions = "odd"
    """Session files in the run folder: `odd` keeps trials with a failed cross-check, unexplained drift or an error."""
    staleness: int = 0
    """Steps between the weights that started a group and the step that trains on it, at most; 0 is lockstep."""
    oversample: int = 0
    """Groups that a lockstep step starts beyond its own; when enough are done the rest is cut."""
    refill: int = 0
    """Groups of a step that another replaces when they are dropped; beyond them the step is that much smaller."""
    filters: Filters = Filters()
    curriculum: Walk | Band = Walk()
    """Which task comes next: all in turn (walk), or mostly those solved sometimes (band)."""
    limits: Limits = Limits(memory_gib=1.0, pids=128, cpus=1.0, disk_mib=64)
    """What each agent box may use; its deadline follows from the budget."""
    max_unscored: float = 0.5
    """Share of a step's trials without a reward that stops the run, with the first cause."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """How conversations become prompts and answers are read."""

    family: str | None = None
    """Renderer by name, such as qwen3.5 or glm-4.5; `default` is the policy's own chat template. By default what the
    policy's folder says."""
    thinking: bool = True
    """False starts each answer with an empty think block, in families that have it."""


@dataclass(frozen=True, kw_only=True)
class Credit:
    """From rewards to advantages, beside what the algorithm says."""

    negative: float = 1.0
    """Factor on negative advantages; below 1 keeps a small policy from forgetting how to act."""
    spread: Spread = "segments"
    """How a trial's weight of 1 spreads over its segments: evenly, or by their trainable tokens."""
    subagent_share: float | None = None
    """The weight of all sub-agents of a trial together; None for segments like any others, 0 to leave them out."""


@dataclass(frozen=True, kw_only=True)
class Gates:
    """What a step must hold; a breach stops the run with the cause."""

    min_pearson: float = 0.999
    """Correlation of sampled and trainer probabilities on the tokens of a batch."""
    max_k3: float = 5e-4
    """Mean k3 estimate of KL(sampler || trainer) on a batch sampled by the newest weights."""
    min_routing_coverage: float = 1.0
    """Share of trainable tokens whose experts were recorded and replayed."""
    min_trainable_share: float = 0.99
    """Share of sampled tokens that are trainable, of calls that `rollout.train_calls` has and that were waited for."""
    max_faults: float = 0.01
    """Share of a step's turns that may fail a cross-check of the capture proxy."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Solve rates before and after training, and of held-out tasks meanwhile."""

    train_attempts: int = 8
    """Trials a training task at the end (and at the start, unless the first step visits all tasks)."""
    harness: str | None = None
    """Name of the harness that all these trials run, whatever tasks or a mix say; by default that of `harness`."""
    heldout_attempts: int = 4
    """Trials a held-out task, at the start, at the end, and each time between."""
    every: int = 0
    """Steps between solve rates of the held-out tasks during training, each of one version; 0 for none."""
    timeout_s: float | None = None
    """How long one of those may take; by default what trials that all take `budget.trial_s` need."""
    min_coverage: float = 0.9
    """Share of its trials that must come to a result, or there is an alarm instead of a rate."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When the trainer's whole state is written, and what is kept of it."""

    every: int = 0
    """Steps between checkpoints; 0 for the one at the end only."""
    keep_last: int = 2
    """Newest checkpoints that stay."""
    keep_best: int = 0
    """Checkpoints that stay beside them, made from the trials with the best solve rates."""


def _algorithm(words: list[str]) -> Algorithm:
    return ALGORITHMS[words[0]]()


def _weighted(word: str) -> Weighted:
    name, _, weight = word.partition("=")
    if name not in KNOWN:
        raise ValueError(f"{word}: {name!r}, wanted one of {', '.join(KNOWN)}")
    try:
        return Weighted(harness=KNOWN[name](), weight=float(weight or 1))
    except ValueError:
        raise ValueError(f"{word}: {weight!r}, wanted a number") from None


HarnessByName = Annotated[
    Harness,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(KNOWN) + "}",
        instance_from_str=lambda words: KNOWN[words[0]](),
        is_instance=lambda value: not isinstance(value, str),
        str_from_instance=lambda value: [value.name],
        choices=tuple(KNOWN),
    ),
]
MixByName = Annotated[
    tuple[Weighted, ...],
    tyro.constructors.PrimitiveConstructorSpec(  # of all at once: what is wrong with one of several tyro would not tell
        nargs="*",
        metavar="[NAME[=WEIGHT] ...]",
        instance_from_str=lambda words: tuple(map(_weighted, words)),
        is_instance=lambda value: all(isinstance(part, Weighted) for part in value),
        str_from_instance=lambda value: [f"{part.harness.name}={part.weight:g}" for part in value],
    ),
]
AlgorithmByName = Annotated[
    Algorithm,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(ALGORITHMS) + "}",
        instance_from_str=_algorithm,
        is_instance=lambda value: isinstance(value, Algorithm),
        str_from_instance=lambda value: [name_of(value)],
        choices=tuple(ALGORITHMS),
    ),
]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run: a policy learns tasks inside a harness."""

    policy: Path
    """Folder with the policy in HF layout: config.json, safetensors, tokenizer."""
    tasks: tyro.conf.Fixed[TaskSource]
    harness: HarnessByName
    """The agent program, with the fields that the recipe gives it, or else its defaults."""
    mix: MixByName = ()
    """Harnesses of the training groups, drawn for each by weight, in place of `harness`; a task may name its own."""
    other_harnesses: tyro.conf.Suppress[tuple[Harness, ...]] = ()
    """Further harnesses with the fields they shall have where a flag or a task names them."""
    steps: int
    """Optimizer steps, with those behind a checkpoint that is resumed."""
    seed: int = 0
    """Seed of task order and sampling."""
    cache: Path = Path("~/.cache/lego")
    """Fetched harnesses and built tasks."""
    run_dir: Path | None = None
    """Run folder: new, or of a run of this recipe to go on with. By default the newest unfinished one of this recipe in
    runs/, or else a new one there."""
    fresh: bool = False
    """Begin a new run, even where an unfinished one of this recipe lies in runs/."""
    resume: Path | None = None
    """A trainer checkpoint to go on from, of any layout; steps are counted on from its own."""
    algorithm: AlgorithmByName = GSPO()
    """What is learned from rewards. Another name than the recipe's takes its defaults; fields are set in the recipe."""
    sampling: Sampling = Sampling()
    chat: Chat = Chat()
    rollout: Rollout = Rollout()
    budget: Budget = Budget()
    credit: Credit = Credit()
    engine: VllmServer = field(default_factory=VllmServer)
    trainer: TrainerSpec = field(default_factory=TrainerSpec)
    sandbox: Bubblewrap | Podman | Docker = field(default_factory=Bubblewrap)
    """Where boxes come from. Another backend is the recipe's to name; its fields are flags."""
    fidelity: Gates = Gates()
    validation: Validation = Validation()
    checkpoints: Checkpoints = Checkpoints()
    sabotage: Sabotage = "none"
    """Break the run on purpose, to see that learning and gates are real."""

    @property
    def known_harnesses(self) -> Mapping[str, Harness]:
        """By name: those of the recipe, and all others with their defaults."""
        own = (self.harness, *(part.harness for part in self.mix), *self.other_harnesses)
        return {name: known() for name, known in KNOWN.items()} | {h.name: h for h in reversed(own)}

    @property
    def measured_harness(self) -> Harness:
        """The one that validation runs. KeyError where it names one that nobody knows."""
        return self.known_harnesses[self.validation.harness or self.harness.name]

    @property
    def harnesses(self) -> tuple[Harness, ...]:
        """Those that trials run whatever harnesses tasks name, each once."""
        known, parts = self.known_harnesses, [part.harness for part in self.mix] or [self.harness]
        return tuple(known[name] for name in dict.fromkeys(h.name for h in (*parts, self.measured_harness)))

    @property
    def crew(self) -> Crew:
        """What the budget's longer times follow from."""
        rollout = self.rollout
        return Crew(
            group_size=rollout.group_size, tasks_per_step=rollout.tasks_per_step, concurrency=rollout.concurrency
        )

    def problems(self) -> Iterator[str]:
        """Each thing that cannot be, as `field: value, wanted`; empty when the recipe can run."""
        if type(self.algorithm) not in ALGORITHMS.values():
            yield f"algorithm: {self.algorithm!r}, wanted one of {', '.join(ALGORITHMS)}, with fields of its own"
            return
        yield from _ranges(self)
        yield from self.budget.problems(self.crew)
        yield from self.engine.problems()
        yield from mix_problems(self.mix)
        known = self.known_harnesses
        if self.validation.harness is not None and self.validation.harness not in known:
            yield f"validation.harness: {self.validation.harness!r}, wanted one of {', '.join(sorted(known))}"
        yield from _kind_problems(self.rollout.train_calls)
        if lacking := self.sandbox.missing():
            yield f"sandbox: {lacking}"
        yield from _chat_problems(self.chat)
        config = _config(self.policy)
        if config is None:
            yield f"policy: {self.policy / 'config.json'} cannot be read; wanted a model folder in HF layout"
        yield from _sampling_problems(self.sampling, self.engine.max_model_len)
        if self.trainer.over_budget == "error" and self.trainer.token_budget < self.engine.max_model_len:
            yield (
                f"trainer.token_budget: {self.trainer.token_budget}, wanted at least engine.max_model_len "
                f"{self.engine.max_model_len}, or trainer.over_budget drop or split"
            )
        if self.resume is not None:
            yield from _resume_problems(self.resume, self.steps, isinstance(self.algorithm, ActorCritic))
        if self.run_dir is not None and not (self.run_dir / FILE).is_file() and (told := occupied(self.run_dir)):
            yield told
        if isinstance(self.algorithm, ActorCritic):
            yield from _critic_problems(self.algorithm, self.trainer, self.steps)
        yield from self.trainer.problems(config, self.steps)
        yield from _engine_problems(self.engine, config)


def _sampling_problems(sampling: Sampling, context: int) -> Iterator[str]:
    if sampling.top_p != 1.0 or sampling.top_k > 0 or sampling.min_p != 0.0:
        yield "sampling: top_p, top_k or min_p cut the support; training needs top_p=1, top_k=-1, min_p=0"
    if sampling.max_tokens >= context:
        yield f"sampling.max_tokens: {sampling.max_tokens}, wanted less than engine.max_model_len {context}"


def _critic_problems(algorithm: ActorCritic, trainer: TrainerSpec, steps: int) -> Iterator[str]:
    if trainer.over_budget == "split":
        yield "trainer.over_budget: split, wanted error or drop with a critic, which sees a segment whole"
    warmup = algorithm.critic.warmup_steps
    if warmup >= steps:
        yield (
            f"algorithm.critic.warmup_steps: {warmup}, wanted less than steps {steps}: before them the critic alone "
            "learns"
        )


def _engine_problems(engine: VllmServer, config: Mapping[str, Any] | None) -> Iterator[str]:
    for word in engine.extra:
        if word.replace("_", "-").startswith(OF_LOGPROBS):  # vLLM takes either spelling
            yield f"engine.extra: {word}, which lego sets itself: log-probabilities are to be the trainer's"
    if engine.routing and config is not None and not model_sizes(config).experts:
        yield "engine.routing: True, but the policy has no experts to replay; wanted None or False"


def _resume_problems(resume: Path, steps: int, critic: bool) -> Iterator[str]:
    try:
        meta = read_meta(find(resume))
    except UsageError as error:
        yield f"resume: {error}"
        return
    if meta.step >= steps:
        yield f"steps: {steps}, wanted more than the {meta.step} that {resume} has behind it; they are counted on"
    if critic and not meta.critic:
        yield f"resume: {resume} holds no critic, and this algorithm trains one"


def _kind_problems(kinds: tuple[CallKind, ...]) -> Iterator[str]:
    if not kinds or len(set(kinds)) != len(kinds):
        told = " ".join(kinds) or "none"
        yield f"rollout.train_calls: {told}, wanted some of {', '.join(CallKind)}, each once"


def _config(folder: Path) -> Mapping[str, Any] | None:
    """The config.json of a model folder; None where there is none that can be read."""
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _chat_problems(chat: Chat) -> Iterator[str]:
    if chat.family is None:
        return
    # Here, so that a recipe that names no family loads no renderer.
    from lego.chat.families import FAMILIES

    if chat.family not in FAMILIES:
        yield f"chat.family: {chat.family!r}, wanted one of {', '.join(FAMILIES)}"
    elif FAMILIES[chat.family].always_thinks and not chat.thinking:
        yield f"chat.thinking: False, but {chat.family} always thinks"


def _ranges(recipe: Recipe) -> Iterator[str]:
    """What is wrong with single values, and with pairs of one record's."""
    yield from _too_small(recipe)
    yield from _rollout_problems(recipe)
    yield from _gate_problems(recipe.fidelity)
    yield from _credit_problems(recipe.credit, recipe.algorithm)
    yield from _validation_problems(recipe.validation)


def _too_small(recipe: Recipe) -> Iterator[str]:
    rollout = recipe.rollout
    least = {
        "steps": (recipe.steps, 1),
        "rollout.group_size": (rollout.group_size, recipe.algorithm.least_group),
        "checkpoints.every": (recipe.checkpoints.every, 0),
        "checkpoints.keep_last": (recipe.checkpoints.keep_last, 1),
        "checkpoints.keep_best": (recipe.checkpoints.keep_best, 0),
        "rollout.tasks_per_step": (rollout.tasks_per_step, 1),
        "rollout.concurrency": (rollout.concurrency, 1),
        "rollout.max_turns": (rollout.max_turns, 1),
        "rollout.staleness": (rollout.staleness, 0),
        "validation.train_attempts": (recipe.validation.train_attempts, 1),
        "validation.heldout_attempts": (recipe.validation.heldout_attempts, 0),
        "validation.every": (recipe.validation.every, 0),
        "rollout.oversample": (rollout.oversample, 0),
        "rollout.refill": (rollout.refill, 0),
        "sampling.max_tokens": (recipe.sampling.max_tokens, 1),
        "seed": (recipe.seed, 0),
        "rollout.limits.pids": (rollout.limits.pids, 1),
        "rollout.limits.disk_mib": (rollout.limits.disk_mib, 1),
        "rollout.max_trial_tokens": (1 if rollout.max_trial_tokens is None else rollout.max_trial_tokens, 1),
        "engine.kv_cache_mib": (1 if recipe.engine.kv_cache_mib is None else recipe.engine.kv_cache_mib, 1),
    }
    for name, (value, low) in least.items():
        if value < low:
            why = f" for {name_of(recipe.algorithm)}" if name == "rollout.group_size" else ""
            yield f"{name}: {value}, wanted {low} or more{why}"


def _rollout_problems(recipe: Recipe) -> Iterator[str]:
    rollout, sampling = recipe.rollout, recipe.sampling
    for name, value in {
        "sampling.temperature": sampling.temperature,
        "rollout.limits.memory_gib": rollout.limits.memory_gib,
        "rollout.limits.cpus": rollout.limits.cpus,
    }.items():
        if not 0 < value < math.inf:
            yield f"{name}: {value}, wanted more than 0 and finite"
    if rollout.limits.deadline_s != Limits.deadline_s:
        yield f"rollout.limits.deadline_s: {rollout.limits.deadline_s}, wanted none: it follows from budget.harness_s"
    if sampling.temperature > MAX_TEMPERATURE:
        yield f"sampling.temperature: {sampling.temperature}, wanted {MAX_TEMPERATURE} or less (vLLM)"
    if not 0 <= rollout.max_unscored <= 1:
        yield f"rollout.max_unscored: {rollout.max_unscored}, wanted 0 to 1"
    if rollout.oversample and rollout.staleness:
        yield f"rollout.oversample: {rollout.oversample}, wanted 0 where rollout.staleness is {rollout.staleness}"
    most = rollout.filters.useless_steps * rollout.tasks_per_step
    if most and rollout.refill >= most:
        yield f"rollout.refill: {rollout.refill}, wanted less than {most}, the groups of rollout.filters.useless_steps"
    yield from rollout.filters.problems(rollout.group_size, recipe.algorithm.drop_flat_groups)
    yield from rollout.curriculum.problems()


def _gate_problems(gates: Gates) -> Iterator[str]:
    for name, value in {
        "fidelity.min_pearson": gates.min_pearson,
        "fidelity.min_routing_coverage": gates.min_routing_coverage,
        "fidelity.min_trainable_share": gates.min_trainable_share,
        "fidelity.max_faults": gates.max_faults,
    }.items():
        if not 0 <= value <= 1:
            yield f"{name}: {value}, wanted 0 to 1"
    if not 0 <= gates.max_k3 < math.inf:
        yield f"fidelity.max_k3: {gates.max_k3}, wanted 0 or more and finite"


def _credit_problems(credit: Credit, algorithm: Algorithm) -> Iterator[str]:
    if not 0 <= credit.negative <= 1:
        yield f"credit.negative: {credit.negative}, wanted 0 to 1"
    if credit.subagent_share is not None and not 0 <= credit.subagent_share < 1:
        yield f"credit.subagent_share: {credit.subagent_share}, wanted 0 or more and less than 1, or None"
    elif credit.subagent_share and algorithm.aggregate != "sequence":
        yield (
            f"credit.subagent_share: {credit.subagent_share}, wanted 0 or None with algorithm.aggregate "
            f"{algorithm.aggregate}, where every token counts alike"
        )


def _validation_problems(validation: Validation) -> Iterator[str]:
    if validation.timeout_s is not None and not 0 < validation.timeout_s < math.inf:
        yield f"validation.timeout_s: {validation.timeout_s}, wanted more than 0 and finite, or None"
    if not 0 <= validation.min_coverage <= 1:
        yield f"validation.min_coverage: {validation.min_coverage}, wanted 0 to 1"
