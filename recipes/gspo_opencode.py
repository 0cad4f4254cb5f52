"""Qwen3.5-35B-A3B learns to fix repositories inside OpenCode: eight GPUs of one machine, GSPO, sampling one step ahead.

    python -m lego.check recipes/gspo_opencode.py
    python -m harnesses.fetch opencode
    python -m lego.train recipes/gspo_opencode.py --policy MODEL_FOLDER

Four GPUs sample, four train. AdamW keeps 16 bytes a parameter (float32 weights, gradients and two moments): 139 GB on
each trainer GPU, and some 20 GB more for one long segment, so GPUs of 180 GB. Nobody has run it yet;
what a CPU can show of it, the tests show with a tiny Qwen3.5-MoE.
"""

from pathlib import Path

from harnesses.opencode import OpenCode
from lego.budget import Budget
from lego.engine.vllm import VllmServer
from lego.learn.algorithms import GSPO
from lego.learn.trainer import TrainerSpec
from lego.recipe import Checkpoints, Gates, Recipe, Rollout, Validation
from lego.records import Sampling
from lego.tasks.folder import Folder
from sandbox.base import Limits

HOME = Path.home()
# OpenCode's own prompt is 7k tokens; the rest is for files, test output and some forty turns.
CONTEXT_TOKENS = 65_536
TRIALS_AT_ONCE = 128

recipe = Recipe(
    policy=HOME / "models" / "Qwen3.5-35B-A3B",
    # Placeholders: any folder of tasks, and what `pip install --target` put beside it for their tests.
    tasks=Folder(path=HOME / "lego" / "tasks", testenv=HOME / "lego" / "testenv"),
    # Its own system text and tools: what is learnt is OpenCode as users run it, its sub-agents and its summaries
    # included (rollout.train_calls): a policy that sums up badly loses its way in a long trial.
    harness=OpenCode(),
    steps=200,
    # The clips of the GSPO paper. A sequence ratio averages over thousands of tokens, so they are hundreds of
    # times narrower than GRPO's; with batches one step old they do bite.
    # No division by the spread: it would make tasks that are nearly always or never solved the loudest.
    algorithm=GSPO(clip_low=3e-4, clip_high=4e-4, scale="none"),
    # The policy's whole distribution, as the ratio needs; an answer may hold a long thought or a whole file.
    sampling=Sampling(temperature=1.0, max_tokens=8192),
    rollout=Rollout(
        group_size=8,
        # 512 trials a step: many groups are all solved or all failed and teach nothing.
        tasks_per_step=64,
        # As many as vLLM samples at once; the boxes may take 2 GiB each, 256 in all.
        concurrency=TRIALS_AT_ONCE,
        # OpenCode's own limit is a plea that the model can ignore; this one ends the trial.
        max_turns=100,
        # Asynchronous: step n+1 is sampled while step n trains, so neither half of the GPUs waits for the other.
        staleness=1,
        # OpenCode alone takes 0.5 to 1 GiB; the rest is for the tests it runs.
        limits=Limits(memory_gib=2.0, pids=512, cpus=2.0, disk_mib=1024),
    ),
    # Half an hour for an agent, ten minutes for a repository's tests; a call that takes a quarter of an hour hangs.
    budget=Budget(harness_s=1800.0, verdict_s=600.0),
    engine=VllmServer(
        dtype="bfloat16",
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=TRIALS_AT_ONCE,
        # Answers under way at an update go on with the new weights; each token keeps the version that sampled it.
        pause="keep",
        # The trainer's ranks take the first four GPUs.
        env={"CUDA_VISIBLE_DEVICES": "4,5,6,7"},
        # 70 GB of weights over four GPUs leave most of their memory to keys and values.
        extra=("--tensor-parallel-size", "4"),
        # Reading 70 GB, compiling, capturing CUDA graphs.
        start_timeout_s=1800.0,
        stop_grace_s=60.0,
    ),
    trainer=TrainerSpec(
        lr=1e-6,
        # FSDP2 over all four ranks; 64 of the 256 experts of a layer on each, so that tokens travel, not experts.
        world_size=4,
        expert_parallel=4,
        # The longest segment fits into one micro-batch; shorter ones share it.
        token_budget=CONTEXT_TOKENS,
        dtype="bfloat16",
        # At this length activations do not fit beside the optimizer; computing them twice costs a third more.
        activation_checkpointing="full",
        threads=32,
        # One micro-batch of 65k tokens, or the first use of a kernel, takes longer than the tiny models' 30 s.
        stall_s=600.0,
        start_timeout_s=1800.0,
    ),
    # In bfloat16 two programs do not agree to float32's 0.999 and 5e-4, even with the experts replayed.
    fidelity=Gates(min_pearson=0.99, max_k3=2e-3),
    # A crash costs the steps since the last one, to be made again from the groups on the disk: no trial is run twice.
    checkpoints=Checkpoints(every=10),
    # A trial costs minutes here: fewer of them before and after.
    validation=Validation(train_attempts=1, heldout_attempts=4),
)
