"""distribution_utils: variables and flags against what reference/monolith.md (1.10) says of each."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith import SGD, EmbeddingCollection, Feature, Ragged, TableConfig
from megalith.compat.monolith import distributed_ps, distribution_utils
from megalith.compat.monolith.distribution_utils import FLAGS, MonolithFlags
from megalith.errors import InputError
from tests.distributed.ranks import error_of, run_ranks
from tests.serving.zookeeper import free_port

MPI = ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")
Environment = dict[str, str]


def mpi(*values: int) -> Environment:
    return {f"OMPI_COMM_WORLD_{n}": str(v) for n, v in zip(MPI, values, strict=True)}


def enter(environment: Environment, **flags: Any) -> None:
    """Sets the variables, and no others that these functions read, and the flags."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "MONOLITH_", "BYTEPS_", "DMLC_", "UCX_", "PSLITE_", "CUDA_", "GLOO_")):
            del os.environ[name]
    os.environ.update(environment)
    for name, value in (asdict(MonolithFlags()) | flags).items():
        setattr(FLAGS, name, value)
    distribution_utils._SYNC_TRAIN_INITED = False
    distribution_utils._warned.clear()


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = dict(os.environ)
    enter({})
    yield
    enter({})
    os.environ.clear()
    os.environ.update(before)


# ---- names


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_device_names_of_all_combinations(rank: int | None) -> None:
    """32 combinations of flags for each of 3 ranks: 96."""
    for sync, servers, gpu, allowed, forced in product((False, True), repeat=5):
        enter(
            {} if rank is None else mpi(rank, rank, 4, 4),
            enable_sync_training=sync,
            num_ps=2 * servers,
            enable_gpu_training=gpu,
            gpu_placement_allowed=allowed,
        )
        device = "/device:GPU:0" if (gpu or allowed) and not forced else "/device:CPU:0"
        if rank is None or not sync:
            expected = device
        elif not servers:
            expected = ""
        else:
            job = "/job:chief/replica:0/task:0" if rank == 0 else "/job:worker/replica:0/task:2"
            expected = job + device
        assert distribution_utils.get_device_str(forced) == expected


def test_names_of_servers() -> None:
    assert [distributed_ps.ps_device(i) for i in (0, 1)] == [
        "/job:ps/task:0/device:CPU:0",
        "/job:ps/task:1/device:CPU:0",
    ]
    with pytest.raises(InputError, match="index must be"):
        distributed_ps.ps_device(-1)


