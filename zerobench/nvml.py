"""NVML: the driver's own account of a GPU, through nvidia-ml-py. Reads only; sets nothing.

Every question may go unanswered: no driver, a driver that went away in the middle of a run, a library older than the
call, a value that this GPU does not keep ("N/A"). An answer is then None with NVML's own words, and never a zero.
nvidia-ml-py is imported when NVML is opened, and not before: a rank on a CPU does without it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from zerobench.readings import Reading

MAX_LINKS = 36
"""More NVLinks than any GPU has (NVML_NVLINK_MAX_LINKS)."""


class NoNvml(Exception):
    """NVML cannot be opened; why."""


class Nvml:
    """An open NVML. A context manager. Raises NoNvml."""

    def __init__(self) -> None:
        try:
            import pynvml  # type: ignore[import-untyped]
        except ImportError:
            raise NoNvml("nvidia-ml-py is not installed") from None
        self._api: Any = pynvml
        try:
            pynvml.nvmlInit()
            self.driver = str(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError as error:
            raise NoNvml(f"NVML: {error}") from None

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.ask("nvmlShutdown")

    def ask(self, name: str, *arguments: Any) -> tuple[Any, str]:
        """(answer, "") of NVML's function `name`, or (None, NVML's reason)."""
        try:
            return getattr(self._api, name)(*arguments), ""
        except self._api.NVMLError as error:
            return None, f"{name}: {error}"

    def constant(self, name: str) -> Any:
        return getattr(self._api, name)

    def gpus(self) -> list[Gpu]:
        """All of this machine, in NVML's order."""
        count, _ = self.ask("nvmlDeviceGetCount")
        handles = [self.ask("nvmlDeviceGetHandleByIndex", i)[0] for i in range(count or 0)]
        return [Gpu(self, handle) for handle in handles if handle is not None]

    def find(self, uuid: str) -> Gpu:
        """The GPU of CUDA's `uuid` (NVML's order is not CUDA's), or the MIG instance on it that CUDA shows.

        Where there is none, the Gpu answers every question with the reason.
        """
        why = "CUDA shows no uuid"
        for name in (uuid,) if uuid.startswith(("GPU-", "MIG-")) else (f"GPU-{uuid}", f"MIG-{uuid}"):
            handle, refused = self.ask("nvmlDeviceGetHandleByUUID", name) if uuid else (None, why)
            why = refused or why
            if handle is not None:
                return self._instance(Gpu(self, handle))
        return Gpu(self, None, why=why)

    def _instance(self, gpu: Gpu) -> Gpu:
        """`gpu`, or its MIG instance: in MIG mode the whole GPU's numbers are other tenants' too."""
        if not gpu.mig_mode():
            return gpu
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        if shown.startswith("MIG-"):
            handle, why = self.ask("nvmlDeviceGetHandleByUUID", shown)
            return Gpu(self, handle, why=why, parent=gpu)
        instances = list(gpu.instances())
        if len(instances) == 1:
            return instances[0]
        return Gpu(self, None, why=f"MIG: {len(instances)} instances, and CUDA_VISIBLE_DEVICES names none", parent=gpu)


