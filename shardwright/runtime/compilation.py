"""``torch.compile`` of planned programs: the backend, its mode and its options.

    compile=True                             the default backend, inductor
    compile="aot_eager"                      another backend
    compile={"mode": "max-autotune"}         a mode of inductor; also "backend" and "options"

A program has one set of shapes, so it is compiled with ``dynamic=False``. With a mode or an option that uses CUDA
graphs, parameters keep their addresses (`keep_in_place`): a graph then reads them where they are, and copies the inputs
alone.

Example: ``compile={"mode": "max-autotune"}`` calls ``torch.compile(program, backend="inductor", dynamic=False,
mode="max-autotune")``. The mode "max-autotun" is an error that names the modes there are.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SettingError

__all__ = ["Compilation", "keep_in_place"]

#: The modes of torch.compile.
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

_LEGAL = (
    'True, False, the name of a backend, a backend, or a dict such as {"mode": "max-autotune"} of backend, mode and '
    "options"
)


@dataclass(frozen=True)
class Compilation:
    """The compilation of planned programs.

    Attributes:
        backend: the name of a backend of torch.compile, or a backend.
        mode: one of `MODES`; None: the backend's default.
        options: the backend's options; torch.compile takes either a mode or options.

    Raises:
        SettingError: an unknown backend, mode or option.
    """

    backend: str | Callable[..., object] = "inductor"
    mode: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.backend):
            names = torch.compiler.list_backends(exclude_tags=())
            if self.backend not in names:
                near = difflib.get_close_matches(str(self.backend), names, 3, 0.5)
                raise SettingError(
                    f"compile: unknown backend {self.backend!r}",
                    legal=", ".join(map(repr, near or names)) + ", or True",
                )
        if self.mode is not None and self.mode not in MODES:
            raise SettingError(f"compile: unknown mode {self.mode!r}", legal=", ".join(map(repr, MODES)))
        if not isinstance(self.options, Mapping) or not all(isinstance(key, str) for key in self.options):
            raise SettingError(f"compile: options={self.options!r}", legal='a dict such as {"max_autotune": True}')
        if self.mode is not None and self.options:
            raise SettingError(
                f"compile: mode={self.mode!r} and options={dict(self.options)!r}", legal="a mode, or options"
            )
        if self.mode is not None or self.options:
            if self.backend != "inductor":
                raise SettingError(
                    f"compile: a mode or options for the backend {self.backend!r}", legal='the backend "inductor"'
                )
            self._check_options()

    def _check_options(self) -> None:
        try:
            torch.compile(torch.relu, **self.arguments())
        except (RuntimeError, AttributeError, TypeError) as error:
            raise SettingError(
                f"compile: {str(error).splitlines()[0][:200]}", legal="options that torch.compile knows"
            ) from None

    @classmethod
    def of(cls, setting: object) -> Compilation | None:
        """The compilation that a user asks for; None: the program runs operator by operator.

        Args:
            setting: as `AutoParallel` takes it.

        Raises:
            SettingError: anything else.
        """
        if setting is None or setting is False:
            return None
        if isinstance(setting, Compilation):
            return setting
        if setting is True:
            return cls()
        if isinstance(setting, Mapping):
            if unknown := [key for key in setting if key not in ("backend", "mode", "options")]:
                raise SettingError(f"compile: unknown {', '.join(map(repr, unknown))}", legal=_LEGAL)
            return cls(**{key: value for key, value in setting.items() if value is not None})
        if not isinstance(setting, str) and not callable(setting):
            raise SettingError(f"compile={setting!r}", legal=_LEGAL)
        return cls(setting)

    def arguments(self) -> dict[str, Any]:
        """The arguments of torch.compile."""
        chosen = (
            {"mode": self.mode} if self.mode is not None else {"options": dict(self.options)} if self.options else {}
        )
        return {"backend": self.backend, "dynamic": False, **chosen}

    def compiled(self, program: nn.Module, more: Mapping[str, object] | None = None) -> Callable[..., Any]:
        """A program, compiled at its first call.

        Args:
            program: the program.
            more: further options of inductor, beside which the user's own go first; other backends take none.
        """
        arguments = self.arguments()
        if more and self.backend == "inductor":
            from ..torch_private import options_of_mode  # noqa: PLC0415  loads the compiler

            of_mode = self.options if self.mode is None else options_of_mode(self.mode)
            arguments = {"backend": "inductor", "dynamic": False, "options": {**more, **of_mode}}
        return torch.compile(program, **arguments)


def keep_in_place(tensors: Iterable[Tensor]) -> None:
    """Tell the compiler that tensors have the same address at every call of a program."""
    from ..torch_private import mark_static_address  # noqa: PLC0415  loads the compiler

    for tensor in tensors:
        mark_static_address(tensor)
