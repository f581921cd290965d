"""Monolith's functions of ranks, devices, launches and communication benchmarks.

Variables are read when a function is called, never when this module is imported. `FLAGS` has the flags that
Monolith defines on its command line. A variable MONOLITH_... or BYTEPS_... that is set and has no effect is
logged once as a warning.

Names of devices are TensorFlow's. Nothing is placed by them here: a tensor has a `torch.device`, and rows are
on the rank or server that the router gives.

    process                                          name
    parameter server i                               /job:ps/task:i/device:CPU:0
    rank 0 of synchronous training, with servers     /job:chief/replica:0/task:0/device:TYPE:0
    rank r > 0 of synchronous training, with servers /job:worker/replica:0/task:(r - 1)/device:TYPE:0
    a rank of synchronous training without servers   the empty string
    any other process                                /device:TYPE:0
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from megalith.checkpoint.model_state import collections_of
from megalith.distributed.comm_bench import PATTERNS, CommSettings, RankLink
from megalith.distributed.dense_parameters import broadcast_dense
from megalith.distributed.launcher_environment import init_process_group, read_launch
from megalith.distributed.ranks import has_process_group
from megalith.errors import InputError
from megalith.ops import checks
from megalith.shards import SyncShards
from megalith.shards.comm_metrics import CommMetrics, CommReport

logger = logging.getLogger(__name__)

INTERVAL = 20
"""Calls of a benchmark for one goodput."""
TELEMETRY_STEPS = 50
GDR_MEMORY_FRACTION = 0.4

_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
_WITH_EFFECT = {
    *("BYTEPS_GPU_NIC_BINDING_MODE", "BYTEPS_LOCAL_SIZE", "MONOLITH_BENCHMARK_BPS"),
    *("MONOLITH_BENCHMARK_BPS_A2A_LEN", "MONOLITH_BENCHMARK_BPS_AR_LEN", "MONOLITH_BENCHMARK_ITERS"),
    *("MONOLITH_FORCE_GPU_COMPATIBLE", "MONOLITH_WITH_BYTEPS", "MONOLITH_WITH_BYTEPS_ALLREDUCE"),
    *("MONOLITH_WITH_BYTEPS_BCAST", "MONOLITH_WITH_BYTEPS_BWD_CAST", "MONOLITH_WITH_BYTEPS_BWD_GDR"),
    *("MONOLITH_WITH_BYTEPS_FWD_GDR", "MONOLITH_WITH_HOROVOD"),
}
_SET_BY_BPS_INIT = {
    "BYTEPS_FORCE_DISTRIBUTED": "1",
    "BYTEPS_UCX_FORCE_REQ_ORDER": "1",
    "DMLC_ROLE": "joint",
}
_DEFAULTS_OF_BPS_INIT = {
    "BYTEPS_ALLTOALL_SESSION_SIZE": "3",
    "BYTEPS_KEY_HASH_FN": "djb2-colocate",
    "BYTEPS_LOG_LEVEL": "info",
    "BYTEPS_OMP_THREAD_PER_GPU": "1",
    "BYTEPS_SERVER_DIRECT_RESPONSE": "2",
    "BYTEPS_TELEMETRY_ON": "0",
    "BYTEPS_UCX_SHORT_THRESH": "0",
    "BYTEPS_WORKER_LOCAL_ROOT": "-1",
    "DMLC_ENABLE_UCX": "1",
    "PSLITE_UCX_RNDV_THRESH": "8192",
    "PSLITE_UCX_TLS": "rc_x,tcp,self,cuda",
}

_SYNC_TRAIN_INITED = False
_warned: set[str] = set()


@dataclass
class MonolithFlags:
    """Monolith's flags of synchronous training, to be set before the calls that read them."""

    enable_sync_training: bool = False
    """Whether ranks that mpirun started train synchronously."""
    num_ps: int = 0
    """The number of parameter servers, for names of devices."""
    enable_gpu_training: bool = False
    """Whether names of devices are those of GPUs."""
    gpu_placement_allowed: bool = False
    """The same, as Monolith's device_utils allows it."""
    enable_alltoall_metrics: bool = False
    """Whether synchronous tables write the summaries of their exchanges."""
    enable_alltoall_metrics_for_slot: str | None = None
    """The slot whose size is written too."""
    model_dir: str = ""
    """The directory of summaries; "" is TensorBoard's own default."""


