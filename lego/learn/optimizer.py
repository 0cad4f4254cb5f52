"""AdamW over a network's parameters by name: who decays, and what of it is saved."""

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
    ) -> None:
        self.network, self.schedule = network, schedule or Schedule()
        self._position = torch.zeros((), dtype=torch.int64)
        self._trained = {name: p for name, p in network.parameters().items() if p.requires_grad}
        groups: dict[float, list[torch.nn.Parameter]] = {}
        for parameter in self._trained.values():
            groups.setdefault(weight_decay if parameter.ndim > 1 else 0.0, []).append(parameter)
        described = [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]
        self.inner = torch.optim.AdamW(described, lr=lr, betas=betas, fused=True)
        self._lr = lr

    @property
    def position(self) -> int:
        """Steps taken, over all runs that this one continues."""
        return int(self._position)

    @property
    def lr(self) -> float:
        """Learning rate of the step to come."""
        return self._lr * self.schedule.share(self.position)

    def step(self) -> None:
        """Applies the gradients and clears them."""
        for group in self.inner.param_groups:
            group["lr"] = self.lr
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
                moments |= {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
                moments |= {key: torch.zeros_like(parameter.detach()) for key in MOMENTS}
            state |= {f"{key}.{name}": moments[key] for key in ("step", *MOMENTS)}
        return state
