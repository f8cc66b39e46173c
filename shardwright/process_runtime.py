"""The runtime of this process: one rank of a process group that a launcher started, or all devices in one process.

1. `Runtime`, `init`, `current`: a process has one runtime, as it has one default process group. It is the one piece
   of state that outlives a call. `launch.environment` reads the launcher's environment.
2. `RandomStream`: the seed of each call of a model that draws random numbers,

    seed of a call = (torch.initial_seed(), number of calls that have drawn since the default generator was seeded)

Each such call takes one number from torch's default generator. After ``torch.manual_seed`` the generator is therefore
in its first state until the first such call, and the count begins again there. Example: after
``torch.manual_seed(7)`` the calls have the seeds (7, 0), (7, 1), (7, 2). Ranks need to be seeded alike; numbers that
their data loading draws from the default generator in between make no difference, and nothing is sent.

In one process the count also begins again where the generator is in a state again from which an earlier first call
drew: it was seeded alike, and the same model was built since. Two runs of a notebook's cell then have the same numbers,
under unlike plans too. Ranks do not look, since their states may differ.

A call inside of a backward is that of ``torch.utils.checkpoint``, which runs a forward again from the generator's state
at the first run: it has the number of the call that drew from that state, and is not counted.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import os
import sys
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from .accelerators import default_device, is_recording_graph
from .errors import SettingError, known_keywords
from .launch.device_choice import Companions, asked_device, cpu_remark, device_of_group, device_of_rank
from .launch.environment import LOOPBACK, RankInRun, find, is_loopback, is_msrun_scheduler, leading_to, remark, token_of
from .launch.lifelines import Lifelines
from .torch_private import backward_number, default_store

__all__ = [
    "RandomStream",
    "Runtime",
    "compare_devices",
    "current",
    "init",
    "of_micro_batch",
    "playing",
    "rank",
    "stream",
    "world_size",
]

#: A collective fails after this long without an answer from a peer. torch's own default is 30 minutes.
DEFAULT_TIMEOUT = timedelta(minutes=5)
#: torch itself gives up a collective after this multiple of the timeout, and no sooner than this much after it: ranks
#: find out the missing one before. To find it takes 13 s at most on an idle machine, and longer on a busy one.
TORCH_WAITS, TORCH_WAITS_LONGER = 1.5, timedelta(seconds=30)
#: Calls whose random numbers a backward can draw again.
REMEMBERED = 4096
#: Seconds that the end of a process leaves the interpreter to threads of the process group, which need microseconds.
LEAVING = 0.02


@dataclass(frozen=True)
class Runtime:
    """The place of this process among the devices.

    Attributes:
        processes: True: one process a device. False: all devices in this process.
        devices: the number of devices; None in the local runtime: as many as the model's marks refer to.
        rank: the rank of this process; 0 in the local runtime.
        device: the device on which this process computes.
        timeout: seconds that a rank waits for another.
        watch: True where ranks watch one another (`runtime.distributed.watchdog`).
        chosen: True in the local runtime where the user has named the device; else it is that of each model.
    """

    processes: bool
    devices: int | None
    rank: int
    device: torch.device
    timeout: float = DEFAULT_TIMEOUT.total_seconds()
    watch: bool = True
    chosen: bool = False


def torch_timeout(seconds: float) -> timedelta:
    """The timeout of a collective where ranks watch one another, and wait `seconds` for one another."""
    wait = timedelta(seconds=seconds)
    return max(wait * TORCH_WAITS, wait + TORCH_WAITS_LONGER)


_current: list[Runtime] = []

#: The default process group, where `init` has joined it. A reference that keeps the group alive would keep its threads.
_joined: list[Callable[[], object]] = []
#: The default process group, and the lifelines of its ranks: at most one.
_watched: list[tuple[Callable[[], object], Lifelines]] = []


@known_keywords({"device_num": "devices=", "world_size": "devices=, without a launcher", "backend_name": "backend="})
def init(
    devices: int | None = None,
    *,
    backend: str | None = None,
    timeout: float | None = None,
    watch: bool | None = None,
    device: torch.device | str | None = None,
) -> Runtime:
    """Find out the runtime of this process. May be called again.

    Under a launcher (torchrun, ``shardwright run``, mpirun, Slurm's srun, msrun, a rank table) it joins the process
    group of the processes that were started; the page on launching says which variables are read, and which take
    precedence. Otherwise all devices are in this process, and no launcher is needed. The scheduler that msrun starts
    beside the workers ends here, with exit code 0.

    Args:
        devices: the number of devices in this process, without a launcher. None: as many as the marks of the model
            refer to.
        backend: the backend of the process group; None: NCCL, HCCL or Gloo, by the device.
        timeout: seconds within which all ranks have to join, and that a rank waits for another in a collective or at
            the start of a step; None: 300. The error that ends the run names the rank that is missing, and the
            operation.
        watch: True: ranks watch one another while they run: all run the same program, and a missing rank is named.
            False: a collective only fails after the timeout. None: True, or as before.
        device: the device on which this process computes, such as "cuda", "cuda:1" or "cpu". None: with processes, the
            accelerator of the rank's place on its host, or the CPU; in one process, that of the model.

    Returns:
        The runtime.

    Raises:
        SettingError: a number of devices below 1, in the argument or in the environment; variables of launchers, or a
            rank table, that are faulty or contradict one another; ranks that do not join; a worker of a launcher that
            is not read. On every rank alike: a device that is not there; more processes on a host than accelerators;
            two processes on one accelerator. In a process group of the program's own, the last two are found at the
            first call of a model.

    Example:
        >>> runtime = sw.init(devices=8)
        >>> sw.world_size()
        8
    """
    if is_msrun_scheduler(os.environ) and not (dist.is_available() and dist.is_initialized()):
        print(
            "MS_ROLE=MS_SCHED: this process is msrun's scheduler, which has nothing to do here, and ends; the "
            f"{os.environ['MS_WORKER_NUM']} workers meet at rank 0",
            file=sys.stderr,
        )
        raise SystemExit(0)
    if devices is not None and (not isinstance(devices, int) or isinstance(devices, bool) or devices < 1):
        named = isinstance(devices, str) and devices.isalpha()
        raise SettingError(
            f"init(devices={devices!r})" + (": the first argument is the number of devices" if named else ""),
            legal=f"did you mean init(backend={devices!r})? Without it the device decides"
            if named
            else "a whole number of at least 1",
        )
    _check_backend(backend)
    before = _current[0] if _current else Runtime(False, None, 0, torch.device("cpu"))
    watched = before.watch if watch is None else watch
    if dist.is_available() and dist.is_initialized():
        found = _found(lambda: device_of_group(_place_in_group(), asked_device(device)))
        if isinstance(found, SettingError):
            raise _told_in_group(found)
        _note_interface(_address_of_group(), dist.get_backend_config())
        _remark(cpu_remark(found, device is not None), dist.get_rank())
        wait = before.timeout if timeout is None else timeout
        runtime = Runtime(True, dist.get_world_size(), dist.get_rank(), found, wait, watched)
    elif dist.is_available() and (place := find(os.environ)) is not None:
        mine = _found(lambda: device_of_rank(place, backend, asked_device(device), os.environ))
        limit = DEFAULT_TIMEOUT if timeout is None else timedelta(seconds=timeout)
        found = _join(place, mine, backend, limit, torch_timeout(limit.total_seconds()) if watched else limit)
        _remark(cpu_remark(found, device is not None or backend is not None), place.rank)
        runtime = Runtime(True, dist.get_world_size(), dist.get_rank(), found, limit.total_seconds(), watched)
    else:
        warning = remark(os.environ)
        if warning is not None:
            warnings.warn(warning, RuntimeWarning, stacklevel=2)
        asked = os.environ.get("SHARDWRIGHT_DEVICES")
        if asked and not (asked.isdecimal() and int(asked)):
            raise SettingError(f"SHARDWRIGHT_DEVICES={asked}", legal="a whole number of at least 1")
        chosen = asked_device(device)
        runtime = Runtime(
            False, int(asked) if asked else devices, 0, chosen or default_device(), chosen=chosen is not None
        )
    _current[:] = [runtime]
    if runtime.processes and watched and dist.get_world_size() > 1:
        lifelines()
    return runtime


def _place_in_group() -> RankInRun | None:
    """The place of this process in a group that the program has initialised itself; None where the environment has
    another."""
    try:
        place = find(os.environ)
    except SettingError:
        return None  # the group exists already, so that a faulty environment does not matter
    return place if place is not None and (place.rank, place.size) == (dist.get_rank(), dist.get_world_size()) else None


def _check_backend(backend: str | None) -> None:
    """Refuse a name that is no backend: in one process too, where none is needed.

    Raises:
        SettingError: the backend, and those that torch knows.
    """
    if backend is None or not dist.is_available():
        return
    known = sorted({"hccl", *dist.Backend.backend_list} - {"undefined"})
    names = [part.rpartition(":")[2].lower() for part in str(backend).split(",")]  # "cpu:gloo,cuda:nccl"
    if unknown := [name for name in names if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, 1)
        meant = f'did you mean "{near[0]}"? All: ' if near else ""
        raise SettingError(f"init(backend={backend!r}): there is no such backend", legal=meant + ", ".join(known))


def _found(find_device: Callable[[], torch.device]) -> torch.device | SettingError:
    """The device of this process, or the error of the choice, which the other ranks have to hear of before it is
    raised."""
    try:
        return find_device()
    except SettingError as error:
        return error


def _remark(text: str | None, rank: int) -> None:
    if text is not None and rank == 0:
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _note_interface(address: tuple[str, int] | None, backends: str) -> None:
    """Name the network interface of the run to Gloo, unless there is a Gloo group already: checkpoints have one beside
    another backend's, and the name of a host often leads to 127.0.1.1."""
    if address is None or "GLOO_SOCKET_IFNAME" in os.environ or "gloo" in backends:
        return
    interface = leading_to(*address)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface  # Gloo takes an interface in no other way


def _join(
    place: RankInRun,
    found: torch.device | SettingError,
    backend: str | None,
    timeout: timedelta,
    collectives: timedelta,
) -> torch.device:
    """Join the process group. All ranks have `timeout` to join; its collectives have the timeout `collectives`.

    Args:
        found: the device of this process, or the error that keeps it from having one.

    Raises:
        SettingError: on every rank alike: that of a rank; two processes on one device.
    """
    _note_interface((place.master_addr, place.master_port), "")
    from .launch.rendezvous import admitted, meet  # noqa: PLC0415  needed only under a launcher

    token = token_of(os.environ)
    if place.agent:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        store = admitted(store, token, place.rank == 0, f"the run at {place.master_addr}:{place.master_port}")
        store.set_timeout(collectives)
    else:
        store = meet(place, timeout.total_seconds(), token)
    companions = Companions(
        dist.PrefixStore("shardwright devices", store),
        place.rank,
        place.size,
        "one process for each accelerator: as many processes as the host has, or one visible device for each",
    )
    companions.tell(found)
    _remark(companions.check(timeout), place.rank)
    assert isinstance(found, torch.device)  # else `check` has raised
    dist.init_process_group(
        backend or {"cuda": "nccl", "npu": "hccl"}.get(found.type, "gloo"),
        store=dist.PrefixStore("default_pg", store),
        rank=place.rank,
        world_size=place.size,
        timeout=collectives,
    )
    _joined[:] = [weakref.ref(dist.group.WORLD)]
    return found


# -- a process group that the program has initialised itself


#: The process group whose ranks have compared their devices: at most one.
_compared: list[Callable[[], object]] = []


def compare_devices() -> None:
    """Compare the devices of all ranks of a process group that the program has initialised itself, before anything is
    sent. All ranks call it; after the first call in a group nothing is done.

    Raises:
        SettingError: on every rank alike: ranks with devices of several kinds, two on one accelerator, or none.
    """
    group = dist.group.WORLD
    if any(known() is group for known in (*_compared, *_joined)):
        return
    companions = _companions()
    if companions is not None:
        companions.tell(current().device)
        _remark(companions.check(timedelta(seconds=current().timeout)), dist.get_rank())
    _compared[:] = [weakref.ref(group)]


def _told_in_group(error: SettingError) -> SettingError:
    """The error of this rank, of which the other ranks of the program's own group hear; or that of an earlier rank."""
    companions = _companions()
    if companions is None:
        return error
    companions.tell(error)
    return companions.fault() or error


def _companions() -> Companions | None:
    """The ranks of the program's own process group; None where there are no others, or no store."""
    if dist.get_world_size() == 1 or dist.get_backend() in ("fake", "mpi"):
        return None
    return Companions(
        dist.PrefixStore("shardwright devices", default_store()),
        dist.get_rank(),
        dist.get_world_size(),
        "torch.accelerator.set_device_index(the number of the process on its host) in each process before its first "
        'call of shardwright, or shardwright.init(device="cuda:3") there',
    )


def _address_of_group() -> tuple[str, int] | None:
    """The address at which rank 0 of the program's own group listens; None where it is unknown."""
    store = default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return store.host, store.port
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    return (address, int(port)) if address and port.isdecimal() else None


#: Looks for rank 0's lifelines in `init`, and the seconds of the pause between two: other ranks may be there first.
_LOOKS, _PAUSE = 20, 0.02


def lifelines() -> Lifelines | None:
    """The lifelines of the ranks of the default process group, made by the first call. None where its store has no
    address at which other ranks could look for rank 0."""
    if _watched and _watched[0][0]() is dist.group.WORLD:
        return _watched[0][1]
    store = default_store()
    try:
        watch_store = dist.PrefixStore("shardwright/lifelines", store.clone())  # a connection for the thread that looks
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    address = getattr(store, "host", LOOPBACK)
    lines = Lifelines(watch_store, dist.get_rank(), dist.get_world_size(), address, not is_loopback(address))
    _watched[:] = [(weakref.ref(dist.group.WORLD), lines)]
    for _ in range(_LOOKS):
        lines.look()
        if lines.connected:
            break
        time.sleep(_PAUSE)
    return lines


@atexit.register
def _leave() -> None:
    """Leave the process group, once nothing is under way.

    1. A thread of Gloo frees the tensors of a collective when the collective has returned already, and needs the
       interpreter for it. An interpreter that shuts down meanwhile ends the process with SIGABRT. The pause hands the
       interpreter to that thread.
    2. NCCL and HCCL warn where the group that `init` has joined is left, so it is destroyed. After an error other ranks
       may stand in a collective, which the end of this process breaks off, and destroying the group waits for.
    """
    if not dist.is_available() or not (_joined or dist.is_initialized()):
        return
    time.sleep(LEAVING)
    ours = _joined and dist.is_initialized() and dist.group.WORLD is _joined[0]()
    if ours and getattr(sys, "last_value", None) is None and dist.get_backend() not in ("gloo", "mpi"):
        dist.destroy_process_group()


def current() -> Runtime:
    """The runtime of this process, found out now if `init` was not called."""
    return _current[0] if _current else init()


@contextlib.contextmanager
def playing(runtime: Runtime) -> Iterator[None]:
    """Make `runtime` that of this process inside the ``with`` block."""
    before = _current[:]
    _current[:] = [runtime]
    try:
        yield
    finally:
        _current[:] = before


def rank() -> int:
    """The rank of this process.

    Returns:
        A number from 0 to ``world_size() - 1``; 0 where all devices are in one process.

    Example:
        >>> sw.rank()  # all devices are in this process
        0
    """
    return current().rank


def world_size() -> int:
    """The number of devices.

    Returns:
        A number from 1 on; 1 where all devices are in one process and `init` was not given a number.

    Example:
        >>> sw.world_size()
        8
    """
    return current().devices or 1


# -- the seed of each call ---------------------------------------------------------------------------------------------


class RandomStream:
    """Counts the calls that draw random numbers. A resumed run has to restore it, in addition to the model's
    parameters."""

    def __init__(self) -> None:
        self.seed: int | None = None
        self.calls = 0
        self._seen: int | None = None  # the default generator's seed at the last call
        self._drawn: OrderedDict[int, tuple[int, int]] = (
            OrderedDict()
        )  # digest of a state -> seed and count of its call
        self._begun: OrderedDict[int, int] = OrderedDict()  # digest of a state -> seed of its call, which was the first
        self._new: tuple[int, Tensor] | None = None  # a seed, and the state of a generator just seeded with it

    def upcoming(self) -> tuple[int, int]:
        """Seed and count of the next call that draws."""
        return self._look(_state_digest())

    def draw(self, exact: bool) -> Tensor:
        """The seed of a call's first micro-batch, as a tensor in host memory for `rules.random_numbers`. The call is
        counted.

        Args:
            exact: True: random numbers belong to positions. False: they belong to operators and slices.

        Raises:
            SettingError: the accelerator records a graph, each replay of which would draw the same numbers.
        """
        if is_recording_graph():
            raise SettingError(
                "a call of a model that draws random numbers (dropout) while the accelerator records a graph: its seed "
                "is a number of the host, and each replay would draw the same numbers",
                legal="the call outside of torch.cuda.graph; a graph of the model in eval(), or without random numbers",
            )
        state = _state_digest()
        drawn = self._drawn.get(state) if backward_number() != -1 else None
        if drawn is None:
            self._drawn[state] = drawn = self._look(state)
            if not self.calls:
                self._begun[state] = drawn[0]
            self.calls += 1
            for known in (self._drawn, self._begun):
                if len(known) > REMEMBERED:
                    known.popitem(last=False)
        seed, call = drawn
        _use_default_generator()
        return torch.tensor([seed if seed < 1 << 63 else seed - (1 << 64), call, int(exact), 0], device="cpu")

    def state_dict(self) -> dict[str, object]:
        """The state for `load_state_dict`."""
        seed, calls = self.upcoming()
        return {"seed": seed, "calls": calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, until the default generator is seeded again."""
        _use_default_generator()
        self.seed, self.calls, self._seen = state["seed"], state["calls"], torch.initial_seed()
        self._begun.clear()

    def _look(self, state: int) -> tuple[int, int]:
        """Seed and count of the next call. The count restarts where the default generator was seeded since the last
        call, or where the digest of its state is that of an earlier first call."""
        seed = torch.initial_seed()
        if self._new is None or self._new[0] != seed:
            self._new = seed, torch.Generator().manual_seed(seed).get_state()
        if seed != self._seen or torch.equal(torch.get_rng_state(), self._new[1]):
            self.seed, self.calls, self._seen = seed, 0, seed
        elif state in self._begun and not (dist.is_available() and dist.is_initialized()):
            self.seed, self.calls = self._begun[state], 0
        assert self.seed is not None
        return self.seed, self.calls


def of_micro_batch(seed: Tensor, micro: int) -> Tensor:
    """The seed of a call, for another micro-batch."""
    made = seed.clone()
    made[3] = micro
    return made


def _state_digest() -> int:
    return xxhash.xxh3_64_intdigest(torch.get_rng_state().numpy().tobytes())


def _use_default_generator() -> None:
    torch.empty((), device="cpu").uniform_()


#: One stream for the process, like torch's default generator: models that are called in turn draw different numbers.
stream = RandomStream()
