"""Inside the box: runs mini-swe-agent's own `mini` command and says how it ended, which its exit status does not.

Standard input holds what its command line would take: {"packages": FOLDER, "config": [FILE, …]}.
"""

import json
import sys


def main() -> None:
    job = json.load(sys.stdin)
    sys.path.append(job["packages"])
    from minisweagent.run.mini import main as mini  # pyright: ignore[reportMissingImports]

    agent = mini(
        config_spec=job["config"],
        yolo=True,
        exit_immediately=True,
        cost_limit=0.0,
        model_name=None,
        model_class=None,
        agent_class=None,
        environment_class=None,
        task=None,
        output=None,
    )
    status = agent.messages[-1]["extra"]["exit_status"]
    sys.stdout.write("\n" + json.dumps({"type": "result", "is_error": False, "status": status}) + "\n")


if __name__ == "__main__":
    main()
