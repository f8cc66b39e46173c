"""``torch.compile`` of planned programs: the backend, its mode and its options; and dropouts in a compiled program.

1. The setting (`Compilation`).

       compile=True                             the default backend, inductor
       compile="aot_eager"                      another backend
       compile={"mode": "max-autotune"}         a mode of inductor; also "backend" and "options"

   A program has one set of shapes, so it is compiled with ``dynamic=False``. With a mode or an option that uses CUDA
   graphs, parameters keep their addresses (`keep_in_place`): a graph then reads them where they are, and copies the
   inputs alone.

2. The masks of `rules.counter_rng` in operators that a compiler sees through, and fuses with what reads them
   (`traced_mask`): the same bits as the operator ``shardwright.mask``. Seed, starts and positions stay tensors: the
   traced program is the same in every step, reads no value of the seed, and makes no copy of its own on the host.

       position i of an element    Σ over dims of (start + number of the row) · stride in the whole tensor
       word                        mix(state + (i div 2) · step), as in `counter_rng`
       element                     half i mod 2 of the word, as a signed integer of 32 bits, below p·2³² − 2³¹

   A seed that says "fast" gets these numbers too: they cost no more here.

3. The seed of the call and the start of the rank's slice, which a mask reads, are tensors in host memory. A compiler
   does not record a CUDA graph of a program that has such a tensor, so a compiled program has them on its device
   (`place_seed`):

       seed      copied at each call, 32 bytes, without a wait: the one input that differs from step to step
       starts    an ``arange`` of the program, made on the device

   A program with another random operator, which reads its seed on the host, keeps both in host memory.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SettingError
from ..rules.counter_rng import _GOLDEN, _MIX13, _MIX_GAMMA, _signed
from .lowering import Lowered

__all__ = ["TRACED", "Compilation", "keep_in_place", "place_seed", "traced_mask"]

# -- the setting


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

    backend: Any = "inductor"
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

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
    def of(cls, setting: Any) -> Compilation | None:
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

    def compiled(self, program: nn.Module, more: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        """A program, compiled at its first call.

        Args:
            program: the program.
            more: further options of inductor, beside which the user's own go first; other backends take none.
        """
        arguments = self.arguments()
        if more and self.backend == "inductor":
            from ..torch_private import options_of_mode  # noqa: PLC0415  loads the compiler

            own = self.options if self.mode is None else options_of_mode(self.mode)
            arguments = {"backend": "inductor", "dynamic": False, "options": {**more, **own}}
        return torch.compile(program, **arguments)


def keep_in_place(tensors: Iterable[Tensor]) -> None:
    """Tell the compiler that tensors have the same address at every call of a program."""
    from ..torch_private import mark_static_address  # noqa: PLC0415  loads the compiler

    for tensor in tensors:
        mark_static_address(tensor)


# -- masks that a compiler fuses


_ALTERNATING = _signed(0xAAAAAAAAAAAAAAAA)


def traced_mask(
    seed: Tensor,
    starts: Sequence[Tensor],
    like: Tensor | None,
    dims: Sequence[int],
    size: Sequence[int],
    whole: Sequence[int],
    number: int,
    p: float,
    dtype: torch.dtype,
    device: torch.device | None,
    micro: Sequence[int] = (),
) -> Tensor:
    """1 with probability p, else 0; the arguments are those of the operator ``shardwright.mask``."""
    on = like.device if like is not None else torch.device(device or "cpu")
    below = round(p * 2**32) - (1 << 31)
    if abs(below) == 1 << 31:
        return torch.full(tuple(size), below > 0, dtype=dtype, device=on)
    seed = seed.to(on)
    begin = {d: start.reshape(()).to(on) for d, start in zip(dims, starts)}
    at = torch.zeros((), dtype=torch.int64, device=on)
    stride = 1
    for d in range(len(size) - 1, -1, -1):
        rows, extent = torch.arange(size[d], device=on), whole[d]
        if d in begin:
            rows = rows + begin[d]
        if micro and d == micro[0]:
            piece = extent // micro[2]
            rows = rows // piece * (micro[1] * piece) + seed[3] * piece + rows % piece
            extent *= micro[1]
        at = at + (rows * stride).reshape((-1,) + (1,) * (len(size) - 1 - d))
        stride *= extent
    state, step = _key(seed, number)
    word = _mixed(state + (at >> 1) * step)
    half = torch.where((at & 1).bool(), word >> 32, (word << 32) >> 32)
    return (half < below).expand(tuple(size)).to(dtype)


def _key(seed: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """`counter_rng.key`, of the seed and the call in a tensor."""
    of_call = _mixed(_mixed(seed[0] + _signed(_GOLDEN)) + (seed[1] + 1) * _signed(_GOLDEN))
    state = _mixed(of_call + _signed((number + 1) * _GOLDEN))
    step = _mixed(state + _signed(_GOLDEN), _MIX_GAMMA) | 1
    regular = _ones(step ^ _shifted(step, 1)) < 24
    return state, torch.where(regular, step ^ _ALTERNATING, step)


def _mixed(z: Tensor, rounds: Sequence[tuple[int, int | None]] = _MIX13) -> Tensor:
    for shift, factor in rounds:
        z = z ^ _shifted(z, shift)
        if factor is not None:
            z = z * _signed(factor)
    return z


def _shifted(z: Tensor, shift: int) -> Tensor:
    """A shift to the right that fills with zeros: that of signed words copies the sign."""
    return (z >> shift) & ((1 << 64 - shift) - 1)


def _ones(z: Tensor) -> Tensor:
    """The number of bits that are 1."""
    z = z - (_shifted(z, 1) & 0x5555555555555555)
    z = (z & 0x3333333333333333) + (_shifted(z, 2) & 0x3333333333333333)
    z = (z + _shifted(z, 4)) & 0x0F0F0F0F0F0F0F0F
    return _shifted(z * 0x0101010101010101, 56)


#: Operator -> the function that a compiled program calls in its place.
TRACED: dict[Hashable, Callable[..., Tensor]] = {torch.ops.shardwright.mask.default: traced_mask}


# -- the seed on the device


def place_seed(lowered: Lowered, device: torch.device) -> torch.device | None:
    """Put the starts of a compiled program's masks on its device.

    Returns:
        The device on which the program takes the seed; None: it takes it in host memory, or draws nothing.
    """
    seed = lowered.plan.program.seed
    if seed is None or device.type == "cpu":
        return None
    inputs = [node for node in lowered.nodes if node.op == "placeholder"]
    readers = next(node for node in inputs if node.meta["instance"].name == seed.name).users
    if not all(node.target in TRACED for node in readers):
        return None
    for mask in readers:
        for start in mask.args[1]:
            while start.target is not torch.ops.aten.arange.start_step:
                (start,) = start.all_input_nodes
            start.kwargs = {**start.kwargs, "device": device}
    return device
