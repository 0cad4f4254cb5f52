"""What a user can get wrong: one clear message each, no traceback, nothing left behind."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DEMO = "recipes/demo.py"


def train(*arguments: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lego.train", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=os.environ | (env or {}), timeout=120)


def refused(done: subprocess.CompletedProcess[str], *told: str, code: int = 2) -> None:
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert "Traceback" not in said, said
    for text in told:
        assert text in said, said


def test_a_wrong_recipe_path_answers_with_the_near_name():
    refused(train("recipes/dem.py"), "no recipe file recipes/dem.py", "did you mean recipes/demo.py?")


def test_no_recipe_at_all_is_a_usage_line():
    refused(train(), "RECIPE.py")


def test_a_flag_before_the_recipe_is_explained():
    refused(train("--steps", "3"), "the recipe file comes first")


def test_an_unknown_flag_answers_with_the_near_name():
    refused(train(DEMO, "--trainer.learning-rate", "1"), "trainer.learning-rate")
    refused(train(DEMO, "--rollout.group-sise", "4"), "--rollout.group-size")


def test_a_wrong_value_names_flag_and_value():
    refused(train(DEMO, "--steps", "many"), "--steps", "many")
    refused(train(DEMO, "--harness", "aider"), "aider", "codex")


def test_all_that_cannot_be_is_told_at_once():
    refused(train(DEMO, "--steps", "0", "--rollout.group-size", "1"), "steps: 0", "rollout.group_size: 1")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("engine.port", "99999"),
        ("sampling.temperature", "inf"),
        ("trainer.lr", "inf"),
        ("rollout.limits.memory-gib", "-1"),
        ("rollout.limits.cpus", "nan"),
        ("rollout.limits.deadline-s", "30"),
        ("rollout.max-unscored", "nan"),
        ("seed", "-1"),
    ],
)
def test_a_value_out_of_range_names_field_value_and_range(flag: str, value: str):
    refused(train(DEMO, f"--{flag}", value), flag.replace("-", "_"), value, "wanted")


def test_expert_parallelism_that_does_not_divide_the_experts_is_refused_at_once(tmp_path, fetched_cache):
    ranks = ("--trainer.world-size", "3", "--trainer.expert-parallel", "3")
    flags = (*ranks, "--run-dir", str(tmp_path / "run"), "--cache", str(fetched_cache))
    refused(train(DEMO, *flags), "trainer.expert_parallel: 3", "8 experts")


@pytest.mark.parametrize(("name", "content"), [("config.json", "[]"), ("tokenizer.json", '{"a":')])
def test_a_broken_policy_file_is_named(tmp_path, fetched_cache, name: str, content: str):
    policy = shutil.copytree(ROOT / "tools/demo_policy/policy", tmp_path / "policy")
    (policy / name).write_text(content)
    flags = ("--policy", str(policy), "--run-dir", str(tmp_path / "run"), "--cache", str(fetched_cache))
    refused(train(DEMO, *flags), str(policy / name))


def test_ctrl_c_while_the_program_loads_is_quiet():
    code = (
        "import runpy, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'lego.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "runpy.run_module('lego.train', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    refused(done, code=130)


def test_help_into_a_closed_pipe_is_quiet():
    shell = f"{sys.executable} -m lego.train {DEMO} --help | head -1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stderr == ""


def test_a_recipe_that_breaks_is_named_with_its_line(tmp_path):
    (tmp_path / "r.py").write_text("x = 1\ny = x.nothing\n")
    refused(train(str(tmp_path / "r.py")), "r.py:2", "AttributeError")


def test_a_file_without_a_recipe_is_told_what_is_wanted(tmp_path):
    (tmp_path / "r.py").write_text("x = 1\n")
    refused(train(str(tmp_path / "r.py")), "recipe = Recipe(...)")


def test_a_missing_model_folder_is_named(tmp_path):
    refused(train(DEMO, "--policy", str(tmp_path / "none")), "policy:", str(tmp_path / "none"))


def test_a_run_folder_in_use_is_refused(tmp_path):
    (tmp_path / "old").write_text("")
    refused(train(DEMO, "--run-dir", str(tmp_path)), "run_dir", "not empty")


def test_a_harness_that_was_not_fetched_names_the_command(tmp_path):
    done = train(DEMO, "--cache", str(tmp_path / "cache"), "--run-dir", str(tmp_path / "run"))
    refused(done, "harnesses.fetch codex")
    assert not (tmp_path / "run").exists()


def test_an_unreachable_package_index_is_one_message_and_leaves_no_half_built_tasks(tmp_path, fetched_cache):
    (tmp_path / "harnesses").symlink_to(fetched_cache / "harnesses")
    env = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    done = train(DEMO, "--cache", str(tmp_path), "--run-dir", str(tmp_path / "run"), env=env)
    refused(done, "package index")
    assert not list((tmp_path / "tasks").glob("[!.]*"))


def test_a_port_in_use_is_told_before_anything_starts(tmp_path, fetched_cache):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = train(DEMO, "--engine.port", port, "--run-dir", str(tmp_path / "run"), "--cache", str(fetched_cache))
    refused(done, "port", port, code=done.returncode or 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_is_one_message(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], check=True)
    try:
        (disk / "ballast").write_bytes(b"x" * 60_000)
        done = train(DEMO, "--run-dir", str(disk / "run"))
        refused(done, "no space left")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
