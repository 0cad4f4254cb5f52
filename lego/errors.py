"""Errors that say who failed. Each becomes an `Outcome` in `rollout/trial.py`; all else is a bug."""


class EngineError(Exception):
    """The inference engine failed or answered nonsense."""


class HarnessError(Exception):
    """The agent program could not be started or ended in a way that is not the policy's doing."""


class VerdictError(Exception):
    """The hidden tests could not be run to a verdict."""


class TrainerError(Exception):
    """A trainer rank failed; the run stops."""


class UsageError(Exception):
    """The user asked for something that cannot be: one line, no traceback, exit status 2."""


class GateError(Exception):
    """A fidelity gate was breached: training on would not be on what was sampled."""
