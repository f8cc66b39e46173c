"""The seed of each call of a model that draws random numbers.

    seed of a call = (torch.initial_seed(), how many calls have drawn since the default generator was seeded)

Each such call takes one number from torch's default generator, so that after ``torch.manual_seed`` the generator is as
new until the first of them: then the count begins again. Ranks need to have been seeded alike; what their data loading
draws from the default generator in between makes no difference, and nothing is sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["RandomStream", "of_micro_batch", "stream"]


class RandomStream:
    """Counts the calls that draw. Beside a model's parameters this is what a run that goes on later has to restore."""

    def __init__(self) -> None:
        self.seed: int | None = None
        self.calls = 0
        self._seen: int | None = None                       # the default generator's seed when it was last looked at
        self._new: tuple[int, Tensor] | None = None         # a seed, and the state of a generator just seeded with it

    def upcoming(self) -> tuple[int, int]:
        """Seed and count of the next call that draws."""
        self._look()
        assert self.seed is not None
        return self.seed, self.calls

    def draw(self, exact: bool) -> Tensor:
        """The seed of a call as a tensor in host memory, as `rules.generator` reads it: of its first micro-batch.

        Args:
            exact: the numbers belong to positions, else to operators and slices.
        """
        seed, call = self.upcoming()
        self.calls += 1
        _use_default_generator()
        return torch.tensor([seed if seed < 1 << 63 else seed - (1 << 64), call, int(exact), 0], device="cpu")

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes."""
        seed, calls = self.upcoming()
        return {"seed": seed, "calls": calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, until the default generator is seeded again."""
        _use_default_generator()
        self.seed, self.calls, self._seen = state["seed"], state["calls"], torch.initial_seed()

    def _look(self) -> None:
        """Begin again where the default generator was seeded since the last call."""
        seed = torch.initial_seed()
        if self._new is None or self._new[0] != seed:
            self._new = seed, torch.Generator().manual_seed(seed).get_state()
        if seed != self._seen or torch.equal(torch.get_rng_state(), self._new[1]):
            self.seed, self.calls, self._seen = seed, 0, seed


def of_micro_batch(seed: Tensor, micro: int) -> Tensor:
    """The seed of a call, for another micro-batch."""
    made = seed.clone()
    made[3] = micro
    return made


def _use_default_generator() -> None:
    torch.empty((), device="cpu").uniform_()


#: Of this process, as torch's default generator is: models that are called in turn do not draw the same numbers.
stream = RandomStream()