class Gpu:
    """One GPU, or one MIG instance (`parent` is then its GPU)."""

    def __init__(self, nvml: Nvml, handle: Any, *, why: str = "", parent: Gpu | None = None) -> None:
        self._nvml, self._handle, self._why, self.parent = nvml, handle, why, parent

    def ask(self, name: str, *arguments: Any) -> tuple[Any, str]:
        return (None, self._why) if self._handle is None else self._nvml.ask(name, self._handle, *arguments)

    @property
    def name(self) -> str:
        return str(self.ask("nvmlDeviceGetName")[0] or "")

    @property
    def uuid(self) -> str:
        return str(self.ask("nvmlDeviceGetUUID")[0] or "")

    def mig_mode(self) -> bool:
        mode, _ = self.ask("nvmlDeviceGetMigMode")
        return bool(mode and mode[0] == self._nvml.constant("NVML_DEVICE_MIG_ENABLE"))

    def instances(self) -> Iterator[Gpu]:
        count, _ = self.ask("nvmlDeviceGetMaxMigDeviceCount")
        for index in range(count or 0):
            handle, _ = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", index)
            if handle is not None:
                yield Gpu(self._nvml, handle, parent=self)

    def used(self) -> Reading:
        """Bytes in use on the whole device (or instance), by every process. The second version of the call tells the
        driver's own reserve apart, which `used` contains, and it is taken off; the first cannot."""
        about, why = self.ask("nvmlDeviceGetMemoryInfo", self._nvml.constant("nvmlMemory_v2"))
        if about is not None:
            return Reading(int(about.used - about.reserved))
        about, older = self.ask("nvmlDeviceGetMemoryInfo")
        if about is not None:
            return Reading(int(about.used), "the driver's reserve included: this NVML cannot tell it apart")
        return Reading(None, older or why)

    def processes(self) -> tuple[dict[int, int | None] | None, str]:
        """Bytes by pid of the processes that compute on it, None for one whose bytes are not available. Or why there is
        no list. In a container the pids may be the host's, or the list empty."""
        listed, why = self.ask("nvmlDeviceGetComputeRunningProcesses_v3")
        if listed is None:
            listed, _ = self.ask("nvmlDeviceGetComputeRunningProcesses_v2")
        return ({int(p.pid): p.usedGpuMemory for p in listed}, "") if listed is not None else (None, why)

    def exclusive_mode(self) -> bool:
        """Whether the driver lets one process only compute on it."""
        mode, _ = self.ask("nvmlDeviceGetComputeMode")
        return mode is not None and mode == self._nvml.constant("NVML_COMPUTEMODE_EXCLUSIVE_PROCESS")

    def active_links(self) -> int:
        """NVLinks that are up."""
        return sum(self.ask("nvmlDeviceGetNvLinkState", link)[0] == 1 for link in range(MAX_LINKS))

    def field(self, field: int, scope: int = 0) -> tuple[Reading, int]:
        """(value, bits of its type) of one of NVML's numbered fields. Each value carries a return code of its own."""
        values, why = self.ask("nvmlDeviceGetFieldValues", [(field, scope)])
        if values is None:
            return Reading(None, why), 0
        value = values[0]
        if value.nvmlReturn != 0:
            return Reading(None, f"field {field}: {self._nvml.constant('NVMLError')(value.nvmlReturn)}"), 0
        kind, bits = _VALUE_TYPES.get(int(value.valueType), ("", 0))
        if not kind:
            return Reading(None, f"field {field}: a value of type {value.valueType}"), 0
        return Reading(int(getattr(value.value, kind))), bits

    def clock_mhz(self) -> Reading:
        """The multiprocessors' clock, now."""
        return self._whole("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM")

    def _whole(self, name: str, constant: str) -> Reading:
        value, why = self.ask(name, self._nvml.constant(constant))
        return Reading(None if value is None else int(value), why)


_VALUE_TYPES = {1: ("uiVal", 32), 2: ("ulVal", 64), 3: ("ullVal", 64), 4: ("sllVal", 63), 6: ("usVal", 16)}
"""NVML_VALUE_TYPE_* that whole numbers come in: the member of the union, and after how many bits it goes round."""


class Tenancy:
    """This process on a GPU: what it holds, and whether anybody else is there. Made *before* the process opens a
    context, so that what was there before is known to be others'.

    In a container pids may be the host's, or hidden; then the device's totals speak for the process where nobody else
    was on it before and nobody else is listed now.
    """

    IDLE_NBYTES = 64 << 20
    """A device on which no more than this is in use holds nobody's context: a context alone takes hundreds of MB."""

    def __init__(self, gpu: Gpu, pid: int | None = None) -> None:
        self.gpu, self._pid = gpu, os.getpid() if pid is None else pid
        before, _ = gpu.processes()
        used = gpu.used().value
        self._known = before or {}
        self._found_idle = before is not None and not before and used is not None and used <= self.IDLE_NBYTES

    def others(self) -> str:
        """ "" where this process has the device to itself; else why that is not known, or not so."""
        listed, why = self.gpu.processes()
        if listed is None:
            return why
        if len(listed) > 1:
            return f"{len(listed)} processes share this GPU"
        if self._mine(listed) or self._found_idle or self.gpu.exclusive_mode():
            return ""
        return "the GPU was in use before, and its processes are not shown"

    def nbytes(self) -> Reading:
        """Bytes of this process, with how they were told apart; or None and why they cannot be."""
        listed, why = self.gpu.processes()
        if listed is None:
            return Reading(None, why)
        own = listed[self._pid] if self._mine(listed) else None
        if own is not None:
            return Reading(own, "this process")
        if obstacle := self.others():
            return Reading(None, f"{obstacle}, and this process's own bytes are not available")
        used = self.gpu.used()
        how = "the whole device, which nobody else uses"
        return Reading(used.value, used.why if used.value is None else "; ".join(filter(None, (how, used.why))))

    def _mine(self, listed: dict[int, int | None]) -> bool:
        """Whether the pid that is listed is this process's, and not another's that has the same number elsewhere."""
        return self._pid in listed and self._pid not in self._known
