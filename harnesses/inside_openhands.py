# pyright: reportMissingImports=false
"""Inside the box: one conversation of the OpenHands SDK's default agent, which has no command line.

Standard input holds the settings as JSON, as `harnesses/openhands.py` writes them; the last line of output is the end.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def converse(job: Mapping[str, Any]) -> Any:
    """Runs the conversation to its end and returns its state."""
    from openhands.sdk import LLM, Agent, Conversation
    from openhands.tools.preset.default import get_default_condenser, get_default_tools, register_builtins_agents

    llm = LLM(**job["llm"])
    tools = get_default_tools(enable_browser=False, enable_sub_agents="task" in job["tools"])
    wanted = {name.removesuffix("_tool_set") for name in job["tools"]}
    own = {} if job["instructions"] is None else {"system_prompt": job["instructions"]}
    # As the SDK's own preset does, but for the label by which the proxy tells a summary from a title.
    summaries = llm.model_copy(update={"usage_id": "condenser", "extra_headers": {"x-lego-request": "compaction"}})
    agent = Agent(
        llm=llm,
        tools=[tool for tool in tools if tool.name.removesuffix("_tool_set") in wanted],
        system_prompt_kwargs={"cli_mode": True},
        condenser=get_default_condenser(summaries) if job["compact"] else None,
        **own,
    )
    if "task" in wanted:
        register_builtins_agents(enable_browser=False)
    conversation = Conversation(
        agent=agent, workspace=Path.cwd(), max_iteration_per_run=job["steps"], visualizer=None, delete_on_close=True
    )
    conversation.send_message(job["instruction"])
    conversation.run()
    conversation.close()
    return conversation.state


def problem(events: Sequence[Any]) -> tuple[str, str]:
    """Code and text of the last error that the conversation itself noted."""
    noted = [event for event in events if type(event).__name__ == "ConversationErrorEvent"]
    return (noted[-1].code, noted[-1].detail) if noted else ("", "an error without a message")


def main() -> None:
    job = json.load(sys.stdin)
    sys.path.append(job["packages"])
    state = converse(job)
    status = state.execution_status.value
    code, text = problem(state.events) if status == "error" else ("", "")
    own_limit = code == "MaxIterationsReached"
    result = {
        "type": "result",
        "is_error": status == "error" and not own_limit,
        "status": code or status,
        "result": text,
    }
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    sys.stdout.flush()
    # Threads of its libraries would keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