FLAGS = MonolithFlags()


def __getattr__(name: str) -> Any:
    if name == "enable_bps":
        return int_variable("MONOLITH_WITH_BYTEPS", 0)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def int_variable(name: str, default: int) -> int:
    """Return an environment variable as an integer."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{name} must be an integer, got {text!r}; unset it, or set it to one") from None


def warn_of_ignored_variables() -> None:
    """Warn once of each variable that is set and has no effect."""
    for name in sorted(os.environ):
        if name.startswith(("MONOLITH_", "BYTEPS_")) and name not in _WITH_EFFECT | _warned:
            _warned.add(name)
            logger.warning("%s is set, but has no effect here", name)


# ---- ranks


def _mpi(function: str, variable: str, default: int) -> int:
    if variable not in os.environ:
        logger.warning("%s: %s is not set; %d is assumed", function, variable, default)
    return int_variable(variable, default)


def get_mpi_rank() -> int:
    """Return OMPI_COMM_WORLD_RANK; 0 with a warning if it is not set."""
    return _mpi("get_mpi_rank", "OMPI_COMM_WORLD_RANK", 0)


def get_mpi_local_rank() -> int:
    """Return OMPI_COMM_WORLD_LOCAL_RANK; 0 with a warning if it is not set."""
    return _mpi("get_mpi_local_rank", _LOCAL_RANK, 0)


def get_mpi_size() -> int:
    """Return OMPI_COMM_WORLD_SIZE; 1 with a warning if it is not set."""
    return _mpi("get_mpi_size", "OMPI_COMM_WORLD_SIZE", 1)


def get_mpi_local_size() -> int:
    """Return OMPI_COMM_WORLD_LOCAL_SIZE; 1 with a warning if it is not set."""
    return _mpi("get_mpi_local_size", "OMPI_COMM_WORLD_LOCAL_SIZE", 1)


def enable_sync_training() -> bool:
    """Return whether FLAGS.enable_sync_training is set and mpirun started this process."""
    return bool(FLAGS.enable_sync_training) and _LOCAL_RANK in os.environ


# ---- devices


def get_device_str(force_on_cpu: bool = False) -> str:
    """Return the name of the device of this process; see the table of the module."""
    on_gpu = FLAGS.enable_gpu_training or FLAGS.gpu_placement_allowed
    gpu = on_gpu and not checks.flag(force_on_cpu, "force_on_cpu")
    device = f"/device:{'GPU' if gpu else 'CPU'}:0"
    if not enable_sync_training():
        return device
    if FLAGS.num_ps <= 0:
        return ""
    rank = get_mpi_rank()
    return f"/job:{f'worker/replica:0/task:{rank - 1}' if rank else 'chief/replica:0/task:0'}{device}"


def try_init_cuda() -> None:
    """Show this rank the GPU of its local rank, and begin synchronous training; failures are only logged.

    It has an effect before torch has used a GPU.
    """
    if _LOCAL_RANK not in os.environ:
        return
    global _SYNC_TRAIN_INITED
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = str(get_mpi_local_rank())
    if _SYNC_TRAIN_INITED or not FLAGS.enable_sync_training:
        return
    try:
        if not (int_variable("MONOLITH_WITH_BYTEPS", 0) or int_variable("MONOLITH_WITH_HOROVOD", 0)):
            raise InputError("neither MONOLITH_WITH_BYTEPS nor MONOLITH_WITH_HOROVOD is set")
        _join_ranks()
        _SYNC_TRAIN_INITED = True
    except Exception as error:  # as in Monolith, which continues without synchronous training
        logger.info("try_init_cuda: %s", error)


def update_session_config_for_gpu(session_config: Any) -> None:
    """Set the GPU options of a session config, and torch's share of the GPU's memory where one is set.

    Args:
        session_config: An object with `gpu_options`, whose attributes are set.
    """
    options = getattr(session_config, "gpu_options", session_config)
    if not enable_sync_training():
        options.allow_growth = True
        return
    if os.environ.get("MONOLITH_FORCE_GPU_COMPATIBLE", "1") == "1":
        options.force_gpu_compatible = True
    options.visible_device_list = str(get_mpi_local_rank())
    gdr = any(int_variable(f"MONOLITH_WITH_BYTEPS_{way}_GDR", 0) for way in ("FWD", "BWD"))
    options.allow_growth = not gdr
    if gdr:
        options.per_process_gpu_memory_fraction = GDR_MEMORY_FRACTION
        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(GDR_MEMORY_FRACTION)


# ---- launch


def _join_ranks() -> tuple[int, int]:
    """Make the process group, unless there is one; return rank and size."""
    if not has_process_group():
        for ours, theirs in (("MASTER_ADDR", "DMLC_PS_ROOT_URI"), ("MASTER_PORT", "DMLC_PS_ROOT_PORT")):
            if theirs in os.environ:
                os.environ.setdefault(ours, os.environ[theirs])
        launch = read_launch()
        if launch.size == 1:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        else:
            init_process_group(launch)
    return dist.get_rank(), dist.get_world_size()


def init_sync_train_and_update_conf(dct_config: Any) -> None:
    """Make the process group, once, and set what synchronous training needs in a config.

    Unless MONOLITH_WITH_BYTEPS alone makes the group, the first call sets `model_dir` to
    `model_dir/uuid/index-RANK`, if `merge_sync_training_ckpt` is not set. Every call sets `num_ps`,
    `reorder_fids_in_data_pipeline`, `index`, `num_workers` and `enable_variable_partition`.

    Args:
        dct_config: An object with the attributes uuid, model_dir and merge_sync_training_ckpt.

    Raises:
        RankTimeoutError: The other ranks cannot be reached.
    """
    global _SYNC_TRAIN_INITED
    logger.info("entering synchronous training")
    warn_of_ignored_variables()
    bps = int_variable("MONOLITH_WITH_BYTEPS", 0)
    if bps and not _SYNC_TRAIN_INITED:
        bps_init(dct_config.uuid)
    rank, size = _join_ranks()
    parts = [int_variable(f"MONOLITH_WITH_BYTEPS_{part}", 1) for part in ("BCAST", "ALLREDUCE")]
    if not _SYNC_TRAIN_INITED and (not bps or 0 in parts):
        _SYNC_TRAIN_INITED = True
        if not dct_config.merge_sync_training_ckpt:
            own = f"index-{rank:04}"
            dct_config.model_dir = os.path.join(dct_config.model_dir, dct_config.uuid, own)
    dct_config.num_ps = 0
    dct_config.reorder_fids_in_data_pipeline = True
    dct_config.index = rank
    dct_config.num_workers = size
    dct_config.enable_variable_partition = False


def bps_init(uuid: str) -> None:
    """Set the variables that Monolith sets for BytePS, and make the process group over its interface.

    The group is torch's, with gloo over DMLC_INTERFACE, or over eth{local_rank // 2} with
    BYTEPS_GPU_NIC_BINDING_MODE. The other variables are for programs that read them; the log says once which
    have no effect.

    Args:
        uuid: Identifies the run, in the name of its socket directory.

    Raises:
        InputError: DMLC_INTERFACE is not an interface of this machine.
    """
    warn_of_ignored_variables()
    text = checks.text(uuid, "bps_init: uuid")
    given = os.environ
    given.setdefault("BYTEPS_LOCAL_SIZE", str(get_mpi_local_size()))
    rank, size, local_size = get_mpi_rank(), get_mpi_size(), int_variable("BYTEPS_LOCAL_SIZE", 1)
    local_rank, node = rank % local_size, rank // local_size
    interface = given.get("DMLC_INTERFACE", "eth0")
    if int_variable("BYTEPS_GPU_NIC_BINDING_MODE", 0):
        nic = local_rank // 2
        interface = f"eth{nic}"
        everything = "mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,eth0,eth1,eth2,eth3"
        every = given.get("BYTEPS_WITH_ALL_NICS", "0") == "1"
        given["UCX_NET_DEVICES"] = everything if every else f"mlx5_{nic}:1"
        given.setdefault("BYTEPS_USE_GDR_ALLREDUCE", "1")
    if interface in {name for _, name in socket.if_nameindex()}:
        given["GLOO_SOCKET_IFNAME"] = interface
    elif "DMLC_INTERFACE" in given:
        raise InputError(f"DMLC_INTERFACE is {interface!r}, which is not an interface of this machine")
    host = _address_of(interface)
    folder = os.path.join(tempfile.gettempdir(), f"bps_{text}_socket_{node}")
    os.makedirs(folder, exist_ok=True)
    given |= _SET_BY_BPS_INIT | {
        "BYTEPS_LOCAL_RANK": str(local_rank),
        "BYTEPS_SOCKET_PATH": folder,
        "BYTEPS_UUID": text,
        "DMLC_NODE_HOST": host,
        "DMLC_NUM_SERVER": str(size),
        "DMLC_NUM_WORKER": str(size),
        "DMLC_WORKER_ID": str(rank),
        "UCX_RDMA_CM_SOURCE_ADDRESS": host,
    }
    defaults = _DEFAULTS_OF_BPS_INIT | {
        "BYTEPS_P2P_PARTITION_BYTES": str(int(2048000 * 128 * 2 / size)),
        "BYTEPS_PARTITION_BYTES": "1024000" if size < 128 else "512000",
    }
    for name, value in defaults.items():
        given.setdefault(name, value)
    unused = {name for name in given if name.startswith("BYTEPS_")} - _WITH_EFFECT - _warned
    if unused:
        _warned.update(unused)
        logger.info("bps_init: these variables have no effect: %s", ", ".join(sorted(unused)))
    _join_ranks()


def _address_of(interface: str) -> str:
    """Return the IPv4 address of an interface; "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface[:15].encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])


