"""AdamW over a network's parameters by name: who decays, at which learning rate, and what of it is saved."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from lego.learn.schedule import Schedule
from lego.learn.titan import Network

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """torch's AdamW over the parameters that learn; decay applies to matrices, not to norms and biases.

    Decoupled weight decay as in arXiv 1711.05101.
    """

    def __init__(
        self,
        network: Network,
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        schedule: Schedule | None = None,
        own_lr: Mapping[str, float] | None = None,
    ) -> None:
        """`own_lr` gives parameters whose name a pattern is found in their own rate; the first that matches counts.

        Raises ValueError for a pattern that is left without a parameter.
        """
        self.network, self.schedule = network, schedule or Schedule()
        self._position = torch.zeros((), dtype=torch.int64)
        rates = rate_of({n: lr for n, p in network.parameters().items() if p.requires_grad}, own_lr or {})
        groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
        for name, rate in rates.items():
            parameter = network.parameters()[name]
            groups.setdefault((rate, weight_decay if parameter.ndim > 1 else 0.0), []).append(parameter)
        # `base` is ours: torch carries a group's further fields along.
        described = [{"params": p, "base": rate, "weight_decay": decay} for (rate, decay), p in groups.items()]
        self.inner = torch.optim.AdamW(described, lr=lr, betas=betas, foreach=True)
        self._trained = {name: network.parameters()[name] for name in rates}
        self._lr = lr

    @property
    def position(self) -> int:
        """Steps taken, over all runs that this one continues."""
        return int(self._position)

    @property
    def lr(self) -> float:
        """Learning rate of the step to come, of parameters without their own."""
        return self._lr * self.schedule.share(self.position)

    def step(self) -> None:
        """Applies the gradients and clears them."""
        for group in self.inner.param_groups:
            group["lr"] = group["base"] * self.schedule.share(self.position)
        self.inner.step()
        self._position += 1
        self.clear()

    def clear(self) -> None:
        """Drops the gradients."""
        self.inner.zero_grad(set_to_none=True)

    def state(self) -> dict[str, torch.Tensor]:
        """Weights, moments, each parameter's step count and the schedule's position, by name, as they lie in memory.

        Who writes into them sets the state. Moments that no step has made yet are made, as zeros.
        """
        state: dict[str, torch.Tensor] = {"position": self._position}
        state |= {f"weights.{name}": p.detach() for name, p in self.network.parameters().items()}
        for name, parameter in self._trained.items():
            moments: dict[str, Any] = self.inner.state[parameter]
            if not moments:
                moments |= {"step": torch.tensor(0.0)}
                moments |= {key: torch.zeros_like(parameter.detach()) for key in MOMENTS}
            state |= {f"{key}.{name}": moments[key] for key in ("step", *MOMENTS)}
        return state


def rate_of(names: Mapping[str, float], own_lr: Mapping[str, float]) -> dict[str, float]:
    """Each name's learning rate: its own by the first pattern found in it, or else the one it came with."""
    left, rates = dict(names), {}
    for pattern, rate in own_lr.items():
        found = [name for name in left if re.search(pattern, name)]
        if not found:
            raise ValueError(f"learning rate {rate} is for {pattern!r}, which no parameter is left for")
        rates |= {name: rate for name in found}
        left = {name: lr for name, lr in left.items() if name not in rates}
    return rates | left
