"""The front door: a tiny policy learns to fix one-token bugs in real packages, inside real Codex, on a laptop.

    make demo            # or: python -m lego.train recipes/demo.py --seed 1 --harness pi

Every link is real: vLLM samples, Codex acts, bubblewrap isolates, the packages' own tests judge, torchtitan trains.
Only the sizes are small.
"""

from pathlib import Path

from harnesses.codex import Codex
from harnesses.pi import Pi
from lego.budget import Budget
from lego.engine.vllm import VllmServer
from lego.learn.algorithms import GSPO
from lego.learn.trainer import TrainerSpec
from lego.recipe import Credit, Recipe, Rollout, Validation
from lego.records import Sampling
from lego.tasks.mutants import DemoTasks

HERE = Path(__file__).parent

recipe = Recipe(
    # 1.46 M parameters, warm-started by a random explorer that never saw an answer (tools/demo_policy).
    policy=HERE.parent / "tools" / "demo_policy" / "policy",
    tasks=DemoTasks(index=HERE / "demo_tasks.json"),
    # Codex by measured cost (tools/bench/harness_cost.py): 0.2 CPU-seconds a trial, pi takes 1.0.
    harness=Codex(instructions="You fix bugs."),
    # `--mix codex=3 pi` trains in both, a group of trials in one of them; measurements stay Codex's.
    other_harnesses=(Pi(instructions="You fix bugs.", tools=("bash",)),),
    steps=5,
    # One update a batch: the ratio is 1 and the clip never bites, which is what so small a policy wants.
    # No division by the group's spread, which would make tasks that are nearly always or never solved the loudest.
    algorithm=GSPO(scale="none"),
    # Full weight on failures makes a policy of this size forget how to act at all.
    credit=Credit(negative=0.3),
    sampling=Sampling(temperature=1.0, max_tokens=96),
    # Every step visits every training task, so step 0 is also the start measurement.
    rollout=Rollout(group_size=8, tasks_per_step=24, concurrency=6, max_turns=5),
    budget=Budget(harness_s=60.0, verdict_s=60.0),
    engine=VllmServer(dtype="float32", max_model_len=1024, max_num_seqs=16, kv_cache_mib=128),
    trainer=TrainerSpec(lr=1e-3, token_budget=8192, dtype="float32", threads=2),
    validation=Validation(train_attempts=8, heldout_attempts=4),
)