# ---- hooks


class BroadcastGlobalVariablesHook:
    """Copies the dense weights of rank 0 to all ranks, when the training loop has made its model."""

    def begin(self) -> None:
        """Do nothing; Monolith makes the op of the broadcast here."""

    def after_create_session(self, session: nn.Module, coord: object = None) -> None:
        """Broadcast; a collective call. The session is the model."""
        broadcast_dense(session)


class ByteCCLTelemetryHook:
    """Logs the traffic of the tables of a model over ranks, every so many steps.

    Args:
        interval: The number of steps of a report.

    Attributes:
        reports: The last report of each `SyncShards`.
    """

    def __init__(self, interval: int) -> None:
        self._interval = checks.integer(interval, "ByteCCLTelemetryHook: interval")
        self._metrics: list[CommMetrics] = []
        self._step = 0
        self.reports: list[CommReport] = []

    def begin(self) -> None:
        """Count the steps from 0."""
        self._step = 0

    def after_create_session(self, session: nn.Module, coord: object = None) -> None:
        """Begin to count the traffic of the tables of the model, which is the session."""
        shards = {id(each.shards): each.shards for each in collections_of(session).values()}
        self._metrics = [CommMetrics(each) for each in shards.values() if isinstance(each, SyncShards)]

    def after_run(self, run_context: object = None, run_values: object = None) -> None:
        """Count a step; a collective call in each step that reports."""
        self._step += 1
        if self._step % self._interval == 0:
            self.reports = [metrics.collect(self._step) for metrics in self._metrics]
            for report in self.reports:
                logger.info("step %d: %s", self._step, report.scalars())

    def end(self, session: object = None) -> None:
        """Stop counting."""
        for metrics in self._metrics:
            metrics.close()
        self._metrics = []


