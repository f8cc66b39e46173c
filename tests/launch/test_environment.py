"""Identity of a process: the variables of launchers, and the errors where they contradict or lack one another."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

import shardwright as sw
from shardwright.launch.environment import JOB_PORTS, PORT, RankInRun, expand, find, is_msrun_scheduler, remark

OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "3",
    "PMIX_NAMESPACE": "1213988865",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4", "PMI_FD": "6"}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[08-10],login",
    "SLURM_NODELIST": "gpu[01-20]",
}
TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}
MSRUN = {
    "MS_ROLE": "MS_WORKER",
    "MS_WORKER_NUM": "16",
    "MS_NODE_ID": "9",
    "MS_SCHED_HOST": "10.0.0.1",
    "MS_SCHED_PORT": "8118",
    "RANK_ID": "9",
}


def job_port(place: RankInRun) -> bool:
    return place.master_port in JOB_PORTS


@pytest.mark.parametrize(
    "environ, launcher, rank, size, device, devices, master, port",
    [
        (TORCHRUN, "torchrun", 9, 16, 1, 8, "10.0.0.1", 29400),
        (OMPI, "Open MPI", 3, 4, 3, 4, "127.0.0.1", None),
        (
            {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "MASTER_ADDR": "node1"},
            "Open MPI",
            3,
            4,
            1,
            2,
            "node1",
            None,
        ),
        ({**OMPI, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "Open MPI", 3, 4, 3, 4, "127.0.0.1", None),
        (HYDRA, "PMI", 3, 4, 3, 4, "127.0.0.1", PORT),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "MASTER_ADDR": "n"},
            "PMI",
            3,
            4,
            1,
            2,
            "n",
            PORT,
        ),
        (SRUN, "Slurm", 5, 7, 1, 2, "gpu08", None),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODELIST": "n[3,5]"},
            "Slurm",
            5,
            8,
            1,
            4,
            "n3",
            PORT,
        ),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "5", "SLURM_NODELIST": "n3"},
            "Slurm",
            5,
            8,
            5,
            8,
            "127.0.0.1",
            PORT,
        ),
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "7"}, "Slurm", 5, 7, 1, 2, "gpu08", None),  # srun --mpi=pmi2
        (MSRUN, "msrun", 9, 16, 0, 1, "10.0.0.1", 8118),
        ({**MSRUN, "DEVICE_ID": "1"}, "msrun", 9, 16, 1, 2, "10.0.0.1", 8118),
        ({**MSRUN, "MS_SCHED_HOST": "127.0.0.1"}, "msrun", 9, 16, 9, 16, "127.0.0.1", 8118),
        (
            {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4", "MS_NODE_ID": "3", "MASTER_PORT": "7000"},
            "msrun",
            3,
            4,
            3,
            4,
            "127.0.0.1",
            7000,
        ),
        ({**MSRUN, **TORCHRUN, "MS_NODE_ID": "3"} | {"RANK_ID": "9"}, "torchrun", 9, 16, 1, 8, "10.0.0.1", 29400),
        # One launcher inside another: the inner one knows.
        ({**OMPI, **SRUN}, "Open MPI", 3, 4, 3, 4, "127.0.0.1", None),
        ({**SRUN, **HYDRA}, "PMI", 3, 4, 3, 4, "127.0.0.1", PORT),
        ({**SRUN, **OMPI, **TORCHRUN}, "torchrun", 9, 16, 1, 8, "10.0.0.1", 29400),
        # By hand, beside a launcher that says the same.
        ({**SRUN, "RANK": "5", "WORLD_SIZE": "7", "MASTER_PORT": "7000"}, "torchrun", 5, 7, 1, 2, "gpu08", 7000),
        (
            {**SRUN, "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "x"},
            "torchrun",
            5,
            7,
            0,
            1,
            "x",
            None,
        ),
        ({**OMPI, "WORLD_SIZE": "4"}, "Open MPI", 3, 4, 3, 4, "127.0.0.1", None),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "torchrun", 1, 2, 0, 1, "h", PORT),
    ],
)
def test_who_is_believed(environ, launcher, rank, size, device, devices, master, port) -> None:
    place = find(environ)
    assert (place.launcher, place.rank, place.size, place.device, place.devices, place.master_addr) == (
        launcher,
        rank,
        size,
        device,
        devices,
        master,
    )
    assert job_port(place) if port is None else place.master_port == port
    assert place.agent == ("TORCHELASTIC_RUN_ID" in environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", **SRUN, "TORCHELASTIC_RUN_ID": "x"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_NTASKS": "8", "SLURM_NODELIST": "n[1-2]"},  # salloc's shell
        {
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "8",
            "ENVIRONMENT": "BATCH",
            "SLURM_JOB_ID": "1",
        },  # a batch script itself
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"},
        {"RANK_TABLE_FILE": "", "RANK_ID": ""},
        {"RANK_ID": "3", "SHARDWRIGHT_DEVICES": "8"},
        {"DEVICE_ID": "3"},
        {**MSRUN, "RANK_ID": "", "MS_WORKER_NUM": "1", "MS_NODE_ID": "0"},
        {**MSRUN, "SHARDWRIGHT_DEVICES": "8"},
        {"PMIX_RANK": "3", "SHARDWRIGHT_DEVICES": "8"},
        {"PMIX_RANK": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},  # srun --mpi=pmix -n 1 --pty bash
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "LOCAL_RANK": "0", "PAGE_RANK": "high", "LORA_RANK": "8"},
    ],
)
def test_a_process_of_its_own(environ) -> None:
    assert find(environ) is None and remark(environ) is None


@pytest.mark.parametrize(
    "environ, says",
    [
        ({"PMIX_RANK": "3"}, "PMIX_RANK=3 is set, as PMIx sets it"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "8"}, "HOROVOD_RANK=0 of HOROVOD_SIZE=8 is set, as Horovod"),
        ({"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2"}, "PADDLE_TRAINER_ID=1 of PADDLE_TRAINERS_NUM=2"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID=3 is set, as Slurm"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is set"),
    ],
)
def test_a_worker_of_a_launcher_that_is_not_read_does_not_play_all_devices(environ, says) -> None:
    with pytest.raises(sw.SettingError) as raised:
        find(environ)
    assert says in raised.value.message and all(
        part in raised.value.legal for part in ("WORLD_SIZE", "MASTER_ADDR", "left over", "SHARDWRIGHT_DEVICES=8")
    )


@pytest.mark.parametrize(
    "environ, says",
    [
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0: the environment may mean"),
        ({"NEW_MPI_WORLD_RANK": "3", "NEW_MPI_WORLD_SIZE": "8"}, "NEW_MPI_WORLD_RANK=3 and NEW_MPI_WORLD_SIZE=8"),
        ({"MS_WORKER_NUM": "8", "MS_SCHED_HOST": "10.0.0.1"}, "MS_WORKER_NUM=8 without MS_ROLE"),
    ],
)
def test_variables_that_may_mean_several_processes_are_a_warning(environ, says, monkeypatch) -> None:
    assert find(environ) is None and says in remark(environ)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(RuntimeWarning, match=says.partition(":")[0]):
        assert not sw.init(devices=8).processes


def test_the_scheduler_of_msrun_has_no_rank() -> None:
    scheduler = {**MSRUN, "MS_ROLE": "MS_SCHED", "RANK_ID": ""}
    assert is_msrun_scheduler(scheduler) and find(scheduler) is None
    assert not is_msrun_scheduler(MSRUN) and not is_msrun_scheduler({"MS_ROLE": "MS_SCHED"})
    assert not is_msrun_scheduler({**scheduler, "SHARDWRIGHT_DEVICES": "8"})
    assert not is_msrun_scheduler({**scheduler, **TORCHRUN})


def test_runs_on_one_host_do_not_meet() -> None:
    ports = {
        find({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in range(10)
        for step in range(2)
    }
    assert len(ports) > 15 and ports <= set(JOB_PORTS)


CONTRADICTIONS = [
    ({**OMPI, "RANK": "0", "WORLD_SIZE": "4"}, "RANK=0 (torchrun) and OMPI_COMM_WORLD_RANK=3 (Open MPI) contradict"),
    ({**OMPI, "RANK": "0", "WORLD_SIZE": "1"}, "RANK=0 (torchrun) and OMPI_COMM_WORLD_RANK=3 (Open MPI) contradict"),
    ({**SRUN, "WORLD_SIZE": "8"}, "SLURM_STEP_NUM_TASKS=7 (Slurm) and WORLD_SIZE=8 (torchrun) contradict"),
    ({**TORCHRUN, "RANK_ID": "3"}, "RANK=9 (torchrun) and RANK_ID=3 (rank table) contradict"),
    ({**OMPI, "RANK_ID": "2"}, "OMPI_COMM_WORLD_RANK=3 (Open MPI) and RANK_ID=2|RANK_ID=2 (rank table) and OMPI"),
    ({"RANK": "3"}, "RANK=3 is set, WORLD_SIZE is not"),
    ({"WORLD_SIZE": "3"}, "WORLD_SIZE=3 is set, RANK is not"),
    ({"RANK": "3", "WORLD_SIZE": "3", "MASTER_ADDR": "x"}, "torchrun: RANK=3 is outside WORLD_SIZE=3"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "torchrun: RANK=0 is outside WORLD_SIZE=0"),
    ({"RANK": "zero", "WORLD_SIZE": "3"}, "RANK=zero"),
    ({"RANK": "0", "WORLD_SIZE": "-3"}, "WORLD_SIZE=-3"),
    ({"RANK": "0", "WORLD_SIZE": "3"}, "torchrun: RANK=0 of WORLD_SIZE=3 is set, MASTER_ADDR is not"),
    ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
    ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT=http"),
    ({**TORCHRUN, "LOCAL_RANK": "8"}, "torchrun: local rank=8 is outside local size=8"),
    ({"OMPI_COMM_WORLD_RANK": "3"}, "Open MPI: OMPI_COMM_WORLD_RANK=3 is set, OMPI_COMM_WORLD_SIZE is not"),
    ({"PMI_SIZE": "3"}, "PMI: PMI_SIZE=3 is set, PMI_RANK is not"),
    (
        {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        "OMPI_COMM_WORLD_SIZE=4 is set, MASTER_ADDR is not",
    ),
    ({**SRUN, "SLURM_STEP_NODELIST": "gpu[08-10"}, "SLURM_STEP_NODELIST=gpu[08-10 cannot be read from its character 4"),
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(y3)"}, "SLURM_STEP_TASKS_PER_NODE=2(y3) cannot be read at '2(y3)'"),
    ({"RANK_ID": "3"}, "RANK_ID=3 is set, RANK_TABLE_FILE is not"),
    ({**MSRUN, "MS_NODE_ID": ""}, "msrun: MS_ROLE=MS_WORKER is set, MS_NODE_ID is not"),
    ({"MS_ROLE": "MS_WORKER", "MS_NODE_ID": "0"}, "msrun: MS_ROLE=MS_WORKER is set, MS_WORKER_NUM is not"),
    ({**MSRUN, "MS_ROLE": "MS_PSERVER"}, "MS_ROLE=MS_PSERVER"),
    ({**MSRUN, "MS_NODE_ID": "16"}, "msrun: MS_NODE_ID=16 is outside MS_WORKER_NUM=16"),
    ({**MSRUN, "MS_NODE_ID": "worker_3"}, "MS_NODE_ID=worker_3"),
    ({**MSRUN, "MS_SCHED_PORT": "70000"}, "MS_SCHED_PORT=70000"),
    (
        {**MSRUN, "RANK_ID": "", "RANK": "3", "WORLD_SIZE": "16"},
        "RANK=3 (torchrun) and MS_NODE_ID=9 (msrun) contradict",
    ),
]


@pytest.mark.parametrize("environ, says", CONTRADICTIONS, ids=[says for _, says in CONTRADICTIONS])
def test_variables_that_contradict_or_lack_one_another(environ, says) -> None:
    with pytest.raises(sw.SettingError) as raised:
        find(environ)
    assert any(part in raised.value.message for part in says.split("|")) and raised.value.legal


# -- host lists ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("login", ["login"]),
        ("a,b-2.example", ["a", "b-2.example"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("node[098-101]-ib", ["node098-ib", "node099-ib", "node100-ib", "node101-ib"]),
        ("r[1-2]n[0,5]", ["r1n0", "r1n5", "r2n0", "r2n5"]),
        ("a[1-2],b,c[3]", ["a1", "a2", "b", "c3"]),
    ],
)
def test_host_lists(text, hosts) -> None:
    assert expand(text, "X") == tuple(hosts)


@pytest.mark.parametrize(
    "text", ["", ",", "a,", ",a", "a,,b", "a[1", "a1]", "a[]", "a[1-]", "a[3-1]", "a[x]", "a[1,]", "a[[1]]", "a[1-2-3]"]
)
def test_host_lists_that_cannot_be_read(text) -> None:
    with pytest.raises(sw.SettingError, match="X="):
        expand(text, "X")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["n", "gpu-", "r1c"]),
            st.integers(1, 4),
            st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5)), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_host_list_is_what_its_ranges_count(items) -> None:
    text, hosts = [], []
    for prefix, width, ranges in items:
        inside = (f"{a:0{width}}-{a + n:0{width}}" if n else f"{a:0{width}}" for a, n in ranges)
        text.append(f"{prefix}[{','.join(inside)}]")
        hosts += [f"{prefix}{number:0{width}}" for a, n in ranges for number in range(a, a + n + 1)]
    assert expand(",".join(text), "X") == tuple(hosts)