@pytest.mark.parametrize(
    ("function", "variable", "default"),
    [
        ("get_mpi_rank", "OMPI_COMM_WORLD_RANK", 0),
        ("get_mpi_local_rank", "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        ("get_mpi_size", "OMPI_COMM_WORLD_SIZE", 1),
        ("get_mpi_local_size", "OMPI_COMM_WORLD_LOCAL_SIZE", 1),
    ],
)
def test_each_function_of_ranks_reads_one_variable(
    function: str, variable: str, default: int, caplog: pytest.LogCaptureFixture
) -> None:
    call = getattr(distribution_utils, function)
    assert call() == default
    assert f"{function}: {variable} is not set; {default} is assumed" in caplog.text
    caplog.clear()
    os.environ["RANK"] = os.environ["WORLD_SIZE"] = "9"  # torchrun's are not read
    os.environ[variable] = "7"
    assert (call(), caplog.text) == (7, "")
    os.environ[variable] = "x"
    with pytest.raises(InputError, match=f"{variable} must be an integer, got 'x'"):
        call()


def test_synchronous_training_needs_the_flag_and_mpirun() -> None:
    for flag, launched in product((False, True), repeat=2):
        enter(mpi(0, 0, 1, 1) if launched else {}, enable_sync_training=flag)
        assert distribution_utils.enable_sync_training() is (flag and launched)  # also for one rank


def test_enable_bps_is_read_when_it_is_used() -> None:
    assert distribution_utils.enable_bps == 0
    os.environ["MONOLITH_WITH_BYTEPS"] = "1"
    assert distribution_utils.enable_bps == 1
    with pytest.raises(AttributeError, match="no attribute 'enable_hvd'"):
        _ = distribution_utils.enable_hvd


def test_a_variable_without_effect_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    enter({"MONOLITH_WITH_BYTEPS_FID": "1", "BYTEPS_NUMA_ID": "0", "MONOLITH_WITH_BYTEPS_BWD_CAST": "16"})
    for _ in range(2):
        distribution_utils.warn_of_ignored_variables()
    assert [record.getMessage() for record in caplog.records] == [
        "BYTEPS_NUMA_ID is set, but has no effect here",
        "MONOLITH_WITH_BYTEPS_FID is set, but has no effect here",
    ]


# ---- launch


def configs_of_a_rank() -> list[tuple[Any, ...]]:
    """What init_sync_train_and_update_conf sets, twice, for every setting."""
    found: list[tuple[Any, ...]] = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for bps, broadcast, reduce, merge in product("01", "01", "01", (False, True)):
        names = ("BYTEPS", "BYTEPS_BCAST", "BYTEPS_ALLREDUCE")
        own = {f"MONOLITH_WITH_{n}": v for n, v in zip(names, (bps, broadcast, reduce), strict=True)}
        enter(own | mpi(rank, rank, size, size) | {"DMLC_INTERFACE": "lo"})
        config = SimpleNamespace(uuid="run", model_dir="/models", merge_sync_training_ckpt=merge, num_ps=3)
        for _ in range(2):
            distribution_utils.init_sync_train_and_update_conf(config)
            inited = distribution_utils._SYNC_TRAIN_INITED
            found.append(((bps, broadcast, reduce, merge), inited, vars(config).copy()))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_the_six_fields_of_a_config(size: int) -> None:
    for rank, found in enumerate(run_ranks(configs_of_a_rank, world_size=size)):
        assert len(found) == 32
        for (bps, broadcast, reduce, merge), inited, config in found:
            pure = bps == "1" and broadcast == reduce == "1"
            own = pure or merge
            assert inited is not pure
            assert config == {
                "uuid": "run",
                "merge_sync_training_ckpt": merge,
                "model_dir": "/models" if own else f"/models/run/index-000{rank}",
                "num_ps": 0,
                "reorder_fids_in_data_pipeline": True,
                "index": rank,
                "num_workers": size,
                "enable_variable_partition": False,
            }


def group_of_a_rank(function: str, port: int) -> tuple[int, int, bool]:
    """Rank and size of the process group that a function makes in a process that mpirun has started."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    address = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_INTERFACE": "lo"}
    enter(mpi(rank, rank, size, size) | address | {"MONOLITH_WITH_HOROVOD": "1"}, enable_sync_training=True)
    config = SimpleNamespace(uuid="run", model_dir="m", merge_sync_training_ckpt=True)
    arguments = {"bps_init": ["run"], "init_sync_train_and_update_conf": [config]}
    getattr(distribution_utils, function)(*arguments.get(function, []))
    dist.barrier()
    return dist.get_rank(), dist.get_world_size(), distribution_utils._SYNC_TRAIN_INITED


@pytest.mark.parametrize("function", ["bps_init", "try_init_cuda", "init_sync_train_and_update_conf"])
@pytest.mark.parametrize("size", [1, 2])
def test_three_functions_connect_the_ranks(function: str, size: int) -> None:
    inited = function != "bps_init"
    found = run_ranks(group_of_a_rank, function, free_port(), world_size=size)
    assert found == [(rank, size, inited) for rank in range(size)]


def test_try_init_cuda_shows_the_gpu_of_the_local_rank() -> None:
    order, devices = "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"
    for launched, given, sync in product((False, True), repeat=3):
        enter(
            (mpi(5, 1, 8, 4) if launched else {}) | ({devices: "7"} if given else {}),
            enable_sync_training=sync,
        )
        distribution_utils.try_init_cuda()
        expected = "7" if given else ("1" if launched else None)
        assert os.environ.get(devices) == expected
        assert os.environ.get(order) == ("PCI_BUS_ID" if launched and not given else None)
        assert not distribution_utils._SYNC_TRAIN_INITED  # neither BytePS nor Horovod: logged, not raised


def test_bps_init_sets_monoliths_variables() -> None:
    (found,) = run_ranks(variables_of_bps_init, world_size=1)
    plain, bound, all_nics, large, (missing, named) = found
    socket_folder = os.path.join(tempfile.gettempdir(), "bps_run_socket_1")
    assert plain == plain | {
        "BYTEPS_ALLTOALL_SESSION_SIZE": "3",
        "BYTEPS_KEY_HASH_FN": "djb2-colocate",
        "BYTEPS_LOCAL_RANK": "1",
        "BYTEPS_LOCAL_SIZE": "4",
        "BYTEPS_P2P_PARTITION_BYTES": str(int(2048000 * 128 * 2 / 8)),
        "BYTEPS_PARTITION_BYTES": "1024000",
        "BYTEPS_SERVER_DIRECT_RESPONSE": "2",
        "BYTEPS_SOCKET_PATH": socket_folder,
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": "8",
        "DMLC_NUM_WORKER": "8",
        "DMLC_ROLE": "joint",
        "DMLC_WORKER_ID": "5",
        "GLOO_SOCKET_IFNAME": "lo",
        "PSLITE_UCX_RNDV_THRESH": "8192",
        "PSLITE_UCX_TLS": "rc_x,tcp,self,cuda",
    }
    assert "UCX_NET_DEVICES" not in plain  # Monolith raises KeyError without it
    assert (bound["UCX_NET_DEVICES"], bound["BYTEPS_KEY_HASH_FN"]) == ("mlx5_1:1", "naive")
    assert all_nics["UCX_NET_DEVICES"].startswith("mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,eth0")
    assert (large["BYTEPS_PARTITION_BYTES"], large["BYTEPS_P2P_PARTITION_BYTES"]) == ("512000", "4096000")
    assert missing == "InputError: DMLC_INTERFACE is 'none0', which is not an interface of this machine"
    assert named == [True, False]  # what has no effect is in the log once


def variables_of_bps_init() -> list[Any]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    distribution_utils.logger.addHandler(handler)
    distribution_utils.logger.setLevel(logging.INFO)
    found: list[Any] = []
    binding = {"BYTEPS_GPU_NIC_BINDING_MODE": "1", "BYTEPS_KEY_HASH_FN": "naive"}
    lo = {"DMLC_INTERFACE": "lo"}
    for own, ranks in (
        (lo, (5, 1, 8, 4)),
        (binding, (3, 3, 8, 4)),
        (binding | {"BYTEPS_WITH_ALL_NICS": "1"}, (0, 0, 8, 4)),
        (lo, (0, 0, 128, 8)),
    ):
        enter(mpi(*ranks) | own)
        distribution_utils.bps_init("run")
        found.append(dict(os.environ))
    named = []
    enter(mpi(0, 0, 1, 1) | lo)
    for _ in range(2):
        records.clear()
        distribution_utils.bps_init("run")
        named.append(any("these variables have no effect: BYTEPS_" in each for each in records))
    enter(mpi(0, 0, 1, 1) | {"DMLC_INTERFACE": "none0"})
    return [*found, (error_of(distribution_utils.bps_init, "run"), named)]


# ---- hooks and sessions


def test_hooks_of_all_settings() -> None:
    for sync, bps, broadcast, full in product((False, True), "01", ("-1", "0", "1"), (False, True)):
        enter(
            mpi(0, 0, 1, 1) | {"MONOLITH_WITH_BYTEPS": bps, "MONOLITH_WITH_BYTEPS_BCAST": broadcast},
            enable_sync_training=sync,
        )
        found = [type(each).__name__ for each in distribution_utils.get_sync_run_hooks(full)]
        expected = []
        if sync and (bps, broadcast) != ("1", "-1"):
            expected = ["BroadcastGlobalVariablesHook"]
            if full and (bps, broadcast) == ("1", "1"):
                expected.append("ByteCCLTelemetryHook")
        assert found == expected


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = TableConfig("t", dim=2, optimizer=SGD(0.1))
        self.embeddings = EmbeddingCollection([table], [Feature("f", "t")])
        self.dense = torch.nn.Linear(2, 1)


def run_hooks() -> tuple[float, list[int], float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    enter(mpi(rank, rank, size, size) | {"MONOLITH_WITH_BYTEPS": "1"}, enable_sync_training=True)
    hooks = distribution_utils.get_sync_run_hooks(is_full_sync=True)
    model = Model()
    torch.nn.init.constant_(model.dense.weight, rank + 1.0)
    for hook in hooks:
        hook.begin()
    for hook in hooks:
        hook.after_create_session(model, None)
    steps = []
    for step in range(1, 101):
        model.embeddings({"f": Ragged.from_lists([[rank]])})
        hooks[1].after_run(None, None)
        if [report.step for report in hooks[1].reports] == [step]:
            steps.append(step)
    ids = hooks[1].reports[0].tables["t"]["ids"].by_rank[0]
    hooks[1].end()
    return model.dense.weight[0, 0].item(), steps, ids


def test_hooks_broadcast_dense_weights_and_report_every_50_steps() -> None:
    assert run_ranks(run_hooks) == [(1.0, [50, 100], 50)] * 2


def test_session_config_of_all_settings() -> None:
    for sync, compatible, forward, backward in product((False, True), (None, "0", "1"), "01", "01"):
        own = {"MONOLITH_WITH_BYTEPS_FWD_GDR": forward, "MONOLITH_WITH_BYTEPS_BWD_GDR": backward}
        own |= {} if compatible is None else {"MONOLITH_FORCE_GPU_COMPATIBLE": compatible}
        enter(mpi(5, 1, 8, 4) | own, enable_sync_training=sync)
        config = SimpleNamespace(gpu_options=SimpleNamespace())
        distribution_utils.update_session_config_for_gpu(config)
        gdr = "1" in (forward, backward)
        expected: dict[str, Any] = {"allow_growth": not (sync and gdr)}
        if sync:
            expected["visible_device_list"] = "1"
            if compatible != "0":
                expected["force_gpu_compatible"] = True
            if gdr:
                expected["per_process_gpu_memory_fraction"] = 0.4
        assert vars(config.gpu_options) == expected


# ---- benchmarks


def measure() -> tuple[list[int], dict[str, Any]]:
    enter({"MONOLITH_BENCHMARK_BPS": "all", "MONOLITH_BENCHMARK_ITERS": "60"})
    os.environ["MONOLITH_BENCHMARK_BPS_AR_LEN"] = os.environ["MONOLITH_BENCHMARK_BPS_A2A_LEN"] = "256"
    found = distribution_utils.bps_comm_benchmark()
    goodputs = [
        distribution_utils.byteps_benchmark_ar(64, 40),
        distribution_utils.byteps_benchmark_ar(64, total_niter=100, use_cpu=True, op="pushpull"),
        distribution_utils.byteps_benchmark_a2a(64, total_niter=60, dst_gpu=False, src_gpu=True),
    ]
    assert all(each > 0 for own in goodputs for each in own)
    wrong = error_of(distribution_utils.byteps_benchmark_a2a, 9, 40)
    assert "total_len must be a multiple of the 2 ranks" in wrong
    return [len(each) for each in goodputs], {
        name: [length for length, mean in results if mean > 0] for name, results in found.items()
    }


def test_benchmarks_return_goodputs_as_monoliths_do() -> None:
    lengths = {name: [256, 128, 64] for name in ("c2g", "g2g", "c2c", "g2c")} | {"ar": [256, 256]}
    assert run_ranks(measure) == [([1, 4, 2], lengths)] * 2  # of every 20 calls, the first 20 left out


def test_benchmarks_name_wrong_settings() -> None:
    with pytest.raises(InputError, match="MONOLITH_BENCHMARK_BPS must be all or one of c2g, g2g"):
        distribution_utils.bps_comm_benchmark()