def get_sync_run_hooks(is_full_sync: bool = False) -> list[Any]:
    """Return the hooks of synchronous training; without it there are none.

    Args:
        is_full_sync: Whether tables are synchronous too: with BytePS their traffic is then reported.

    Returns:
        Objects with `begin` and `after_create_session`, which takes the model.
    """
    checks.flag(is_full_sync, "is_full_sync")
    if not enable_sync_training():
        return []
    bps = int_variable("MONOLITH_WITH_BYTEPS", 0)
    broadcast = int_variable("MONOLITH_WITH_BYTEPS_BCAST", 1)
    if bps and broadcast == -1:
        return []
    hooks: list[Any] = [BroadcastGlobalVariablesHook()]
    if bps and broadcast and is_full_sync:
        hooks.append(ByteCCLTelemetryHook(TELEMETRY_STEPS))
    return hooks


# ---- benchmarks


def _goodputs(pattern: str, total_len: int, total_niter: int) -> list[float]:
    """Return Gb/s for each INTERVAL calls of an exchange of float32 [total_len], without the first."""
    checks.integer(total_niter, "total_niter", least=2 * INTERVAL)
    rank, size = _join_ranks()
    if checks.integer(total_len, "total_len") % size:
        raise InputError(f"total_len must be a multiple of the {size} ranks, got {total_len}")
    exchange = PATTERNS[pattern](4 * total_len, CommSettings(), RankLink())
    found = []
    for _ in range(total_niter // INTERVAL):
        begin = time.perf_counter()
        for _ in range(INTERVAL):
            exchange.call()
        latency = (time.perf_counter() - begin) / INTERVAL * 1000
        found.append(total_len * 32 / latency / 1e6)
        if rank == 0:
            logger.info("%s: %.3f ms, %.5f Gb/s", pattern, latency, found[-1])
    return found[1:]


def byteps_benchmark_ar(
    total_len: int, total_niter: int = 10000, use_cpu: bool = False, op: str = "pushpull"
) -> list[float]:
    """Measure an all-reduce of float32 values; a collective call. Tensors are in host memory.

    Args:
        total_niter: The number of calls, at least 40.

    Returns:
        Gb/s for every 20 calls, without the first 20.
    """
    return _goodputs("all_reduce", total_len, total_niter)


def byteps_benchmark_a2a(
    total_len: int, total_niter: int = 10000, dst_gpu: bool = True, src_gpu: bool = True
) -> list[float]:
    """Measure an all-to-all of float32 values; a collective call. Tensors are in host memory.

    Args:
        total_len: The number of values that a rank sends, a multiple of the number of ranks. An eighth of it
            is sent if neither side is a GPU, as in Monolith.

    Returns:
        As of `byteps_benchmark_ar`.
    """
    checks.integer(total_len, "total_len")
    return _goodputs("even", total_len if dst_gpu or src_gpu else total_len // 8, total_niter)


def bps_comm_benchmark() -> dict[str, list[tuple[int, float]]]:
    """Run the benchmarks that MONOLITH_BENCHMARK_BPS names, and print a summary.

    It is one of c2g, g2g, c2c, g2c, ar and all. MONOLITH_BENCHMARK_ITERS, MONOLITH_BENCHMARK_BPS_AR_LEN and
    MONOLITH_BENCHMARK_BPS_A2A_LEN set the calls and lengths; an all-to-all is measured at its length, a half
    and a quarter of it.

    Returns:
        (length, mean Gb/s) of each measurement, by benchmark.
    """
    names = ("c2g", "g2g", "c2c", "g2c", "ar")
    wanted = os.environ.get("MONOLITH_BENCHMARK_BPS", "none")
    if wanted not in (*names, "all"):
        raise InputError(f"MONOLITH_BENCHMARK_BPS must be all or one of {', '.join(names)}, got {wanted!r}")
    calls = int_variable("MONOLITH_BENCHMARK_ITERS", 200)
    summary = {}
    for name in names if wanted == "all" else (wanted,):
        results = []
        if name == "ar":
            length = int_variable("MONOLITH_BENCHMARK_BPS_AR_LEN", 65536000)
            for use_cpu in (True, False):
                results.append((length, byteps_benchmark_ar(length, calls, use_cpu=use_cpu)))
        else:
            length = int_variable("MONOLITH_BENCHMARK_BPS_A2A_LEN", 65536000)
            dst_gpu, src_gpu = name.endswith("g"), name.startswith("g")
            for each in (length, length // 2, length // 4):
                results.append((each, byteps_benchmark_a2a(each, calls, dst_gpu=dst_gpu, src_gpu=src_gpu)))
        summary[name] = [(each, sum(found) / len(found)) for each, found in results]
        if dist.get_rank() == 0:
            print(f"{name}_summary:", summary[name])
    return summary
